"""Copies of adapter files for vLLM, which outlive the names at vLLM."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from loras import save
from rlctl_servers.adapters.adapters import Fitting
from rlctl_servers.adapters.lora_table import Held, LoraTable
from rlctl_servers.server.http import Answer
from rlctl_servers.updates.checkpoints import digest_of
from rlctl_vllm.updates.adapters import Adapters, Useless, adapters_of_requests

from rlctl.engine import Call
from rlctl.v1.verbs_pb2 import Adapter
from rlctl.weights.formats import lora

pytestmark = pytest.mark.usefixtures("no_grace")


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl_vllm.updates.adapters.KEPT_S", 0.0)
    monkeypatch.setattr("rlctl_vllm.updates.adapters.AGAIN_S", 0.0)


IDLE = """vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
"""
BUSY = """vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
"""


def users(seconds: float, *, running: str = "", waiting: str = "") -> str:
    """What vLLM says at a time of the adapters of its requests."""
    labels = f'max_lora="1",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} {seconds}\n"


class Server:
    """A vLLM that unloads."""

    def __init__(self) -> None:
        self.http = self
        self.url = "http://127.0.0.1:7"
        self.metrics = IDLE
        self.models: list[dict[str, str]] = []

    async def call(self, path: str, *_: object, **__: object) -> Answer:
        await asyncio.sleep(0)
        return Answer(200, self.metrics if path == "/metrics" else {})

    async def ask(self, path: str, **_: object) -> Any:
        assert path == "/v1/models"
        return {"data": self.models}


def serving(server: Server, tmp_path: Path) -> tuple[Adapters, list[Path]]:
    """Adapters of an attached server: two serving adapters, and the copy of a replaced adapter."""
    table = LoraTable()
    silent: Any = None
    adapters = Adapters(server, silent, silent, table, None, None)  # type: ignore[arg-type]
    copies = [tmp_path / name for name in ("math", "prose", "replaced")]
    for copy in copies:
        copy.mkdir()
    for copy in copies[:2]:
        info = Adapter(name=copy.name, version="1")
        held = Held(table.new_name(info), info, tensors=2, nbytes=8)
        table.put(held)
        adapters._paths[held.name] = copy
    adapters._useless[copies[2]] = Useless("replaced@1", 0.0)
    return adapters, copies


async def test_a_stage_server_that_ends_unloads_several_adapters_beside_old_copies(tmp_path: Path) -> None:
    adapters, copies = serving(Server(), tmp_path)
    await adapters.leave()
    adapters.close()
    assert not adapters._left
    assert not [copy for copy in copies if copy.exists()]


async def test_copies_stay_while_requests_may_need_them(tmp_path: Path) -> None:
    """The old copy is removed after its time."""
    adapters, copies = serving(Server(), tmp_path)
    await adapters.leave()
    adapters.close(busy=True)
    assert [copy.exists() for copy in copies] == [True, True, False]


async def test_a_copy_stays_as_long_as_a_request_at_vllm_has_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of an earlier stage server's client, say, that waits for its turn."""
    server = Server()
    adapters, copies = serving(server, tmp_path)

    async def looks() -> bool:
        for _ in range(3):
            await adapters._remove_useless()
        return copies[2].exists()

    server.metrics = BUSY + users(7.0) + users(9.0, running="other@1", waiting="theirs@2,replaced@1")
    assert await looks()
    server.metrics = BUSY + users(7.0, running="replaced@1")  # of before
    server.metrics += users(11.0, running="other@1")
    monkeypatch.setattr("rlctl_vllm.updates.adapters.AGAIN_S", 60.0)
    assert await looks(), "the metrics are late"
    monkeypatch.setattr("rlctl_vllm.updates.adapters.AGAIN_S", 0.0)
    paused = True
    adapters._stopped = lambda: paused
    assert await looks(), "a paused vLLM counts nothing"
    paused = False
    assert not await looks()


@pytest.mark.parametrize(
    ("metrics", "known"),
    [
        ("", None),
        (IDLE, ""),
        (BUSY, None),
        (IDLE + IDLE.replace('engine="0"', 'engine="1"'), ""),
        (BUSY + IDLE.replace('engine="0"', 'engine="1"') + users(1.0), None),
        (BUSY + users(2.0, running="b") + users(1.0, running="a"), users(2.0, running="b").strip()),
    ],
)
def test_the_adapters_of_requests_are_known_or_not(metrics: str, known: str | None) -> None:
    assert adapters_of_requests(metrics) == known


async def test_copies_are_removed_once_their_vllm_has_ended(tmp_path: Path) -> None:
    adapters, copies = serving(Server(), tmp_path)
    adapters.close(gone=True)
    assert not [copy for copy in copies if copy.exists()]


async def test_copies_that_an_earlier_stage_server_has_left_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its vLLM has ended, and the next one at this address has none of the names. The copies of other servers stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    silent: Any = None
    server, other = Server(), Server()
    other.url = "http://127.0.0.1:8"
    path = save(tmp_path / "math", {"base_model.model.q_proj.lora_A.weight": torch.ones(2, 2)})
    config, stored = lora.open_adapter(path)
    fitting = Fitting(path, config, digest_of(stored))
    stored.close()

    def copied(server: Server, name: str) -> Path:
        adapters = Adapters(server, silent, silent, LoraTable(), None, None)  # type: ignore[arg-type]
        return adapters._copy(fitting, name)

    copies = [copied(server, "math@1#00000000-1"), copied(server, "math@2#00000000-2"), copied(other, "math@1#1-1")]
    fresh = Adapters(server, silent, silent, LoraTable(), None, None)  # type: ignore[arg-type]
    server.metrics = BUSY + users(1.0, running="math@2#00000000-2")
    await fresh.take_over(Call("start", 5.0))
    await fresh._remove_useless()
    assert [copy.exists() for copy in copies] == [False, True, True]
    fresh.close(busy=True)
    again = Adapters(server, silent, silent, LoraTable(), None, None)  # type: ignore[arg-type]
    await again.take_over(Call("start", 5.0))
    again.close()
    assert [copy.exists() for copy in copies] == [False, False, True]

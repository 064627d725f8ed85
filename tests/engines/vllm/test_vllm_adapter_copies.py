"""Copies of adapter files for vLLM, which outlive the names at vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rlctl_servers.adapters.lora_table import Held, LoraTable
from rlctl_servers.server.http import Answer
from rlctl_vllm.updates.adapters import Adapters

from rlctl.v1.verbs_pb2 import Adapter

pytestmark = pytest.mark.usefixtures("no_grace")


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl_vllm.updates.adapters.KEPT_S", 0.0)


class Server:
    """A vLLM that unloads."""

    def __init__(self) -> None:
        self.http = self

    async def call(self, *_: object, **__: object) -> Answer:
        await asyncio.sleep(0)
        return Answer(200, {})


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
    adapters._useless[copies[2]] = 0.0
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

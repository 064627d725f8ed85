"""Adapters that a stage server leaves at a real vLLM, which was running before it and outlives it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from loras import lora, save
from plain_server import Plain
from rlctl_servers.server.http import Http
from rlctl_vllm.engine import VLLMEngine
from server_stage import Driver

from rlctl.engine import EngineConfig
from rlctl.runtime.event_loops import LoopThread
from rlctl.v1 import verbs_pb2 as v

pytestmark = pytest.mark.timeout(600)


class WithAdapters(Plain):
    """A server on a port, with room for adapters."""

    def command(self) -> Sequence[str]:
        return [*super().command(), "--enable-lora", "--max-lora-rank", "8"]


@pytest.fixture(scope="module")
def theirs(vllm: str, tiny: tuple[Any, Path]) -> Iterator[Server]:
    """A server of somebody else, who has loaded an adapter."""
    server = Server(tiny[1])
    try:
        server.start()
        yield server
    finally:
        server.stop()


class Server:
    def __init__(self, checkpoint: Path) -> None:
        self._loop = LoopThread("theirs")
        self._process = WithAdapters(EngineConfig(str(checkpoint), dtype="float32"))
        self.checkpoint, self.url = checkpoint, self._process.http.url
        self._http = Http("vLLM", self.url)

    def start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
            self._loop.submit(self._process.start(lambda error: None)).result(400)

    def stop(self) -> None:
        self._loop.submit(self._http.close()).result(10)
        self._loop.submit(self._process.stop()).result(60)
        self._loop.stop()

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What a client says to the server itself."""
        answer = self._loop.submit(self._http.call(path, body, timeout_s=60)).result(70)
        assert answer.ok, answer.message
        return answer.body

    def names(self) -> set[str]:
        return {card["id"] for card in self.call("/v1/models")["data"] if card["parent"]}


def attached(server: Server, root: Path) -> Driver:
    driver = Driver(VLLMEngine, server.checkpoint, options={"url": server.url, "allowed_roots": str(root)})
    driver.start()
    return driver


def load(driver: Driver, name: str, path: str) -> None:
    adapter = v.Adapter(name=name, version="1")
    driver.tell(v.PrepareUpdateRequest(kind=v.UPDATE_KIND_ADAPTER, adapter=adapter), update_id="u")
    driver.tell(v.LoadAdapterRequest(name=name, path=path, version="1"), update_id="u")
    driver.tell(v.SealUpdateRequest(), update_id="u")
    driver.tell(v.CommitUpdateRequest(), update_id="u")


def test_adapters_of_an_earlier_stage_server_are_unloaded(
    theirs: Server, tiny: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters of an operator stay. No name is left at vLLM without its files: a request with it would end vLLM."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = save(tmp_path / "math", lora(tiny[0], 5))
    theirs.call("/v1/load_lora_adapter", {"lora_name": "theirs@1", "lora_path": path})
    first = attached(theirs, tmp_path)
    try:
        load(first, "math", path)
        assert len(theirs.names()) == 2
        again = attached(theirs, tmp_path)  # as after a kill: the first unloads nothing
        try:
            assert theirs.names() == {"theirs@1"}
            monkeypatch.setattr("rlctl_vllm.updates.adapters.KEPT_S", 0.0)
            load(again, "math", path)
            again.tell(v.UnloadAdapterRequest(name="math"))
            load(again, "prose", path)
        finally:
            again.stop()
        assert theirs.names() == {"theirs@1"}, "a stage server that ends unloads its own"
    finally:
        first.stop()
    assert theirs.names() == {"theirs@1"}
    assert not list(tmp_path.glob("rlctl-adapters-*")), "no copy is left either"
    body = {"model": "theirs@1", "prompt": [1, 2, 3], "max_tokens": 4}
    assert theirs.call("/v1/completions", body)["choices"], "vLLM serves"


def test_a_stage_server_that_ends_leaves_no_name_without_files(
    theirs: Server, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    before = theirs.names()
    stage = attached(theirs, tmp_path)
    load(stage, "math", save(tmp_path / "math", lora(tiny[0], 5)))
    (name,) = theirs.names() - before
    stage.stop()
    assert name not in theirs.names()

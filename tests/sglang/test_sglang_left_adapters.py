"""A real SGLang of two ranks that was running before its stage server, and outlives it: adapters, then every path."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import path_suite
import pytest
from loras import lora, save
from rlctl_sglang.engine import SGLangEngine
from server_stage import Driver
from sglang_server import LORA, keys

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1 import verbs_pb2 as v

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def lent(sglang: str, tiny: tuple[Any, Path], sabotaged: dict[str, str]) -> Iterator[Driver]:
    """A server of two ranks that ends after every stage server that attaches to it."""
    driver = Driver(SGLangEngine, tiny[1], tp_size=2, options=LORA)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in sabotaged.items():
                patch.setenv(name, value)
            driver.start()
        yield driver
    finally:
        driver.stop()


@pytest.fixture
def options(lent: Driver, tmp_path: Path) -> dict[str, str]:
    """The options that attach to the server."""
    return {"url": lent.engine._server.http.url, "allowed_roots": str(tmp_path), **keys(lent, tmp_path)}


def attached(lent: Driver, options: dict[str, str]) -> Driver:
    driver = Driver(SGLangEngine, Path(lent.engine._config.model_path), tp_size=2, options=options)
    driver.start()
    return driver


def call(lent: Driver, path: str, **body: Any) -> Any:
    """What a client says to the server itself."""
    http = lent.engine._server.http
    answer = lent.admin.submit(http.call(path, body or None, timeout_s=60, admin=not path.startswith("/v1"))).result(70)
    assert answer.ok, answer.message
    return answer.body


def names(lent: Driver) -> list[set[str]]:
    """The adapters of the server, and of each rank."""
    registered = {card["id"] for card in call(lent, "/v1/models")["data"] if card["parent"]}

    async def ranks() -> list[set[str]]:
        return await lent.engine._ranks.adapters(Call("c", asyncio.get_running_loop().time() + 30))

    return [registered, *lent.admin.submit(ranks()).result(40)]


def load(driver: Driver, name: str, path: str, update: str = "u") -> None:
    adapter = v.Adapter(name=name, version="1")
    driver.tell(v.PrepareUpdateRequest(kind=v.UPDATE_KIND_ADAPTER, adapter=adapter), update_id=update)
    driver.tell(v.LoadAdapterRequest(name=name, path=path, version="1"), update_id=update)
    driver.tell(v.SealUpdateRequest(), update_id=update)
    driver.tell(v.CommitUpdateRequest(), update_id=update)


def test_adapters_of_an_earlier_stage_server_are_unloaded_at_every_rank(
    lent: Driver, options: dict[str, str], tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    """Adapters of an operator stay."""
    path = save(tmp_path / "math", lora(tiny[0], 5))
    call(lent, "/load_lora_adapter", lora_name="theirs@1", lora_path=path)
    first = attached(lent, options)
    try:
        load(first, "math", path)
        staged = v.Adapter(name="prose", version="1")
        first.tell(v.PrepareUpdateRequest(kind=v.UPDATE_KIND_ADAPTER, adapter=staged), update_id="open")
        first.tell(v.LoadAdapterRequest(name="prose", path=path, version="1"), update_id="open")
        assert [len(found) for found in names(lent)] == [3, 3, 3]
        again = attached(lent, options)  # as after a kill: the first unloads nothing
        try:
            assert names(lent) == [{"theirs@1"}] * 3
            load(again, "math", path)
            assert [len(found) for found in names(lent)] == [2, 2, 2]
        finally:
            again.stop()
        assert names(lent) == [{"theirs@1"}] * 3, "a stage server that ends unloads its own"
    finally:
        first.stop()
        call(lent, "/unload_lora_adapter", lora_name="theirs@1")
    assert names(lent) == [set()] * 3


def test_adapters_in_use_are_named_and_unloaded_later(
    lent: Driver,
    options: dict[str, str],
    tiny: tuple[Any, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = save(tmp_path / "math", lora(tiny[0], 5))
    first = attached(lent, options)
    try:
        load(first, "math", path)
        (name,) = names(lent)[0]
        http = lent.engine._server.http
        settings = {"max_new_tokens": 400, "ignore_eos": True}
        prompts = [[1, 2, number] for number in range(32)]  # the attach must not outlast them
        body = {"input_ids": prompts, "lora_path": name, "sampling_params": settings}
        running = lent.admin.submit(http.call("/generate", body, timeout_s=120, admin=False))
        while not lent.tell(v.GetLoadsRequest()).running:
            time.sleep(0.05)
        monkeypatch.setattr("rlctl_sglang.updates.adapters.UNLOAD_S", 0.5)
        with caplog.at_level(logging.WARNING):
            again = attached(lent, options)
        try:
            assert name in caplog.text
            assert "requests use them" in caplog.text
            assert not running.done()
            call(lent, "/abort_request", abort_all=True)
            running.result(120)
            load(again, "math", path)
            assert name not in set().union(*names(lent))
        finally:
            again.stop()
    finally:
        first.stop()
    assert names(lent) == [set()] * 3


def test_adapters_of_other_clients_count_among_those_of_the_server(
    lent: Driver, options: dict[str, str], tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    """SGLang would drop the adapter that was used least recently."""
    path = save(tmp_path / "math", lora(tiny[0], 5))
    stage = attached(lent, options)
    theirs = {f"theirs-{number}" for number in range(3)}
    try:
        for name in theirs:
            call(lent, "/load_lora_adapter", lora_name=name, lora_path=path)
        load(stage, "math", path)
        with pytest.raises(RlctlError) as full:
            load(stage, "prose", path, "v")
        assert full.value.reason is Reason.UNSUPPORTED
        assert "--max-loaded-loras" in full.value.message
        assert theirs < names(lent)[0]
        stage.tell(v.AbortUpdateRequest(), update_id="v")
    finally:
        stage.stop()
        for name in theirs:
            call(lent, "/unload_lora_adapter", lora_name=name)


def test_an_adapter_that_a_rank_finds_otherwise_on_its_host_is_refused(
    lent: Driver, options: dict[str, str], tiny: tuple[Any, Path], tmp_path: Path, ordered: Path
) -> None:
    """A path may exist on every node, with different files."""
    path, other = save(tmp_path / "math", lora(tiny[0], 5)), save(tmp_path / "other", lora(tiny[0], 6))
    ordered.write_text(f"other-host:{path}={other}@1")
    stage = attached(lent, options)
    try:
        with pytest.raises(RlctlError) as refused:
            load(stage, "math", path)
        assert (refused.value.reason, refused.value.field) == (Reason.CHECKPOINT_MISMATCH, "path")
        assert "the host of rank 1 has another adapter" in refused.value.message
        stage.tell(v.AbortUpdateRequest(), update_id="u")
        assert names(lent) == [set()] * 3
        ordered.write_text(f"other-host:{other}={path}@1")
        load(stage, "math", path)
        assert [adapter.name for adapter in stage.tell(v.ListAdaptersRequest()).adapters] == ["math"]
    finally:
        stage.stop()


@pytest.fixture(scope="module")
def served(
    lent: Driver, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[path_suite.Served]:
    """A stage server that stays attached: its tests come last."""
    options = keys(lent, tmp_path_factory.mktemp("keys")) | {"allowed_roots": str(tmp_path_factory.getbasetemp())}
    with rlctl.embedded([lent.engine._server.http.url], options=options) as fleet:
        yield path_suite.Served(fleet, tiny[0], ranks=2)


model = path_suite.model
test_an_update_is_verified_by_every_rank = path_suite.test_an_update_is_verified_at_level_expected_by_every_rank
test_a_staged_update_reaches_every_rank = path_suite.test_a_staged_update_reaches_every_rank_while_a_request_runs

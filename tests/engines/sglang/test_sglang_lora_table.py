"""Which adapter a sample gets, what the server calls it, and which parts of fused layers an adapter may have."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rlctl_servers.adapters.adapters import LAYERS, Fitting, OpenAdapter
from rlctl_servers.adapters.lora_table import Held, LoraTable, is_from_rlctl
from rlctl_sglang.state import State
from rlctl_sglang.updates.adapters import Adapters, _refuse_parts, limits_of
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, PAUSE_MODE_IN_PLACE, PAUSE_MODE_UNSPECIFIED
from rlctl.v1.verbs_pb2 import Adapter, AdapterConfig, PrepareUpdateRequest, UnloadAdapterRequest


def held(table: LoraTable, name: str, version: str) -> Held:
    info = Adapter(name=name, version=version)
    return Held(table.new_name(info), info, tensors=2, nbytes=8)


def test_a_name_is_used_for_one_load_only() -> None:
    table = LoraTable()
    names = [held(table, "math", "1").name for _ in range(3)]
    assert len(set(names)) == 3
    assert all(name.startswith("math@1") for name in names)


def test_a_later_stage_server_uses_other_names() -> None:
    """An attached server keeps the adapters of the stage server before."""
    assert held(LoraTable(), "math", "1").name != held(LoraTable(), "math", "1").name


def test_the_names_of_any_stage_server_are_known_from_those_of_others() -> None:
    table = LoraTable()
    assert all(
        is_from_rlctl(held(table, name, version).name) for name, version in (("math", "1"), ("a\nb", ""), ("@#", "#"))
    )
    others = (
        "math",
        "math@1",
        "math@1#2",
        "math@1#0123abcd-0",
        "math@1#0123ABCD-1",
        "math@1#0123abcd-1b",
        "#0123abcd-1",
    )
    assert not any(map(is_from_rlctl, others))


def test_a_sample_keeps_what_it_began_with() -> None:
    table = LoraTable()
    one, two = held(table, "math", "1"), held(table, "math", "2")
    assert table.put(one) is None
    with table.using("math") as mine:
        assert mine is one
        assert table.put(two) is one
        assert (table.users(one.name), table.users(two.name)) == (1, 0)
        with table.using("math") as other:
            assert other is two
    assert table.users(one.name) == 0
    assert table.drop("math") is two
    with pytest.raises(RlctlError) as unknown, table.using("math"):
        pass
    assert unknown.value.reason is Reason.ADAPTER_NOT_FOUND
    with table.using("") as none:
        assert none is None


class Deaf:
    """Requests at a server that has no ear for what ends them."""

    def using(self, adapter: str) -> list[str]:
        return []

    async def abort(self, rids: list[str], *, all_of_them: bool) -> None:
        raise Reason.UNREACHABLE.error("nobody is there")


async def test_what_has_taken_the_place_of_an_adapter_was_not_refused() -> None:
    """Also when the requests of the one before cannot be ended: it is what new requests get."""
    table, deaf = LoraTable(), Deaf()
    silent: Any = deaf
    adapters = Adapters(silent, State(), silent, silent, table, {}, None)
    one, two = held(table, "math", "1"), held(table, "math", "2")
    table.put(one)
    adapters._update = OpenAdapter("u", two.info, staged=two)
    with table.using("math"), pytest.raises(RlctlError) as failed:
        await adapters.commit(Call("c", 0.0, update_id="u"))
    assert (table.by_name["math"], failed.value.outcome) == (two, OUTCOME_DIRTY)
    with table.using("math"), pytest.raises(RlctlError) as failed:
        await adapters.drop(UnloadAdapterRequest(name="math"), Call("c", 0.0))
    assert (table.by_name, failed.value.outcome) == ({}, OUTCOME_DIRTY)


class Unloading(Adapters):
    """Of a server that does as it is told."""

    def __init__(self, state: State, table: LoraTable) -> None:
        silent: Any = Deaf()
        super().__init__(silent, state, silent, silent, table, {}, None)
        self.unloaded: list[str] = []

    async def unload(self, name: str) -> bool:
        self.unloaded.append(name)
        return True


class Busy:
    """A server on which a request of another client uses every adapter until ``free`` is set."""

    def __init__(self) -> None:
        self.http = self
        self.free = asyncio.Event()
        self.calls: list[str] = []

    async def call(self, path: str, *_: object, **__: object) -> None:
        self.calls.append(path)
        await self.free.wait()


async def test_no_adapter_is_loaded_while_sglang_waits_with_an_unload(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would take the load after the unload only, and the stage would give SGLang up."""
    monkeypatch.setattr("rlctl_sglang.updates.adapters.UNLOAD_S", 0.01)
    busy, silent, call = Busy(), Deaf(), Call("c", 0.0)
    adapters = Adapters(busy, State(), silent, silent, LoraTable(), {}, None)  # type: ignore[arg-type]
    fitting = Fitting("/adapters/math", AdapterConfig(), "")
    assert [await adapters.unload("math@1#0"), await adapters.unload("math@1#0")] == [False, False]
    with pytest.raises(RlctlError) as refused:
        await adapters.read("math@1#1", fitting, False, call)
    assert (refused.value.reason, "math@1#0" in refused.value.message) == (Reason.ACTIVE_REQUESTS, True)
    assert busy.calls == ["/unload_lora_adapter"]
    busy.free.set()
    await eventually(lambda: not adapters._unloads)
    assert await adapters.unload("math@1#0")


async def test_what_was_replaced_under_a_pause_is_unloaded_after_it() -> None:
    """SGLang cannot let go of it before; each version that a trainer sends comes under one."""
    table, state = LoraTable(), State(paused=PAUSE_MODE_IN_PLACE)
    adapters = Unloading(state, table)
    one, two = held(table, "math", "1"), held(table, "math", "2")
    table.put(one)
    adapters._update = OpenAdapter("u", two.info, staged=two)
    await adapters.commit(Call("c", 0.0, update_id="u"))
    assert adapters.unloaded == []
    state.paused = PAUSE_MODE_UNSPECIFIED
    adapters.sweep_soon()
    await eventually(lambda: adapters.unloaded == [one.name])
    state.paused = PAUSE_MODE_IN_PLACE
    adapters._left.append("math@0")
    adapters.sweep_soon()
    call = Call("c", 0.0, update_id="v")
    await adapters.prepare(PrepareUpdateRequest(adapter=two.info), call)
    await adapters.abort(call)
    assert adapters.unloaded == [one.name], "paused again"
    state.paused = PAUSE_MODE_UNSPECIFIED
    await adapters.prepare(PrepareUpdateRequest(adapter=two.info), call)
    assert adapters.unloaded == [one.name, "math@0"], "before what is held is counted"


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        (["q_proj", "v_proj"], True),
        (["q_proj", "k_proj", "v_proj", "gate_proj"], True),
        (["o_proj", "down_proj"], True),
        (["q_proj"], False),
        (["k_proj", "v_proj"], False),
        (["up_proj"], False),
    ],
)
def test_parts_of_fused_layers(words: list[str], *, fits: bool) -> None:
    modules = [f"model.layers.{number}.{word}" for number in range(2) for word in words]
    if fits:
        _refuse_parts(modules, "path")
        return
    with pytest.raises(RlctlError) as refused:
        _refuse_parts(modules, "path")
    assert refused.value.reason is Reason.UNSUPPORTED


def test_parts_that_differ_between_layers_are_refused() -> None:
    with pytest.raises(RlctlError) as refused:
        _refuse_parts([*(f"model.layers.0.{word}" for word in ("q_proj", "v_proj")), *ALL_OF_ONE], "path")
    assert refused.value.reason is Reason.UNSUPPORTED


ALL_OF_ONE = [f"model.layers.1.{word}" for word in ("q_proj", "k_proj", "v_proj")]


def test_what_the_server_was_started_for() -> None:
    limits = limits_of({"max_lora_rank": 8, "lora_target_modules": ["q_proj", "lm_head"], "max_loaded_loras": 3})
    assert (limits.rank, set(limits.targets), limits.most) == (8, {"q_proj"}, 3)
    every = limits_of({"max_lora_rank": 8, "lora_target_modules": ["all"], "lora_paths": ["a"]})
    assert (set(every.targets), every.most) == (set(LAYERS), 0)

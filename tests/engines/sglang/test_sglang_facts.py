"""What a running SGLang's arguments rule out, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from rlctl_servers.updates.version_labels import Stamps
from rlctl_sglang import SGLangEngine
from rlctl_sglang.options import parse_options
from rlctl_sglang.requests.bodies import has_grammar
from rlctl_sglang.server.facts import Facts, ask
from rlctl_sglang.server.update_blockers import KEEPERS

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call, EngineConfig
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import GenerateRequest, Sample

MEMORY = ("FlushCache", "ReleaseMemory", "ResumeMemory")
WRITES = ("UpdateWeightsFromDisk", "UpdateWeightsFromDistributed", "UpdateWeightsFromTensor")
VERBS = SGLangEngine.verbs()


async def unsupported(*, plugin: bool = True, **info: Any) -> set[str]:
    """Verbs that such a server cannot do, of those that SGLang 0.5.23 has the routes for."""

    class Control:
        async def ask(self, path: str, **_: Any) -> dict[str, Any]:
            if path == "/server_info":
                return {"version": "0.5.23", "device": "cpu", "enable_memory_saver": True, **info}
            names = "update_weight_version update_weights_from_disk weights_checker flush_cache"
            names += " release_memory_occupation resume_memory_occupation load_lora_adapter unload_lora_adapter"
            return {"paths": {f"/{name}": {} for name in names.split()}}

    async def attach() -> list[dict[str, Any]]:
        assert not {"dp_size", "attn_dp_size"} & info.keys(), "SGLang joins the answers of several data-parallel ranks"
        return [{"rank": rank} for rank in range(int(info.get("tp_size", 1)))] if plugin else []

    control: Any = Control()
    return set((await ask(control, VERBS, attach, Call("c", 0.0))).unsupported)


async def test_a_plain_server_takes_weights_in_by_every_path() -> None:
    assert not {*WRITES, *MEMORY} & await unsupported()
    assert not {*WRITES} & await unsupported(radix_cache_backend=None, enable_lmcache=False, weight_cache_mode="off")


@pytest.mark.parametrize(
    ("keeper", "value"),
    [
        *((keeper.name, "flexkv") for keeper in KEEPERS if not keeper.on and not keeper.off),
        ("enable_eplb", True),
        ("offload_group_size", 4),
        ("dwdp_size", 2),
        ("ple_offload_backend", "file"),
        ("weight_cache_mode", "client"),
    ],
)
async def test_what_a_load_or_a_flush_does_not_reach_rules_out_updates(keeper: str, value: object) -> None:
    assert {*WRITES} <= await unsupported(**{keeper: value})


async def test_a_store_of_kv_entries_rules_out_adapters() -> None:
    assert "LoadAdapter" in await unsupported(enable_lora=True, enable_lmcache=True)
    assert "LoadAdapter" not in await unsupported(enable_lora=True, enable_eplb=True)


async def test_ranks_that_do_not_answer_rule_out_adapters() -> None:
    """SGLang answers a load of an adapter for rank 0 only."""
    assert "LoadAdapter" in await unsupported(enable_lora=True, tp_size=2, plugin=False)
    assert "LoadAdapter" in await unsupported(enable_lora=True, pp_size=2)
    assert "LoadAdapter" not in await unsupported(enable_lora=True, tp_size=2)
    assert "LoadAdapter" not in await unsupported(enable_lora=True, plugin=False)


async def test_ranks_that_do_not_answer_rule_out_memory() -> None:
    """SGLang answers a release or a resume once rank 0 has done it."""
    memory = {"ReleaseMemory", "ResumeMemory"}
    assert memory <= await unsupported(tp_size=2, plugin=False)
    assert memory <= await unsupported(pp_size=2)
    assert not memory & await unsupported(tp_size=2)
    assert not memory & await unsupported(plugin=False)


async def test_settings_as_sglang_writes_them_where_nothing_is_set_rule_out_nothing() -> None:
    off = {"offload_group_size": -1, "dwdp_size": 1, "ple_offload_backend": "pinned", "elastic_ep_backend": None}
    off |= {"kt_weight_path": None, "weight_cache_mode": "off", "enable_eplb": False, "hicache_storage_backend": None}
    assert not {*WRITES} & await unsupported(**off)


DATA_PARALLEL = (
    {"dp_size": 2},
    {"dp_size": 2, "tp_size": 2, "enable_dp_attention": True},  # before SGLang 0.5.23
    {"attn_dp_size": 2, "tp_size": 2, "enable_dp_attention": True},
)


@pytest.mark.parametrize("info", DATA_PARALLEL)
async def test_what_several_data_parallel_ranks_do_not_all_answer_is_unsupported(info: dict[str, Any]) -> None:
    verbs = await unsupported(enable_lora=True, **info)
    assert {*WRITES, *MEMORY, "CheckWeights", "SendWeights", "LoadAdapter"} <= verbs
    assert "GetLoads" not in verbs


@pytest.mark.parametrize("info", DATA_PARALLEL)
def test_ranks_of_dp_attention_are_counted_once(info: dict[str, Any]) -> None:
    facts = Facts(info, {})
    layout = facts.layout(EngineConfig("m"), readable=False)
    assert (facts.dp_ranks, layout.dp_size, len(layout.workers)) == (2, 2, info.get("tp_size", 1))
    assert "data-parallel" in facts.no_decode_check


async def test_weights_that_are_cached_are_not_released() -> None:
    assert "ReleaseMemory" in await unsupported(weight_cache_mode="client")


@pytest.mark.parametrize("name", ["grpc_port", "grpc_mode", "smg_grpc_mode"])
def test_a_server_that_is_launched_serves_no_grpc(name: str) -> None:
    with pytest.raises(RlctlError) as refused:
        parse_options({name: "1"})
    assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED, f"options.{name}")


def refused_span(stamps: Stamps, since: WeightVersion, label: str) -> str:
    """Why a sample of two tokens is not taken for one of this label's, or ""."""
    sample = Sample(completion_tokens=2)
    try:
        stamps.spans(
            sample, [{"version": "theirs", "start": 2, "end": 2}, {"version": label, "start": 0, "end": 2}], since
        )
    except RlctlError as error:
        return error.message if error.reason is Reason.ENGINE_FAILED else error.reason.name
    assert [span.version for span in sample.versions] == [stamps.version(label)]
    return ""


def test_a_version_that_is_not_ours_is_not_told() -> None:
    stamps = Stamps("default")
    assert not refused_span(stamps, stamps.present, "default")
    assert "did not call them" in refused_span(stamps, stamps.present, "theirs")


def test_a_version_that_the_server_was_past_is_not_told() -> None:
    """Started anew behind a proxy it has its first label again, and the weights that go with it."""
    stamps = Stamps("default")
    first, second = WeightVersion(label="a", sequence=1), WeightVersion(label="b", sequence=2)
    stamps.bind(first)
    before = stamps.present
    stamps.bind(second, Stamps.of(second))
    stamps.label = Stamps.of(second)
    assert not refused_span(stamps, before, "default"), "it began before the update"
    assert not refused_span(stamps, before, "b@2")
    assert not refused_span(stamps, stamps.present, "b@2")
    assert "before this sample began" in refused_span(stamps, stamps.present, "default")


def test_grammars_are_told_by_their_fields() -> None:
    request = GenerateRequest()
    assert not has_grammar(request)
    request.engine_fields.update({"sampling_params": {"custom_params": {"a": 1}}, "no_logs": True})
    assert not has_grammar(request)
    request.engine_fields.update({"sampling_params": {"json_schema": "{}"}})
    assert has_grammar(request)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [((), "absent"), (({"rlctl": "1.2"}, {"rlctl": "1.2"}), "1.2"), (({"rlctl": "1.2"}, {"rlctl": "1.3"}), "1.2, 1.3")],
)
def test_the_plug_in_in_the_ranks_and_its_version_are_told(ranks: tuple[dict[str, str], ...], said: str) -> None:
    info = Facts({"version": "0.5.23"}, {}, ranks).server_info("sglang", "", 1, 0.0)
    assert (info.settings["rlctl_in_ranks"], info.arguments["rlctl_in_ranks"]) == (said, said)

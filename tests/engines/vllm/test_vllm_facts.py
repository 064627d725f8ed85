"""What follows from what a server of vLLM's says about itself."""

from __future__ import annotations

from typing import Any

import pytest
from rlctl_servers.server.server_info import WRITES
from rlctl_vllm.engine import VLLMEngine
from rlctl_vllm.server.facts import _LORA, _ROUTES, Facts, ask
from rlctl_vllm.server.update_blockers import kept_by, kept_with
from rlctl_vllm.updates.worker_calls import EXTENSION

from rlctl.engine import Call
from rlctl.v1 import common_pb2 as common


@pytest.mark.parametrize(
    ("device", "experimental"),
    [("cpu", []), ("", []), ("cuda", ["device.cuda", "transport.torch_nccl", "transport.cuda_ipc"])],
)
def test_what_has_never_run_on_a_gpu_is_called_experimental(device: str, experimental: list[str]) -> None:
    config: dict[str, Any] = {"device_config": {"device_type": device}}
    rank = {"rank": 0, "digest": "d", "device": device, "host_id": "h", "store": ["localhost", 1]}
    found = Facts("0.1", config, "", [rank], {}).capabilities(readable=True, probes=True)
    assert list(found.experimental) == experimental
    for transport in (common.TRANSPORT_TORCH_NCCL, common.TRANSPORT_CUDA_IPC):
        assert (transport in found.transports) is (device == "cuda")


@pytest.mark.parametrize(
    ("load_format", "reads"),
    [("auto", True), (None, True), ("safetensors", True), ("dummy", False), ("mistral", False), ("a plug-in's", False)],
)
def test_only_some_load_formats_read_safetensors_files(load_format: str | None, reads: bool) -> None:
    assert Facts("0.1", {"load_config": {"load_format": load_format}}, "", (), {}).reads is reads


def test_bytes_that_arrive_prove_no_load_of_a_server_whose_loads_are_not_proven() -> None:
    rank = {"rank": 0, "digest": "", "device": "cpu", "host_id": "h", "store": ["localhost", 1]}
    facts = Facts("0.1", {}, "", [rank], {})
    assert common.VERIFICATION_LEVEL_RECEIVED in facts.capabilities(readable=False, probes=True).verification
    found = facts.capabilities(readable=False, probes=True, unproven="it was never tried")
    assert set(found.verification) == {common.VERIFICATION_LEVEL_NONE, common.VERIFICATION_LEVEL_PROBE}
    assert "it was never tried" in found.unsupported["verify=received"]


def test_a_server_that_takes_no_weights_takes_no_adapters_out_of_memory() -> None:
    rank = {"rank": 0, "digest": "", "device": "cpu", "host_id": "h", "store": ["localhost", 1]}
    facts = Facts("0.1", {}, "", [rank], {})
    assert common.TRANSPORT_SHARED_MEMORY in facts.capabilities(readable=False, probes=True).adapter_transports
    found = facts.unwritable("its loads do not repeat").capabilities(readable=False, probes=True)
    assert set(found.adapter_transports) == {common.TRANSPORT_DISK}
    assert {found.unsupported[verb] for verb in WRITES} == {"its loads do not repeat"}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "kv_transfer_config"),
        ({"cache_config": {"kv_offloading_size": 4.0}}, "kv_offloading_size"),
        ({"ec_transfer_config": {"ec_connector": "ECExampleConnector"}}, "ec_transfer_config"),
        ({"ec_manager_config": {"encoder_cache_manager_cls": "a.B"}}, "ec_manager_config"),
        ({"parallel_config": {"enable_eplb": True}}, "enable_eplb"),
        ({"parallel_config": {"enable_elastic_ep": True}}, "enable_elastic_ep"),
        ({"offload_config": {"prefetch": {"offload_group_size": 8}}}, "offload_group_size"),
        ({"load_config": {"load_format": "ipc_cache"}}, "load_format"),
    ],
)
def test_what_keeps_weights_or_kv_entries_out_of_an_updates_reach_rules_out_updates(
    config: dict[str, Any], name: str
) -> None:
    (keeper,) = kept_by(config)
    assert keeper.reason.startswith(name)


@pytest.mark.parametrize(
    ("connector", "extra", "kept"),
    [
        ("OffloadingConnector", {"cpu_bytes_to_use": 1 << 30}, False),
        ("OffloadingConnector", {"spec_name": "CPUOffloadingSpec"}, False),
        ("OffloadingConnector", {"spec_name": "TieringOffloadingSpec"}, True),
        ("ExampleConnector", {}, True),
        ("LMCacheMPConnector", {}, True),
        ("MultiConnector", {"connectors": [{"kv_connector": "OffloadingConnector"}]}, True),
    ],
)
def test_the_store_in_host_memory_is_in_reach_where_every_request_has_a_salt(
    connector: str, extra: dict[str, Any], *, kept: bool
) -> None:
    """``--kv-offloading-size`` makes vLLM choose the connector."""
    transfer = {"kv_connector": connector, "kv_connector_extra_config": extra}
    config = {"kv_transfer_config": transfer, "cache_config": {"kv_offloading_size": 4.0}}
    assert len(kept_by(config, salted=True)) == (2 if kept else 0)
    assert len(kept_by(config)) == 2, "others' requests have no salt"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"kv_offloading_size": "4"}, []),
        ({"kv_offloading_size": "0"}, []),
        ({"kv_offloading_size": "4", "kv_offloading_backend": "lmcache"}, ["kv_offloading_size"]),
        ({"kv_transfer_config": '{"kv_connector": "OffloadingConnector"}'}, []),
        ({"kv_transfer_config": '{"kv_connector": "ExampleConnector"}'}, ["kv_transfer_config"]),
        ({"kv_transfer_config": "no JSON", "kv_offloading_size": "4"}, ["kv_transfer_config", "kv_offloading_size"]),
        ({"enable_eplb": "true", "kv_offloading_size": "4"}, ["enable_eplb"]),
    ],
)
def test_the_same_is_known_before_a_server_is_launched(given: dict[str, str], kept: list[str]) -> None:
    assert [keeper.name for keeper in kept_with(given)] == kept


def test_a_plain_server_keeps_nothing_out_of_an_updates_reach() -> None:
    """Sections as vLLM 0.32 writes them where nothing is set."""
    plain = {
        "kv_transfer_config": None,
        "cache_config": {"kv_offloading_size": None, "kv_offloading_backend": "native", "enable_prefix_caching": True},
        "ec_transfer_config": {"ec_connector": None},
        "ec_manager_config": {"encoder_cache_manager_cls": None, "manager_config": {}},
        "parallel_config": {"enable_eplb": False, "enable_elastic_ep": False},
        "offload_config": {"uva": {"cpu_offload_gb": 0}, "prefetch": {"offload_group_size": 0}},
        "load_config": {"load_format": "auto"},
    }
    assert kept_by(plain) == []
    assert kept_by({}) == []


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, ""),
        ({"load_config": {"load_format": "dummy"}}, "not started with its checkpoint's weights"),
        ({"lora_config": {"max_loras": 1}}, "with adapters on a CPU, vLLM ends"),
        ({"lora_config": {"max_loras": 1}, "device_config": {"device_type": "cuda"}}, ""),
    ],
)
def test_servers_whose_decode_cannot_be_compared(config: dict[str, Any], why: str) -> None:
    found = Facts("0.1", config, "", (), {}).no_decode_check
    assert why in found
    assert bool(found) is bool(why)


async def test_data_parallel_engines_that_vllm_does_not_answer_for_rule_out_updates() -> None:
    """A call to all ranks returns the answers of the first engine."""
    parallel = {"worker_extension_cls": EXTENSION, "data_parallel_size": 2}
    control: Any = Configured({"parallel_config": parallel, "lora_config": {}})

    async def attach() -> list[dict[str, Any]]:
        raise AssertionError("only the first engine would answer")

    facts = await ask(control, VLLMEngine.verbs(), attach, Call("c", 0.0))
    assert {*WRITES, "CheckWeights", "SendWeights", "LoadAdapter"} <= facts.unsupported.keys()
    assert "data-parallel" in facts.unsupported["UpdateWeightsFromTensor"]


class Configured:
    """A server with every route, which says that it has this configuration."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    async def ask(self, path: str, **_: Any) -> dict[str, Any]:
        routes = {route: {} for routes in [*_ROUTES.values(), _LORA] for route in routes}
        return {"vllm_config": self.config, "paths": routes, "version": "0.32.0", "weight_version": ""}


@pytest.mark.parametrize(("ranks", "said"), [((), "absent"), (({"rlctl": "1.2"}, {"rlctl": "1.2"}), "1.2")])
def test_the_extension_in_the_workers_and_its_version_are_told(ranks: tuple[dict[str, str], ...], said: str) -> None:
    info = Facts("0.32", {}, "", ranks, {}).server_info("vllm", "", 1, 0.0)
    assert (info.settings["rlctl_in_ranks"], info.arguments["rlctl_in_ranks"]) == (said, said)

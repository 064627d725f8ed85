"""What a running SGLang says about itself, and what follows from it: layout, limits, capabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from rlctl_servers.adapters.adapters import ADAPTERS_BY, PAUSES
from rlctl_servers.server.admin_calls import Control
from rlctl_servers.server.server_info import WRITES, server_info, without_code, without_levels
from rlctl_servers.server.update_blockers import keepers_in

from rlctl.contract.errors import Reason
from rlctl.contract.verbs import VERBS
from rlctl.engine import Call, EngineConfig
from rlctl.v1 import common_pb2, fleet_pb2
from rlctl.v1.verbs_pb2 import CHECK_ACTION_PROBE, CheckAction, Loads, ServerInfo
from rlctl.weights.tensor.placement import CPU, host_id
from rlctl_sglang.requests.bodies import Limits
from rlctl_sglang.server.update_blockers import KEEPERS
from rlctl_sglang.state import MODES, PAIR_MODES, TAGS

_SESSION_ROUTES = ("/begin_weight_update", "/end_weight_update", "/update_weight_version")
_GROUP_ROUTES = ("/init_weights_update_group", *_SESSION_ROUTES)
_EXPORT_ROUTES = ("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance")
_ROUTES: Mapping[str, Sequence[str]] = {
    "PauseGeneration": ("/pause_generation",),
    "ContinueGeneration": ("/continue_generation",),
    "AbortRequests": ("/abort_request",),
    "FlushCache": ("/flush_cache",),
    "ReleaseMemory": ("/release_memory_occupation",),
    "ResumeMemory": ("/resume_memory_occupation",),
    "UpdateWeightsFromDisk": ("/update_weights_from_disk", "/update_weight_version"),
    "InitWeightsUpdateGroup": _GROUP_ROUTES,
    "UpdateWeightsFromDistributed": (*_GROUP_ROUTES, "/update_weights_from_distributed"),
    "UpdateWeightsFromTensor": (*_SESSION_ROUTES, "/update_weights_from_tensor"),
    "DestroyWeightsUpdateGroup": ("/destroy_weights_update_group",),
    "CheckWeights": ("/weights_checker",),
    "LoadAdapter": ("/load_lora_adapter", "/unload_lora_adapter"),
}
"""Routes that a verb needs: versions of SGLang differ."""

FLATTENED = "flattened_bucket"
"""Load format of tensors that lie in one buffer."""

_BY_GROUP = (
    *("InitWeightsUpdateGroup", "UpdateWeightsFromDistributed", "DestroyWeightsUpdateGroup"),
    "UpdateWeightsFromTensor",
)
_ADAPTERS = ("LoadAdapter", "UnloadAdapter", "ListAdapters")

_READING = (
    *("auto", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "layered"),
    *("bitsandbytes", "flash_rl"),
)
"""Load formats that read the safetensors files of the checkpoint. The others make weights up, or take those of other
files or of another server.
"""


@dataclass(frozen=True)
class Facts:
    """What was asked of the server once, after its start.

    Attributes:
        info: /server_info.
        unsupported: why a verb cannot be done, by verb.
        exports: its ranks can send what they hold, and their checksums prove what that is.
    """

    info: Mapping[str, Any]
    unsupported: Mapping[str, str]
    exports: bool = False

    @property
    def shares_memory(self) -> bool:
        """Whether tensors can be handed to it in memory."""
        return "UpdateWeightsFromTensor" not in self.unsupported

    @property
    def version(self) -> str:
        """SGLang's version."""
        return str(self.info.get("version", ""))

    @property
    def ranks(self) -> int:
        """Processes that hold weights."""
        return self._number("tp_size") * self._number("pp_size")

    @property
    def invents(self) -> bool:
        """Whether it was started with other weights than those of the checkpoint that it names."""
        return str(self.info.get("load_format") or "auto") not in _READING

    @property
    def draft(self) -> bool:
        """Whether there is a draft model with weights of its own."""
        return bool(self.info.get("speculative_draft_model_path"))

    @property
    def incremental(self) -> bool:
        """Whether streams carry what is new of a text only."""
        return bool(self.info.get("incremental_streaming_output"))

    @property
    def memory_tags(self) -> frozenset[common_pb2.MemoryTag.ValueType]:
        """Regions that it can really release."""
        return frozenset(TAGS) if self.info.get("enable_memory_saver") else frozenset()

    @property
    def keeps_weights(self) -> bool:
        """Whether it keeps the content of its weights while their memory is released."""
        return bool(self.info.get("enable_memory_saver") and self.info.get("enable_weights_cpu_backup"))

    @property
    def cpu(self) -> bool:
        """Whether it computes on a CPU."""
        return self.info.get("device") == "cpu"

    def limits(self, model: Mapping[str, Any]) -> Limits:
        """What requests it can take; ``model``: the checkpoint's config. Raises UNSUPPORTED when it names no sizes."""
        text = model.get("text_config") or model
        vocabulary = int(text.get("vocab_size") or 0)
        longest = int(self.info.get("context_length") or text.get("max_position_embeddings") or 0)
        if not vocabulary or not longest:
            raise Reason.UNSUPPORTED.error("the checkpoint's config names no vocab_size or max_position_embeddings")
        return Limits(
            vocab_size=vocabulary,
            context_length=longest,
            longest_prompt=int(self.info.get("max_req_input_len") or longest) - 1,  # SGLang refuses that many
            tokenizer=not self.info.get("skip_tokenizer_init"),
            seeds=bool(self.info.get("enable_deterministic_inference")),
            mode=self.mode,
        )

    @property
    def mode(self) -> str:
        """Its part in a pair, "prefill" or "decode"; "null": none."""
        return str(self.info.get("disaggregation_mode") or "null")

    def bootstrap(self, url: str) -> tuple[str, int] | None:
        """Of a prefill server that answers at this URL: where decode servers ask for KV entries."""
        if self.mode != "prefill":
            return None
        # It binds the host that the server binds.
        return urlsplit(url).hostname or "", self._number("disaggregation_bootstrap_port")

    @property
    def cache_tiers(self) -> list[str]:
        """Caches that a flush empties."""
        return ["radix", *(["hierarchical"] if self.info.get("enable_hierarchical_cache") else [])]

    @property
    def loaders(self) -> list[str]:
        """Names of the loaders that it was started with, of whoever runs it."""
        return list(self.info.get("custom_weight_loader") or ())

    def layout(self, config: EngineConfig, store: tuple[str, int] = ("", 0)) -> fleet_pb2.StageLayout:
        """Every rank's coordinates; ``store``: where groups meet that the stage server is the source of."""
        tp_size = self._number("tp_size")
        device = CPU if self.cpu else ""
        host = host_id() if self.shares_memory else ""
        return fleet_pb2.StageLayout(
            tp_size=tp_size,
            pp_size=self._number("pp_size"),
            dp_size=self._number("dp_size"),
            ep_size=self._number("ep_size"),
            store_host=store[0],
            store_port=store[1],
            workers=[
                common_pb2.WorkerCoordinates(
                    rank=rank, tp=rank % tp_size, pp=rank // tp_size, node=config.node, device=device, host_id=host
                )
                for rank in range(self.ranks)
            ],
        )

    def unwritable(self, why: str) -> Facts:
        """The same server, which takes no weights in."""
        return replace(self, unsupported={**self.unsupported, **dict.fromkeys(WRITES, why)})

    def capabilities(self, *, readable: bool, actions: Sequence[CheckAction.ValueType]) -> fleet_pb2.Capabilities:
        """What it can do. ``readable``: its model digest can be had; ``actions``: the checker's."""
        transports = [common_pb2.TRANSPORT_DISK]
        if "UpdateWeightsFromDistributed" not in self.unsupported:
            transports.insert(0, common_pb2.TRANSPORT_TORCH_GLOO)
            if not self.cpu:
                transports.insert(0, common_pb2.TRANSPORT_TORCH_NCCL)
        if self.shares_memory:
            transports.append(common_pb2.TRANSPORT_SHARED_MEMORY)
        # One answer for several ranks is no evidence for each of them.
        verification = [common_pb2.VERIFICATION_LEVEL_NONE] if self.ranks == 1 else []
        if readable:
            verification += [common_pb2.VERIFICATION_LEVEL_REPLICA, common_pb2.VERIFICATION_LEVEL_EXPECTED]
        if CHECK_ACTION_PROBE in actions:
            verification.append(common_pb2.VERIFICATION_LEVEL_PROBE)
        unsupported = dict(self.unsupported)
        if not readable:
            unsupported["SendWeights"] = "what this server holds cannot be read, so it cannot be sent"
        unsupported |= without_levels(verification, answers_for_ranks=self.ranks > 1)
        return fleet_pb2.Capabilities(
            pause_modes=list(MODES if self.mode == "null" else PAIR_MODES),
            adapter_pause_modes=[] if "LoadAdapter" in unsupported else PAUSES,
            transports=transports,
            adapter_transports=[each for each in transports if each in ADAPTERS_BY],
            verification=verification,
            load_dtypes=["torch.float32", "torch.bfloat16", "torch.float16"],
            load_formats=[FLATTENED, *self.loaders],
            memory_tags=sorted(self.memory_tags),
            check_actions=actions,
            cache_tiers=self.cache_tiers,
            experimental=[
                *([] if self.cpu else ["device.cuda", "transport.torch_nccl"]),
                *([] if self.cpu or self.mode == "null" else ["disaggregation"]),
            ],
            unsupported=unsupported,
            keeps_weights=self.keeps_weights,
            answers_for_ranks=self.ranks > 1,
            draft_model=self.draft,
        )

    def server_info(self, name: str, node: str, pid: int, uptime_s: float) -> ServerInfo:
        """How it was started, without its keys."""
        return server_info(name, self.version, node, pid, uptime_s, self.info.items())

    def _number(self, name: str) -> int:
        return int(self.info.get(name) or 1)


async def ask(control: Control, verbs: Iterable[str], call: Call, *, launched: bool, nodes: int = 1) -> Facts:
    """What the server says; ``verbs``: those that the plug-in has code for; ``launched``: it is a child of ours.

    ``nodes``: on how many hosts its ranks are. Raises as :meth:`Control.ask`.
    """
    info = await control.ask("/server_info", call=call, admin=False)
    described = await control.ask("/openapi.json", call=call, admin=False)
    routes = set(described.get("paths", ()))
    facts = Facts(info, {})
    unsupported = {name: "the SGLang plug-in has no code for it" for name in VERBS if name not in set(verbs)}
    unsupported |= without_code(f"SGLang {facts.version}", _ROUTES, routes)
    tp_size, dp_size = (int(info.get(name) or 1) for name in ("tp_size", "dp_size"))
    if dp_size > 1 and not info.get("enable_dp_attention"):  # whose data ranks are tensor-parallel ranks at once
        unsupported["UpdateWeightsFromDisk"] = (
            "SGLang answers for one of its data-parallel ranks and not for the others"
        )
    if facts.ranks != tp_size or dp_size > 1:
        for verb in _BY_GROUP:
            unsupported[verb] = (
                "SGLang takes weights in at tensor-parallel ranks only; this one has pipeline or data ranks"
            )
    here = launched and facts.cpu and nodes == 1
    if not (here and host_id()):
        unsupported["UpdateWeightsFromTensor"] = (
            "tensors are handed over in memory to servers that the stage server launched, on CPUs of its own node, only"
        )
    if not facts.memory_tags:
        for verb in ("ReleaseMemory", "ResumeMemory"):
            unsupported[verb] = "SGLang was started without --enable-memory-saver: it would release nothing"
    elif str(info.get("weight_cache_mode") or "off") != "off":
        unsupported["ReleaseMemory"] = "with --weight-cache-mode SGLang ends when its weights are to be released"
    if not info.get("enable_lora"):
        unsupported |= dict.fromkeys(_ADAPTERS, "SGLang was started without --enable-lora")
    elif dp_size > 1:
        unsupported |= dict.fromkeys(_ADAPTERS, "SGLang loads no adapters while it runs with data-parallel ranks")
    for keeper in keepers_in(KEEPERS, info):
        refused = (*_BY_GROUP, "UpdateWeightsFromDisk", *(_ADAPTERS if keeper.stores else ()))
        unsupported |= dict.fromkeys(refused, keeper.reason)
    exports = here and facts.ranks == tp_size and dp_size == 1 and routes.issuperset(_EXPORT_ROUTES)
    return Facts(info, unsupported, exports)


def loads(told: Mapping[str, Any]) -> Loads:
    """What is queued and running, over its data-parallel ranks."""
    ranks = told.get("loads") or []

    def total(name: str) -> int:
        return sum(int(rank.get(name) or 0) for rank in ranks)

    return Loads(
        running=total("num_running_reqs"),
        waiting=total("num_waiting_reqs"),
        used_tokens=total("num_used_tokens"),
        max_tokens=total("max_total_num_tokens"),
    )

"""Facts that a running SGLang reports, and the resulting layout, limits and capabilities."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from rlctl_servers.adapters.adapters import ADAPTERS_BY, PAUSES
from rlctl_servers.server.admin_calls import Control
from rlctl_servers.server.server_info import (
    EXPERIMENTAL,
    WRITES,
    levels_of,
    memory_transports,
    server_info,
    stage_layout,
    without_code,
    without_levels,
)
from rlctl_servers.server.update_blockers import keepers_in

from rlctl.contract.decode_check import INVENTED
from rlctl.contract.errors import Reason
from rlctl.contract.serialized_tensors.payload import FLATTENED
from rlctl.contract.verbs import VERBS
from rlctl.engine import Call, EngineConfig
from rlctl.v1 import common_pb2, fleet_pb2
from rlctl.v1.verbs_pb2 import (
    CHECK_ACTION_CHECKSUM,
    CHECK_ACTION_PROBE,
    CHECK_ACTION_READ,
    CHECK_ACTION_RESET_TENSORS,
    CheckAction,
    Loads,
    ServerInfo,
)
from rlctl.weights.tensor.placement import CPU
from rlctl_sglang.ranks.channel import ABSENT
from rlctl_sglang.requests.bodies import Limits
from rlctl_sglang.server.update_blockers import KEEPERS
from rlctl_sglang.state import MODES, PAIR_MODES, TAGS

_ROUTES: Mapping[str, Sequence[str]] = {
    "PauseGeneration": ("/pause_generation",),
    "ContinueGeneration": ("/continue_generation",),
    "AbortRequests": ("/abort_request",),
    "FlushCache": ("/flush_cache",),
    "ReleaseMemory": ("/release_memory_occupation",),
    "ResumeMemory": ("/resume_memory_occupation",),
    "UpdateWeightsFromDisk": ("/update_weights_from_disk", "/update_weight_version"),
    "LoadAdapter": ("/load_lora_adapter", "/unload_lora_adapter"),
}
"""Routes that a verb needs. Versions of SGLang differ."""

_IN_RANKS = (
    *("InitWeightsUpdateGroup", "UpdateWeightsFromDistributed", "DestroyWeightsUpdateGroup"),
    *("UpdateWeightsFromTensor", "SendWeights", "CheckWeights"),
)
"""Verbs that the plug-in carries out."""

_ADAPTERS = ("LoadAdapter", "UnloadAdapter", "ListAdapters")

_MEMORY = ("ReleaseMemory", "ResumeMemory")

_READING = (
    *("auto", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "layered"),
    *("bitsandbytes", "flash_rl"),
)
"""Load formats that read the checkpoint's safetensors files. The other formats make weights up, or take the weights of
other files or of a different server.
"""


@dataclass(frozen=True)
class Facts:
    """Answers of the server after its start.

    Attributes:
        info: /server_info.
        unsupported: why a verb cannot be done, by verb.
        ranks: the ranks' descriptions; empty without the plug-in.
    """

    info: Mapping[str, Any]
    unsupported: Mapping[str, str]
    ranks: Sequence[Mapping[str, Any]] = ()

    @property
    def version(self) -> str:
        return str(self.info.get("version", ""))

    @property
    def tp_size(self) -> int:
        return self._number("tp_size")

    @property
    def world_size(self) -> int:
        """Return the number of processes that hold weights."""
        return self.tp_size * self._number("pp_size")

    @property
    def dp_ranks(self) -> int:
        """Return the number of data-parallel ranks: replicas, or groups of DP attention.

        DP attention divides the tensor-parallel ranks. Before SGLang 0.5.23 its groups were ``dp_size`` too.
        """
        return self._number("dp_size") * self._number("attn_dp_size")

    @property
    def invents(self) -> bool:
        """Return whether the server was started with other weights than those of the checkpoint."""
        return str(self.info.get("load_format") or "auto") not in _READING

    @property
    def no_decode_check(self) -> str:
        """Return why decode cannot be compared with prefill, or ""."""
        if self.dp_ranks > 1:
            return "the prompts of a check do not come to all data-parallel ranks"
        return INVENTED if self.invents else ""

    @property
    def draft(self) -> bool:
        """Return whether there is a draft model with weights of its own."""
        return bool(self.info.get("speculative_draft_model_path"))

    @property
    def incremental(self) -> bool:
        """Return whether streams carry only the new part of a text."""
        return bool(self.info.get("incremental_streaming_output"))

    @property
    def memory_tags(self) -> frozenset[common_pb2.MemoryTag.ValueType]:
        """Return the regions that the server can really release."""
        return frozenset(TAGS) if self.info.get("enable_memory_saver") else frozenset()

    @property
    def keeps_weights(self) -> bool:
        """Return whether the weights keep their content while their memory is released."""
        return bool(self.info.get("enable_memory_saver") and self.info.get("enable_weights_cpu_backup"))

    @property
    def cpu(self) -> bool:
        return self.info.get("device") == "cpu"

    def limits(self, model: Mapping[str, Any]) -> Limits:
        """Return the limits of requests. ``model``: the checkpoint's config. Raises UNSUPPORTED for missing sizes."""
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
        """Return the server's part in a pair, "prefill" or "decode", else "null"."""
        return str(self.info.get("disaggregation_mode") or "null")

    def bootstrap(self, url: str) -> tuple[str, int] | None:
        """Return the address where decode servers request KV entries of a prefill server with this URL."""
        if self.mode != "prefill":
            return None
        # The bootstrap server binds the same host as the server.
        return urlsplit(url).hostname or "", self._number("disaggregation_bootstrap_port")

    @property
    def cache_tiers(self) -> list[str]:
        """Return the names of the caches that a flush empties."""
        return ["radix", *(["hierarchical"] if self.info.get("enable_hierarchical_cache") else [])]

    @property
    def loaders(self) -> list[str]:
        """Return the names of the operator's loaders from the server's start."""
        return list(self.info.get("custom_weight_loader") or ())

    def layout(self, config: EngineConfig, *, readable: bool) -> fleet_pb2.StageLayout:
        """Return every rank's coordinates. Without the plug-in the ranks share no memory with other processes.

        ``readable``: the ranks can send their weights, so groups meet at rank 0's store.
        """
        unknown = {"device": CPU if self.cpu else "", "host_id": ""}
        places = self.ranks or [{"rank": rank, **unknown} for rank in range(self.world_size)]
        return stage_layout(
            config.node,
            places,
            tp_size=self.tp_size,
            pp_size=self._number("pp_size"),
            dp_size=self.dp_ranks,
            ep_size=self._number("ep_size"),
            store=self.ranks[0]["store"] if self.ranks and readable else ("", 0),
        )

    def unwritable(self, why: str) -> Facts:
        """Return the facts of the same server without support for writes."""
        return replace(self, unsupported={**self.unsupported, **dict.fromkeys(WRITES, why)})

    def capabilities(
        self, *, readable: bool, probes: bool, staged: bool = False, unproven: str = ""
    ) -> fleet_pb2.Capabilities:
        """Return the capabilities. ``readable``: the model digest can be read; ``probes``: the server can be probed;
        ``staged``: the ranks can make shadow copies.

        ``unproven``: why loads may not repeat. In that case bytes that arrived prove no update.
        """
        transports = [common_pb2.TRANSPORT_DISK]
        verification = levels_of(
            ranks=bool(self.ranks), world_size=self.world_size, readable=readable, probes=probes, unproven=unproven
        )
        actions: list[CheckAction.ValueType] = [CHECK_ACTION_RESET_TENSORS]
        if "UpdateWeightsFromDistributed" not in self.unsupported:
            transports.insert(0, common_pb2.TRANSPORT_TORCH_GLOO)
            if not self.cpu:
                transports.insert(0, common_pb2.TRANSPORT_TORCH_NCCL)
        if self.ranks:
            actions.append(CHECK_ACTION_CHECKSUM)
        transports += memory_transports(self.ranks, cpu=self.cpu)
        if readable:
            actions.append(CHECK_ACTION_READ)
        unsupported = dict(self.unsupported)
        if probes:
            actions.append(CHECK_ACTION_PROBE)
            unsupported.pop("CheckWeights", None)
        if not readable:
            unsupported["SendWeights"] = "what this server holds cannot be read, so it cannot be sent"
        answers_for_ranks = self.world_size > 1 and not self.ranks
        unsupported |= without_levels(verification, answers_for_ranks=answers_for_ranks, unproven=unproven)
        return fleet_pb2.Capabilities(
            pause_modes=list(MODES if self.mode == "null" else PAIR_MODES),
            adapter_pause_modes=[] if "LoadAdapter" in unsupported else PAUSES,
            transports=transports,
            # The stage server reads segments in the host's memory, not in a GPU's.
            adapter_transports=[
                transport
                for transport in transports
                if transport in ADAPTERS_BY and (transport == common_pb2.TRANSPORT_DISK or self.cpu)
            ],
            verification=verification,
            load_dtypes=["torch.float32", "torch.bfloat16", "torch.float16"],
            load_formats=[FLATTENED, *self.loaders],
            memory_tags=sorted(self.memory_tags),
            check_actions=actions,
            cache_tiers=self.cache_tiers,
            experimental=[
                *([] if self.cpu else EXPERIMENTAL),
                *([] if self.cpu or self.mode == "null" else ["disaggregation"]),
            ],
            unsupported=unsupported,
            keeps_weights=self.keeps_weights,
            keyed_digests=bool(self.ranks),
            staged_apply=staged and not set(WRITES) & unsupported.keys(),
            answers_for_ranks=answers_for_ranks,
            draft_model=self.draft,
        )

    def server_info(self, name: str, node: str, pid: int, uptime_s: float) -> ServerInfo:
        return server_info(name, self.version, node, pid, uptime_s, self.info.items(), self.ranks)

    def _number(self, name: str) -> int:
        return int(self.info.get(name) or 1)


async def ask(
    control: Control, verbs: Iterable[str], attach: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]], call: Call
) -> Facts:
    """Return the server's facts. ``verbs``: verbs that the engine has code for; ``attach``: returns the ranks'
    descriptions.

    Raises as :meth:`Control.ask`, and as ``attach``.
    """
    info = await control.ask("/server_info", call=call, admin=False)
    openapi = await control.ask("/openapi.json", call=call, admin=False)
    facts = Facts(info, {})
    unsupported = {name: "rlctl has no code for it with SGLang" for name in VERBS if name not in set(verbs)}
    unsupported |= without_code(f"SGLang {facts.version}", _ROUTES, openapi.get("paths", ()))
    if facts.dp_ranks > 1:  # so it answers a flush, which ends an update and begins a release
        reason = "SGLang answers for one of its data-parallel ranks and not for the others"
        unsupported |= dict.fromkeys(("FlushCache", *_MEMORY, *WRITES), reason)
    if facts.world_size != facts.tp_size or facts.dp_ranks > 1:
        reason = "of SGLang's ranks only tensor-parallel ones answer; this server has pipeline or data ranks"
        unsupported |= dict.fromkeys(_IN_RANKS, reason)
    else:
        facts = replace(facts, ranks=await attach())
        if not facts.ranks:
            unsupported |= dict.fromkeys(_IN_RANKS, ABSENT)
    unanswered = unsupported["CheckWeights"] if facts.world_size > 1 and not facts.ranks else ""
    if not facts.memory_tags:
        for verb in _MEMORY:
            unsupported[verb] = "SGLang was started without --enable-memory-saver: it would release nothing"
    elif unanswered:
        for verb in _MEMORY:
            unsupported.setdefault(verb, f"SGLang answers for one rank only: {unanswered}")
    elif str(info.get("weight_cache_mode") or "off") != "off":
        unsupported["ReleaseMemory"] = "with --weight-cache-mode SGLang ends when its weights are to be released"
    if not info.get("enable_lora"):
        unsupported |= dict.fromkeys(_ADAPTERS, "SGLang was started without --enable-lora")
    elif facts.dp_ranks > 1:
        unsupported |= dict.fromkeys(_ADAPTERS, "adapters need a server without data-parallel ranks")
    elif unanswered:
        unsupported |= dict.fromkeys(_ADAPTERS, f"SGLang answers a load of an adapter for one rank only: {unanswered}")
    for keeper in keepers_in(KEEPERS, info):
        unsupported |= dict.fromkeys((*WRITES, *(_ADAPTERS if keeper.stores else ())), keeper.reason)
    return replace(facts, unsupported=unsupported)


def loads(answer: Mapping[str, Any]) -> Loads:
    """Return the running and queued load, summed over data-parallel ranks."""
    ranks = answer.get("loads") or []

    def total(name: str) -> int:
        return sum(int(rank.get(name) or 0) for rank in ranks)

    return Loads(
        running=total("num_running_reqs"),
        waiting=total("num_waiting_reqs"),
        used_tokens=total("num_used_tokens"),
        max_tokens=total("max_total_num_tokens"),
    )

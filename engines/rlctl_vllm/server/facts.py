"""Facts of a running vLLM, with the layout, limits and capabilities that follow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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

from rlctl.contract.decode_check import INVENTED
from rlctl.contract.verbs import VERBS
from rlctl.contract.vllm_groups import BACKEND
from rlctl.engine import Call, EngineConfig
from rlctl.v1 import common_pb2, fleet_pb2
from rlctl.v1.verbs_pb2 import CHECK_ACTION_CHECKSUM, CHECK_ACTION_PROBE, CHECK_ACTION_READ, Loads, ServerInfo
from rlctl_vllm.requests.bodies import Limits
from rlctl_vllm.server.update_blockers import kept_by
from rlctl_vllm.state import MODES, TAGS
from rlctl_vllm.updates import native_nccl as native
from rlctl_vllm.updates.worker_calls import EXTENSION

_ROUTES: Mapping[str, Sequence[str]] = {
    "PauseGeneration": ("/pause",),
    "ContinueGeneration": ("/resume",),
    "AbortRequests": ("/abort_requests",),
    "FlushCache": ("/reset_prefix_cache",),
    "ReleaseMemory": ("/sleep", "/release_kv_cache_memory"),
    "ResumeMemory": ("/wake_up",),
    "UpdateWeightsFromDisk": ("/collective_rpc", "/update_weight_version"),
}
"""Routes that a verb needs. Versions of vLLM differ."""

_IN_WORKERS = (
    *("InitWeightsUpdateGroup", "DestroyWeightsUpdateGroup", "UpdateWeightsFromDistributed"),
    *("UpdateWeightsFromTensor", "CheckWeights", "SendWeights"),
)
"""Verbs that the extension carries out."""

_LORA = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_ADAPTERS = ("LoadAdapter", "UnloadAdapter", "ListAdapters")

_READING = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""Load formats that read the safetensors files of a checkpoint, at the start and at each load from disk.

Other formats invent weights, or read other files.
"""

_FIRST_ANSWERS = "vLLM answers for the first of its data-parallel engines and not for the others"

_CONFIGS = ("model_config", "cache_config", "parallel_config", "scheduler_config")


@dataclass(frozen=True)
class Facts:
    """Answers of the server, requested once after its start.

    Attributes:
        config: configuration of the server, by section.
        label: label of the server's weight version.
        ranks: answer of each rank; empty without the extension.
        unsupported: reason for each verb that cannot be carried out.
        native: a server without the extension receives weights by vLLM's own engine.
    """

    version: str
    config: Mapping[str, Any]
    label: str
    ranks: Sequence[Mapping[str, Any]]
    unsupported: Mapping[str, str]
    native: bool = False

    @property
    def cpu(self) -> bool:
        return "cpu" in str(self._of("device_config", "device_type") or self._of("device_config", "device") or "cpu")

    @property
    def memory_tags(self) -> frozenset[common_pb2.MemoryTag.ValueType]:
        """Regions that the server really can release."""
        return frozenset(TAGS) if self._of("model_config", "enable_sleep_mode") else frozenset()

    @property
    def load_format(self) -> str:
        return str(self._of("load_config", "load_format") or "auto")

    @property
    def reads(self) -> bool:
        """Whether loads read the safetensors files of a checkpoint."""
        return self.load_format in _READING

    @property
    def lora(self) -> Mapping[str, Any] | None:
        """Settings of adapters, or None for a server without adapters."""
        settings: Mapping[str, Any] | None = self.config.get("lora_config")
        return settings

    @property
    def no_prompt_logprobs(self) -> str:
        """Why log probabilities of a prompt would end the server, or ""."""
        if self.cpu and self.lora is not None:
            # punica_cpu.py takes as many rows of hidden states as the batch has requests (0.32.0).
            return "with adapters on a CPU, vLLM ends on the log probabilities of a prompt beside other requests"
        return ""

    @property
    def no_decode_check(self) -> str:
        """Why decode cannot be compared with prefill, or ""."""
        return self.no_prompt_logprobs or ("" if self.reads else INVENTED)

    @property
    def digest(self) -> str:
        """Model digest of the ranks' weights at the start; "" if the weights cannot be read back."""
        return str(self.ranks[0]["digest"]) if self.ranks else ""

    @property
    def kv_tokens(self) -> int:
        return int(self._of("cache_config", "kv_cache_size_tokens") or 0)

    @property
    def tp_size(self) -> int:
        return int(self._of("parallel_config", "tensor_parallel_size") or 1)

    @property
    def pp_size(self) -> int:
        return int(self._of("parallel_config", "pipeline_parallel_size") or 1)

    @property
    def dp_size(self) -> int:
        return int(self._of("parallel_config", "data_parallel_size") or 1)

    @property
    def world_size(self) -> int:
        """Number of the server's workers, including data-parallel workers."""
        return self.tp_size * self.pp_size * self.dp_size

    @property
    def writable(self) -> bool:
        """Whether the server can be updated from disk. Of several ranks each must answer for itself."""
        answers = bool(self.ranks) or self.native or self.world_size == 1
        return answers and "UpdateWeightsFromDisk" not in self.unsupported

    def unwritable(self, why: str) -> Facts:
        """Return the facts of the same server without weight updates."""
        return replace(self, unsupported={**self.unsupported, **dict.fromkeys(WRITES, why)})

    @property
    def fronts(self) -> int:
        """Number of API servers, each of which may get a call."""
        return int(self._of("parallel_config", "_api_process_count") or 1)

    @property
    def extended(self) -> bool:
        """Whether the extension may be in the workers.

        Several ranks are asked only with the extension configured: a failed call leaves answers of ranks unread.
        """
        return self._of("parallel_config", "worker_extension_cls") == EXTENSION or self.world_size == 1

    @property
    def dtype(self) -> str:
        """Dtype of the weights, such as "torch.float32"."""
        return str(self._of("model_config", "dtype") or "")

    def limits(self, model: Mapping[str, Any]) -> Limits:
        """Return the limits of requests; ``model`` is the checkpoint's config."""
        text = model.get("text_config") or model
        context = int(self._of("model_config", "max_model_len") or text.get("max_position_embeddings") or 0)
        return Limits(
            vocab_size=int(text.get("vocab_size") or 0),
            context_length=context,
            longest_prompt=context - 1,
            tokenizer=not self._of("model_config", "skip_tokenizer_init"),
            most_logprobs=int(self._of("model_config", "max_logprobs") or 0),
            logprobs_mode=str(self._of("model_config", "logprobs_mode") or "raw_logprobs"),
            no_prompt_logprobs=self.no_prompt_logprobs,
        )

    def layout(self, config: EngineConfig) -> fleet_pb2.StageLayout:
        """Return every rank's coordinates. Ranks without the extension share no memory with other processes."""
        places = self.ranks or [{"rank": rank, "device": "", "host_id": ""} for rank in range(self.world_size)]
        return stage_layout(
            config.node,
            places,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            dp_size=self.dp_size,
            ep_size=1,
            store=self.ranks[0]["store"] if self.digest else ("", 0),
        )

    def capabilities(
        self, *, readable: bool, probes: bool, staged: bool = False, unproven: str = ""
    ) -> fleet_pb2.Capabilities:
        """Return the capabilities of the server.

        ``readable``: the model digest is available. ``probes``: the server can be probed. ``staged``: the ranks can
        make shadow copies. ``unproven``: why loads are not known to repeat; then received bytes prove no update.
        """
        transports = [common_pb2.TRANSPORT_DISK]
        if self.ranks:
            transports.insert(0, common_pb2.TRANSPORT_TORCH_GLOO)
            if not self.cpu:
                transports.insert(1, common_pb2.TRANSPORT_TORCH_NCCL)
        transports += memory_transports(self.ranks, cpu=self.cpu)
        verification = levels_of(
            ranks=bool(self.ranks), world_size=self.world_size, readable=readable, probes=probes, unproven=unproven
        )
        actions = [CHECK_ACTION_CHECKSUM, CHECK_ACTION_READ] if readable else []
        if self.native:
            transports.insert(0, common_pb2.TRANSPORT_VLLM_NCCL)
        unsupported = dict(self.unsupported)
        if probes:
            actions.append(CHECK_ACTION_PROBE)
            unsupported.pop("CheckWeights", None)
        elif self.no_prompt_logprobs:
            unsupported["probe"] = self.no_prompt_logprobs
        answers_for_ranks = self.world_size > 1 and not self.ranks
        unsupported |= without_levels(verification, answers_for_ranks=answers_for_ranks, unproven=unproven)
        return fleet_pb2.Capabilities(
            pause_modes=list(MODES),
            adapter_pause_modes=[] if "LoadAdapter" in unsupported else PAUSES,
            transports=transports,
            # The stage server reads segments in host memory, not in a GPU's memory.
            adapter_transports=[
                transport
                for transport in transports
                if transport in ADAPTERS_BY
                and (
                    transport == common_pb2.TRANSPORT_DISK
                    or (self.cpu and "UpdateWeightsFromTensor" not in unsupported)
                )
            ],
            verification=verification,
            load_dtypes=["torch.float32", "torch.bfloat16", "torch.float16"],
            memory_tags=sorted(self.memory_tags),
            check_actions=actions,
            cache_tiers=["prefix"],
            experimental=[
                *([] if self.cpu else EXPERIMENTAL),
                *([f"transport.{BACKEND}"] if self.native else []),
            ],
            unsupported=unsupported,
            keeps_weights=bool(self.memory_tags),
            keyed_digests=bool(self.ranks),
            staged_apply=staged and not set(WRITES) & unsupported.keys(),
            answers_for_ranks=answers_for_ranks,
        )

    def server_info(self, name: str, node: str, pid: int, uptime_s: float) -> ServerInfo:
        """Return the settings of the server, without keys."""
        settings = (
            (f"{section}.{key}", value)
            for section in _CONFIGS
            for key, value in (self.config.get(section) or {}).items()
        )
        return server_info(name, self.version, node, pid, uptime_s, settings, self.ranks)

    def _of(self, section: str, name: str) -> Any:
        return (self.config.get(section) or {}).get(name)


async def ask(
    control: Control,
    verbs: Iterable[str],
    attach: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]],
    call: Call,
    *,
    salted: bool = False,
) -> Facts:
    """Ask the server for its facts.

    ``verbs``: the verbs with code in the plug-in. ``attach``: returns the answer of each rank, by the extension.
    ``salted``: every request at the server has rlctl's cache salt. Raises as :meth:`Control.ask`, and the errors of
    ``attach``.
    """
    info = await control.ask("/server_info?config_format=json", call=call, admin=False)
    routes = set((await control.ask("/openapi.json", call=call, admin=False)).get("paths", ()))
    version = str((await control.ask("/version", call=call, admin=False))["version"])
    label = str((await control.ask("/weight_info", call=call, admin=False))["weight_version"])
    facts = Facts(version, info["vllm_config"], label, (), {})
    ranks = await attach() if facts.extended and facts.dp_size == 1 else ()
    facts = replace(facts, ranks=ranks)
    unsupported = {name: "the vLLM plug-in has no code for it" for name in VERBS if name not in set(verbs)}
    unsupported |= without_code(f"vLLM {version}", _ROUTES, routes)
    if not ranks:
        obstacle = await native.obstacle(control, facts.config, label, facts.world_size, call, cpu=facts.cpu)
        facts = replace(facts, native=not obstacle)
        for verb in set(_IN_WORKERS) - set(native.VERBS if facts.native else ()):
            unsupported[verb] = " ".join(
                filter(None, (f"this vLLM was started without --worker-extension-cls {EXTENSION}", obstacle))
            )
    elif not facts.digest:
        unsupported["SendWeights"] = unsupported["CheckWeights"] = (
            "this vLLM's weights are not read back: layers that give no weights, or several ranks of so large a model"
        )
    if not facts.reads:
        unsupported["UpdateWeightsFromDisk"] = (
            f"vLLM was started with --load-format {facts.load_format}: it would not read safetensors files"
        )
    if facts.lora is None:
        unsupported |= dict.fromkeys(_ADAPTERS, "vLLM was started without --enable-lora")
    elif not routes.issuperset(_LORA):
        unsupported |= dict.fromkeys(_ADAPTERS, "vLLM was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
    elif facts.fronts > 1:
        unsupported |= dict.fromkeys(_ADAPTERS, "each of this vLLM's API servers has adapters of its own")
    if facts.dp_size > 1:
        unsupported |= dict.fromkeys((*WRITES, *_IN_WORKERS, *_ADAPTERS), _FIRST_ANSWERS)
    for keeper in kept_by(facts.config, salted=salted):
        unsupported |= dict.fromkeys((*WRITES, *(_ADAPTERS if keeper.stores else ())), keeper.reason)
    if not facts.memory_tags:
        for verb in ("ReleaseMemory", "ResumeMemory"):
            unsupported[verb] = "vLLM was started without --enable-sleep-mode: it would release nothing"
    return replace(facts, unsupported=unsupported)


def loads(metrics: str) -> Loads:
    """Return the queued and running requests, from vLLM's Prometheus text."""

    def total(name: str) -> float:
        lines = (line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    return Loads(
        running=int(total("vllm:num_requests_running")),
        waiting=int(total("vllm:num_requests_waiting")),
        generated_tokens=int(total("vllm:generation_tokens_total")),
    )

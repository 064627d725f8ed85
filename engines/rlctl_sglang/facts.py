"""What a running SGLang says about itself, and what follows from it: layout, limits, capabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration

from rlctl.engine import Call, EngineConfig
from rlctl.errors import Reason
from rlctl.v1 import common_pb2, fleet_pb2
from rlctl.v1.verbs_pb2 import (
    CHECK_ACTION_CHECKSUM,
    CHECK_ACTION_RESET_TENSORS,
    Loads,
    ServerInfo,
)
from rlctl.verbs import VERBS
from rlctl.version import __version__
from rlctl_sglang.control import Control
from rlctl_sglang.requests import Limits
from rlctl_sglang.state import MODES, TAGS

_GROUP_ROUTES = ("/init_weights_update_group", "/begin_weight_update", "/end_weight_update")
_ROUTES: Mapping[str, Sequence[str]] = {
    "PauseGeneration": ("/pause_generation",),
    "ContinueGeneration": ("/continue_generation",),
    "AbortRequests": ("/abort_request",),
    "FlushCache": ("/flush_cache",),
    "ReleaseMemory": ("/release_memory_occupation",),
    "ResumeMemory": ("/resume_memory_occupation",),
    "UpdateWeightsFromDisk": ("/update_weights_from_disk", "/update_weight_version"),
    "InitWeightsUpdateGroup": _GROUP_ROUTES,
    "UpdateWeightsFromDistributed": (*_GROUP_ROUTES, "/update_weights_from_distributed", "/update_weight_version"),
    "DestroyWeightsUpdateGroup": ("/destroy_weights_update_group",),
    "CheckWeights": ("/weights_checker",),
}
"""Routes that a verb needs: versions of SGLang differ."""

_BY_GROUP = ("InitWeightsUpdateGroup", "UpdateWeightsFromDistributed", "DestroyWeightsUpdateGroup")
_SECRET = ("key", "password", "token", "secret")
_PLAIN = (str, int, float, bool)


@dataclass(frozen=True)
class Facts:
    """What was asked of the server once, after its start.

    Attributes:
        info: /server_info.
        unsupported: why a verb cannot be done, by verb.
    """

    info: Mapping[str, Any]
    unsupported: Mapping[str, str]

    @property
    def version(self) -> str:
        """SGLang's version."""
        return str(self.info.get("version", ""))

    @property
    def ranks(self) -> int:
        """Processes that hold weights."""
        return self._number("tp_size") * self._number("pp_size")

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
            longest_prompt=int(self.info.get("max_req_input_len") or longest - 1),
            tokenizer=not self.info.get("skip_tokenizer_init"),
            seeds=bool(self.info.get("enable_deterministic_inference")),
        )

    def layout(self, config: EngineConfig) -> fleet_pb2.StageLayout:
        """Every rank's coordinates. They share no memory with anybody, as far as rlctl can use it."""
        tp_size = self._number("tp_size")
        device = "cpu" if self.cpu else ""
        return fleet_pb2.StageLayout(
            tp_size=tp_size,
            pp_size=self._number("pp_size"),
            dp_size=self._number("dp_size"),
            ep_size=self._number("ep_size"),
            workers=[
                common_pb2.WorkerCoordinates(
                    rank=rank, tp=rank % tp_size, pp=rank // tp_size, node=config.node, device=device
                )
                for rank in range(self.ranks)
            ],
        )

    def capabilities(self, *, readable: bool) -> fleet_pb2.Capabilities:
        """What it can do. ``readable``: its model digest can be had."""
        transports = [common_pb2.TRANSPORT_DISK]
        if "UpdateWeightsFromDistributed" not in self.unsupported:
            transports.insert(0, common_pb2.TRANSPORT_TORCH_GLOO)
            if not self.cpu:
                transports.insert(0, common_pb2.TRANSPORT_TORCH_NCCL)
        # One answer for several ranks is no evidence for each of them.
        verification = [common_pb2.VERIFICATION_LEVEL_NONE] if self.ranks == 1 else []
        if readable:
            verification += [common_pb2.VERIFICATION_LEVEL_REPLICA, common_pb2.VERIFICATION_LEVEL_EXPECTED]
        tiers = ["radix", *(["hierarchical"] if self.info.get("enable_hierarchical_cache") else [])]
        return fleet_pb2.Capabilities(
            pause_modes=list(MODES),
            transports=transports,
            verification=verification,
            load_dtypes=["torch.float32", "torch.bfloat16", "torch.float16"],
            memory_tags=sorted(self.memory_tags),
            check_actions=[CHECK_ACTION_CHECKSUM, CHECK_ACTION_RESET_TENSORS],
            cache_tiers=tiers,
            experimental=[] if self.cpu else ["device.cuda", "transport.torch_nccl"],
            unsupported=self.unsupported,
            answers_for_ranks=self.ranks > 1,
        )

    def server_info(self, name: str, node: str, pid: int, uptime_s: float) -> ServerInfo:
        """How it was started, without its keys."""
        settings = {
            key: str(value)
            for key, value in self.info.items()
            if isinstance(value, _PLAIN) and not any(word in key.split("_") for word in _SECRET)
        }
        return ServerInfo(
            engine=name,
            engine_version=self.version,
            rlctl_version=__version__,
            pid=pid,
            node=node,
            settings=settings,
            uptime=Duration(seconds=int(uptime_s)),
        )

    def _number(self, name: str) -> int:
        return int(self.info.get(name) or 1)


async def ask(control: Control, verbs: Iterable[str], call: Call) -> Facts:
    """What the server says; ``verbs``: those that the plug-in has code for. Raises as :meth:`Control.ask`."""
    info = await control.ask("/server_info", call=call, admin=False)
    described = await control.ask("/openapi.json", call=call, admin=False)
    routes = set(described.get("paths", ()))
    facts = Facts(info, {})
    unsupported = {name: "the SGLang plug-in has no code for it" for name in VERBS if name not in set(verbs)}
    for verb, needed in _ROUTES.items():
        if absent := [route for route in needed if route not in routes]:
            unsupported[verb] = f"SGLang {facts.version} has no {', '.join(absent)}"
    if facts.ranks != facts.layout(EngineConfig("")).tp_size or int(info.get("dp_size") or 1) > 1:
        for verb in _BY_GROUP:
            unsupported[verb] = (
                "SGLang forms groups over tensor-parallel ranks only; this one has pipeline or data ranks"
            )
    if not facts.memory_tags:
        for verb in ("ReleaseMemory", "ResumeMemory"):
            unsupported[verb] = "SGLang was started without --enable-memory-saver: it would release nothing"
    return Facts(info, unsupported)


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

"""Everything that one rank's engine thread works with, and the facts that decide whether requests may run."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rlctl.contract.decode_check import Calibration
from rlctl.contract.errors import Reason, RlctlError, not_written
from rlctl.engine import EngineConfig
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, MemoryTag, PauseMode
from rlctl.weights.checkpoint.allowed_roots import Roots
from rlctl.weights.checkpoint.checkpoint import StoredWeights, open_checkpoint
from rlctl.weights.group.process_group import INTERRUPTED
from rlctl.weights.group.rank_groups import Groups
from rlctl.weights.receiver import Receiver, ReceiveStats
from rlctl.weights.shards.load_hooks import Loading
from rlctl.weights.shards.shard_map import ShardMap, model_digest
from rlctl.weights.shared_memory.reader import SegmentReader
from rlctl.weights.tensor.bucket_cache import Announced
from rlctl.weights.tensor.work import usable_cores
from rlctl_torch.disaggregation.kv_handover import Handovers
from rlctl_torch.generation.detokenizer import Tokenizer, find_tokenizer
from rlctl_torch.generation.scheduler import Scheduler
from rlctl_torch.model import sabotage
from rlctl_torch.model.kv_cache import KVCache, SlotAllocator
from rlctl_torch.model.lora import Adapters, LoraAdapter
from rlctl_torch.model.model import Model, build, positions_of
from rlctl_torch.model.shadow_copy import Shadow
from rlctl_torch.options import Options
from rlctl_torch.steps.background import Beside
from rlctl_torch.steps.collectives import Council, Ranks
from rlctl_torch.steps.ordered_commands import with_outcome


class Weights(enum.Enum):
    """What the weights are, as far as this rank knows."""

    WHOLE = "one version"
    MIXED = "a mixture of versions, or scrambled"
    LOST = "released without a copy"


@dataclass
class Origin:
    """What the present weights were read from, all of them: the way back when a later load fails.

    The files stay open. They can be read again when a pull has put others in their place, and need no memory.

    Attributes:
        stored: the opened checkpoint.
        direct: its tensors are under the engine's own names and in this rank's shapes.
        digest: model digest of the weights, hex, once somebody has computed it; or "".
    """

    stored: StoredWeights
    direct: bool = False
    digest: str = ""


@dataclass
class OpenUpdate:
    """The update that is open.

    Attributes:
        loading: what the model, or its shadow copy, does around it.
        receiver: takes its tensors in.
        shards: the shard map that it writes through.
        council: the ranks, as the thread that takes tensors in asks them.
        shadow: the copy that it fills, when it is staged; None: it writes into the weights themselves.
        touched: it may have written something.
        checkpoint: directory that it was loaded from, or "".
        origin: the one read that wrote every tensor, if there was one.
        report: what was taken in so far.
        receiver: puts tensors into place.
        adapter: an adapter update: what it stages, once that is known. Nothing of it is used before the commit.
        stages_adapter: it is an adapter update, of this name and version.
        pause: of an adapter update: what the seal does to the requests with the adapter.
    """

    update_id: str
    loading: Loading
    receiver: Receiver
    shards: ShardMap
    council: Council
    shadow: Shadow | None = None
    touched: bool = False
    checkpoint: str = ""
    origin: Origin | None = None
    report: verbs_pb2.WeightsReport = field(default_factory=verbs_pb2.WeightsReport)
    stages_adapter: verbs_pb2.Adapter | None = None
    adapter: LoraAdapter | None = None
    pause: PauseMode.ValueType = common_pb2.PAUSE_MODE_UNSPECIFIED

    @property
    def aside(self) -> bool:
        """Whether it leaves alone what serves until its commit, so that it is filled beside generation."""
        return self.shadow is not None or self.stages_adapter is not None

    def check_complete(self) -> None:
        """Raise WEIGHTS_INCOMPLETE, or GROUP_FAILED, when what came is not all that it must be."""
        if self.stages_adapter is not None and self.adapter is None:
            raise Reason.WEIGHTS_INCOMPLETE.error("no adapter was written in this update")
        if self.receiver.at_risk:
            raise Reason.GROUP_FAILED.error("a broadcast that was given up may still write into the tensors")
        missing = self.receiver.incomplete()
        if missing:
            raise not_written(missing)

    def take_in(self, receive: Callable[[], ReceiveStats]) -> ReceiveStats:
        """Let tensors come. Of an adapter, which nothing uses yet, either all ranks have taken them in or none has."""
        if self.stages_adapter is None:
            return receive()
        taken: list[ReceiveStats] = []
        try:
            self.council.agree(lambda: taken.append(receive()))
        except RlctlError as error:
            raise with_outcome(error, OUTCOME_REJECTED) from error
        return taken[0]


class Rank:
    """One rank: its model, its KV cache, at rank 0 the scheduler, and what has been done to them.

    Attributes:
        checkpoint: directory of the checkpoint that was loaded last.
        writable: the shard map that updates write through.
        receiver: takes updates of the weights in.
        announced: what they announce; for the admin loop.
        adapters: LoRA adapters that are loaded.
        segments: reads updates out of memory that is shared with a trainer.
        handovers: KV entries that go to another engine, or come from one.
        roots: directories that requests may name paths in.
        origin: what the weights were read from, or None when they came otherwise.
        paused: with which mode generation is paused; PAUSE_MODE_UNSPECIFIED: it is not.
        draining: a drain is waiting for the running samples; nothing new starts.
        released: memory regions that are released.
        snapshot: digests by tensor name, kept by the checker for a later compare; None: none were.
        scrambled: how often the checker has scrambled the weights.
        beside: the thread for what must not hold up the steps: filling a shadow copy, reading the weights that serve.
        calibration: of the decode check; None: the engine makes none.
        last_step: when the last generation step ended, on :func:`time.perf_counter`'s clock; 0: none has.
    """

    model: Model
    cache: KVCache
    writable: ShardMap
    receiver: Receiver
    adapters: Adapters

    def __init__(self, config: EngineConfig, options: Options, ranks: Ranks, groups: Groups) -> None:
        self.config = config
        self.options = options
        self.ranks = ranks
        self.groups = groups
        self.device = torch.device(config.device)
        # Nothing is generated while weights are copied: the ranks share the cores for it.
        self.announced = Announced()
        self.segments = SegmentReader(self.device, max(1, usable_cores() // ranks.size), rank=ranks.rank)
        self.handovers = Handovers(ranks)
        self.scheduler: Scheduler | None = None
        self.tokenizer: Tokenizer | None = None
        self.checkpoint = config.model_path
        self.context_length = 0
        self.paused: PauseMode.ValueType = common_pb2.PAUSE_MODE_UNSPECIFIED
        self.draining = False
        self.released: set[MemoryTag.ValueType] = set()
        self.weights = Weights.WHOLE
        self.update: OpenUpdate | None = None
        self.roots = Roots.around(config.model_path, options.allowed_roots)
        self.origin: Origin | None = None
        self.snapshot: dict[str, str] | None = None
        self.scrambled = 0
        self.beside = Beside(self.device, f"rlctl-torch-{ranks.rank}-beside")
        self.calibration: Calibration | None = None
        self.last_step = 0.0

    def load(self) -> str:
        """Build and load the model and allocate the KV cache, all ranks together; returns the model digest, hex.

        Raises what :func:`rlctl_torch.model.model.build` raises, on every rank when on one.
        """
        self.ranks.agree(self._build)
        layers = self.model.probe(self.device)
        tokens = self.options.max_total_tokens
        self.cache = KVCache(
            layers,
            tokens=tokens,
            rows=self.options.max_running,
            longest=self.longest,
            dtype=self.options.kv_dtype or self.model.dtype,
            device=self.device,
        )
        self.adapters = Adapters(self.model)
        if self.ranks.rank == 0:
            slots = SlotAllocator(tokens, self.options.max_running)
            self.scheduler = Scheduler(slots, self.options.max_running, self.adapters)
        self.writable = sabotage.for_updates(self.model.shards, self.ranks.rank, self.ranks.size)
        sabotage.for_decode(self.model.module)
        self.receiver = Receiver(self.writable)
        digest = self.model_digest()
        assert self.origin is not None
        self.origin.digest = digest
        return digest

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that can be served."""
        return min(self.context_length, self.options.max_total_tokens)

    @property
    def may_run(self) -> bool:
        """Whether requests may run now."""
        return not (self.paused or self.released or self.in_place) and self.weights is Weights.WHOLE

    @property
    def in_place(self) -> bool:
        """Whether an update is open that no request runs beside: one that writes into the weights themselves."""
        return self.update is not None and not self.update.aside

    @property
    def at_rest(self) -> bool:
        """Whether no step computes anything until a command says otherwise; the same at every rank."""
        return bool(self.paused) or self.in_place

    def model_digest(self, key: bytes = b"") -> str:
        """Digest of the full tensors; all ranks together."""
        with self.ranks.exchanging() as exchange:
            return model_digest(self.model.shards, exchange, key=key).digest

    def interrupt(self, update_id: str = "", cause: str = INTERRUPTED) -> None:
        """Break what takes tensors in, of this update only if it is named; from any thread."""
        self.receiver.interrupt(update_id, cause)
        if (update := self.update) is not None:
            update.receiver.interrupt(update_id, cause)

    def read_from(self, origin: Origin | None) -> None:
        """The weights were read from there; what they were read from before is given back."""
        if self.origin is not None and self.origin is not origin:
            self.origin.stored.close()
        self.origin = origin

    def refuse_during_update(self) -> None:
        """Raise UPDATE_IN_PROGRESS when an update is open."""
        if self.update is not None:
            raise Reason.UPDATE_IN_PROGRESS.error(f"update {self.update.update_id} is open")

    def refuse_active(self) -> None:
        """Raise ACTIVE_REQUESTS, with their number and the first ids, when requests wait or run and none is paused."""
        refuse([] if self.scheduler is None or self.paused else self.scheduler.active, "are waiting or running")

    def put_adapter(self, adapter: LoraAdapter) -> None:
        """Load or replace an adapter; every rank at the same step."""
        if self.scheduler is None:
            self.adapters.put(adapter)
        else:
            self.scheduler.put_adapter(adapter)

    def drop_adapter(self, name: str) -> None:
        """Unload an adapter; every rank at the same step. What waits or runs with it ends."""
        if self.scheduler is None:
            self.adapters.drop(name)
        else:
            self.scheduler.drop_adapter(name)

    def synchronise(self) -> None:
        """Wait until the device has done what was enqueued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _build(self) -> None:
        checkpoint = open_checkpoint(self.config.model_path)
        self.model = build(checkpoint, self.config.dtype, self.ranks, self.device)
        self.origin = Origin(checkpoint)
        if self.ranks.rank == 0:
            self.tokenizer = find_tokenizer(self.config.model_path)
        longest, why = positions_of(self.model.config)
        self.context_length = self.options.context_length or longest or self.options.max_total_tokens
        if longest and self.context_length > longest:
            raise Reason.FIELD_INVALID.error(
                f"context_length is {self.context_length}, {why} {longest}", field="options.context_length"
            )


def refuse(active: Sequence[str], doing: str) -> None:
    """Raise ACTIVE_REQUESTS, with their number and the first ids, unless there are none."""
    if active:
        raise Reason.ACTIVE_REQUESTS.error(
            f"{len(active)} requests {doing}: {', '.join(active[:16])}",
            metadata={"count": str(len(active)), "rids": ",".join(active[:16])},
        )

"""State of a rank's engine thread, and the facts that decide whether requests may run."""

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
    """State of the weights, as far as this rank knows."""

    WHOLE = "one version"
    MIXED = "a mixture of versions, or scrambled"
    LOST = "released without a copy"


@dataclass
class Origin:
    """Checkpoint from which all present weights were read, for the rollback of a failed load.

    The files stay open. So the contents are readable after a pull has replaced the files, and need no memory.

    Attributes:
        direct: the tensors have the engine's own names and this rank's shapes.
        digest: model digest of the weights, hex, once computed; or "".
    """

    stored: StoredWeights
    direct: bool = False
    digest: str = ""


@dataclass
class OpenUpdate:
    """The open update.

    Attributes:
        loading: load hooks of the model or of its shadow copy.
        receiver: receiver of the update's tensors.
        shards: shard map of the writes.
        council: the ranks, for the thread that receives tensors.
        shadow: shadow copy of a staged update, or None.
        touched: the update may have written.
        checkpoint: directory of the loaded checkpoint, or "".
        origin: checkpoint of the single read that wrote every tensor, or None.
        report: tensors received so far.
        stages_adapter: name and version of the adapter of an adapter update, or None.
        adapter: staged adapter of an adapter update, once known. The adapter is unused before the commit.
        pause: mode of the seal for the requests with the adapter.
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
        """Whether the update leaves the served weights alone until its commit, and is filled during generation."""
        return self.shadow is not None or self.stages_adapter is not None

    def check_complete(self) -> None:
        """Raise WEIGHTS_INCOMPLETE or GROUP_FAILED unless all tensors have been written."""
        if self.stages_adapter is not None and self.adapter is None:
            raise Reason.WEIGHTS_INCOMPLETE.error("no adapter was written in this update")
        if self.receiver.at_risk:
            raise Reason.GROUP_FAILED.error("a broadcast that was given up may still write into the tensors")
        missing = self.receiver.incomplete()
        if missing:
            raise not_written(missing)

    def take_in(self, receive: Callable[[], ReceiveStats]) -> ReceiveStats:
        """Receive tensors. An adapter's tensors, which are not yet in use, are received by all ranks or by no rank."""
        if self.stages_adapter is None:
            return receive()
        stats: list[ReceiveStats] = []
        try:
            self.council.agree(lambda: stats.append(receive()))
        except RlctlError as error:
            raise with_outcome(error, OUTCOME_REJECTED) from error
        return stats[0]


class Rank:
    """State of a rank: model, KV cache, at rank 0 the scheduler, and the effects of commands.

    Attributes:
        checkpoint: directory of the checkpoint that was loaded last.
        writable: shard map of updates.
        receiver: receiver of in-place updates.
        announced: parser of announced buckets, for the admin loop.
        segments: reader of segments of shared memory.
        handovers: KV entries to and from other engines.
        roots: directories in which requests may name paths.
        origin: checkpoint of the weights, or None if the weights were not all read from one checkpoint.
        paused: mode of the pause; PAUSE_MODE_UNSPECIFIED: not paused.
        draining: a drain waits for the running samples; no sample starts.
        snapshot: digests by tensor name for a later compare, or None.
        scrambled: number of times that the checker has scrambled the weights.
        beside: background thread, for work that must not delay the steps: filling a shadow copy, reading the served
            weights.
        calibration: calibration of the decode check; None: no decode check.
        last_step: end of the last generation step on :func:`time.perf_counter`'s clock; 0: no step yet.
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
        self.announced = Announced()
        # In-place updates copy weights while nothing is generated: the ranks share the cores for this.
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
        """Build and load the model and allocate the KV cache, all ranks together. Return the model digest, hex.

        Raises as :func:`rlctl_torch.model.model.build`, on every rank if any rank fails.
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
        """Number of tokens of the longest sequence that can be served."""
        return min(self.context_length, self.options.max_total_tokens)

    @property
    def may_run(self) -> bool:
        return not (self.paused or self.released or self.in_place) and self.weights is Weights.WHOLE

    @property
    def in_place(self) -> bool:
        """Whether an update is open that writes into the served weights, so that no request may run."""
        return self.update is not None and not self.update.aside

    @property
    def at_rest(self) -> bool:
        """Whether no step computes until a command changes this; the same on every rank."""
        return bool(self.paused) or self.in_place

    def model_digest(self, key: bytes = b"") -> str:
        """Return the digest of the full tensors; all ranks together."""
        with self.ranks.exchanging() as exchange:
            return model_digest(self.model.shards, exchange, key=key).digest

    def interrupt(self, update_id: str = "", cause: str = INTERRUPTED) -> None:
        """Interrupt receives, only of ``update_id`` if given; from any thread."""
        self.receiver.interrupt(update_id, cause)
        if (update := self.update) is not None:
            update.receiver.interrupt(update_id, cause)

    def read_from(self, origin: Origin | None) -> None:
        """Record the checkpoint of the present weights, and close the former checkpoint."""
        if self.origin is not None and self.origin is not origin:
            self.origin.stored.close()
        self.origin = origin

    def refuse_during_update(self) -> None:
        if self.update is not None:
            raise Reason.UPDATE_IN_PROGRESS.error(f"update {self.update.update_id} is open")

    def refuse_active(self) -> None:
        """Raise ACTIVE_REQUESTS, with number and first ids, if requests wait or run and generation is not paused."""
        refuse([] if self.scheduler is None or self.paused else self.scheduler.active, "are waiting or running")

    def put_adapter(self, adapter: LoraAdapter) -> None:
        """Load or replace an adapter, on every rank at the same step."""
        if self.scheduler is None:
            self.adapters.put(adapter)
        else:
            self.scheduler.put_adapter(adapter)

    def drop_adapter(self, name: str) -> None:
        """Unload an adapter and end its requests, on every rank at the same step."""
        if self.scheduler is None:
            self.adapters.drop(name)
        else:
            self.scheduler.drop_adapter(name)

    def synchronise(self) -> None:
        """Wait until the device has completed all enqueued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _build(self) -> None:
        checkpoint = open_checkpoint(self.config.model_path)
        self.model = build(checkpoint, self.config.dtype, self.ranks, self.device)
        self.origin = Origin(checkpoint)
        if self.ranks.rank == 0:
            self.tokenizer = find_tokenizer(self.config.model_path)
        longest, cause = positions_of(self.model.config)
        self.context_length = self.options.context_length or longest or self.options.max_total_tokens
        if longest and self.context_length > longest:
            raise Reason.FIELD_INVALID.error(
                f"context_length is {self.context_length}, {cause} {longest}", field="options.context_length"
            )


def refuse(active: Sequence[str], doing: str) -> None:
    """Raise ACTIVE_REQUESTS, with number and first ids, if there are any."""
    if active:
        raise Reason.ACTIVE_REQUESTS.error(
            f"{len(active)} requests {doing}: {', '.join(active[:16])}",
            metadata={"count": str(len(active)), "rids": ",".join(active[:16])},
        )

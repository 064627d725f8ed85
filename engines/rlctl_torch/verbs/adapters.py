"""Adapter updates at a rank, staged beside the loaded adapters and put in place by the commit; and unloading.

Nothing served changes before the commit, and all ranks commit at the same step. So a failed adapter update leaves no
mixture, and its failures are refusals at any time. Tensors are received during generation. Only the requests with the
adapter are stopped, from the seal to the commit.
"""

from __future__ import annotations

import time

from rlctl.contract.durations import add_seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import MEMORY_TAG_WEIGHTS, OUTCOME_REJECTED
from rlctl.v1.verbs_pb2 import (
    APPLY_MODE_STAGED,
    AdapterConfig,
    AdapterList,
    LoadAdapterRequest,
    PrepareUpdateRequest,
    UnloadAdapterRequest,
    WeightsReport,
)
from rlctl.weights.checkpoint.checkpoint import Checkpoint
from rlctl.weights.formats import lora
from rlctl.weights.receiver import Receiver
from rlctl.weights.shards.load_hooks import Load, LoadHooks, Loading, refuse_draft
from rlctl.weights.shards.shard_map import ShardMap
from rlctl.weights.tensor.tensors import parse_dtype
from rlctl_torch.model.lora import LoraAdapter
from rlctl_torch.rank import OpenUpdate, Rank, Weights, refuse
from rlctl_torch.steps.background import Later
from rlctl_torch.steps.collectives import Broken
from rlctl_torch.steps.ordered_commands import Action, with_outcome
from rlctl_torch.verbs.update import InUpdate


class PrepareAdapter(Action):
    """PrepareUpdate of kind adapter. A repeat of the update starts anew."""

    def __init__(self, rank: Rank, request: PrepareUpdateRequest, update_id: str) -> None:
        if not update_id:
            raise Reason.FIELD_REQUIRED.error("PrepareUpdate opens an update", field="header.fence.update_id")
        if not request.adapter.name:
            raise Reason.FIELD_REQUIRED.error("an adapter update names its adapter", field="adapter.name")
        if request.apply == APPLY_MODE_STAGED:
            raise Reason.FIELD_CONFLICT.error("an adapter is put in its place by the commit in any case", field="apply")
        refuse_draft(request.selector, "selector")
        self._rank = rank
        self._request = request
        self._update_id = update_id

    def admit(self) -> bool:
        """Refuse while the base is not whole, a different update is open, or requests with the adapter are active.

        Active requests are allowed if the update pauses or aborts these requests, or during a pause.
        """
        rank, name = self._rank, self._request.adapter.name
        if rank.update is not None and rank.update.update_id != self._update_id:
            rank.refuse_during_update()
        if MEMORY_TAG_WEIGHTS in rank.released:
            raise Reason.MEMORY_RELEASED.error("the weights are released, so no adapter can be loaded")
        if rank.weights is not Weights.WHOLE:
            raise Reason.WEIGHTS_DIRTY.error(f"the weights are {rank.weights.value}")
        stopped = self._request.pause or self._request.abort_all_requests or rank.paused
        if not stopped and rank.scheduler is not None and not rank.scheduler.is_paused(name):
            refuse(rank.scheduler.using(name), f"are waiting or running with adapter {name!r}")
        return True

    def run(self) -> WeightsReport:
        """Stage memory for the tensors, unless the adapter comes from disk."""
        rank, request = self._rank, self._request
        staged: list[LoraAdapter] = []

        def stage() -> None:
            if request.HasField("adapter_config"):
                config, field = request.adapter_config, "adapter_config"
                wire = rank.adapters.wire(config, parse_dtype(config.dtype, f"{field}.dtype"), field)
                what = f"adapter {request.adapter.name!r}"
                staged.append(rank.adapters.stage(request.adapter, config, wire, what=what, field=field))

        rank.ranks.agree(stage)
        if request.abort_all_requests and rank.scheduler is not None:
            rank.scheduler.abort(rank.scheduler.using(request.adapter.name))
        if rank.scheduler is not None:
            rank.scheduler.release_adapter()  # a sealed update may start anew
        loading = Loading(LoadHooks(), Load(self._update_id, full=True))
        empty = ShardMap({})
        update = OpenUpdate(
            self._update_id,
            loading,
            Receiver(empty),
            empty,
            rank.ranks.aside,
            stages_adapter=request.adapter,
            pause=request.pause,
        )
        if staged:
            take(update, staged[0])
        rank.update = update
        return update.report


def take(update: OpenUpdate, adapter: LoraAdapter) -> None:
    """Make ``adapter`` the destination of the update's tensors."""
    update.adapter = adapter
    update.shards = adapter.shards
    update.receiver = Receiver(adapter.shards)
    update.receiver.begin(update.update_id)


class LoadAdapter(InUpdate):
    """LoadAdapter: every rank reads its parts into memory of the update."""

    def __init__(self, rank: Rank, request: LoadAdapterRequest, update_id: str) -> None:
        super().__init__(rank, update_id)
        self._request = request
        self._config = AdapterConfig()

    def run(self) -> AdapterList | Later:
        """Check the files on all ranks, then read the files during generation.

        An in-place update of the base weights refuses the command at the step, because its ranks agree in the engine
        thread only.
        """
        update = self._open()
        return Later(lambda: self._load(update)) if update.aside else self._load(update)

    def _load(self, update: OpenUpdate) -> AdapterList:
        rank = self._rank
        opened: list[Checkpoint] = []
        started = time.perf_counter()
        try:
            update.council.agree(lambda: opened.append(self._stage(update)))
            self._refuse_other_configs(update)
            assert update.adapter is not None
            shards = update.adapter.shards
            update.council.agree(lambda: update.receiver.wrote(shards.load(opened[0])))
            rank.synchronise()
        except RlctlError as error:
            raise with_outcome(error, OUTCOME_REJECTED) from error
        except Broken as broken:
            raise with_outcome(broken.error, OUTCOME_REJECTED) from broken
        finally:
            for stored in opened:
                stored.close()
        update.report.tensors += len(shards.shards)
        update.report.bytes_received += sum(shard.local.nbytes for shard in shards.shards.values())
        add_seconds(update.report.load, time.perf_counter() - started)
        return AdapterList(adapters=[update.adapter.info])

    def _stage(self, update: OpenUpdate) -> Checkpoint:
        rank, request = self._rank, self._request
        adapter = update.stages_adapter
        if adapter is None or adapter.name != request.name:
            subject = f"adapter {adapter.name!r}" if adapter else "the base weights"
            raise Reason.FIELD_CONFLICT.error(f"the open update is of {subject}", field="name")
        path = rank.roots.resolve_checkpoint(request.path, field="path")
        config, stored = lora.open_adapter(path)
        try:
            take(update, rank.adapters.stage(adapter, config, stored.metas, what=f"the adapter {path}", field="path"))
        except RlctlError:
            stored.close()
            raise
        self._config = config
        return stored

    def _refuse_other_configs(self, update: OpenUpdate) -> None:
        """Raise CHECKPOINT_MISMATCH, at every rank, if the ranks have read different configs.

        The digest of an adapter covers its tensors only, and each rank scales by the config that it has read.
        """
        with update.council.exchanging() as exchange:
            configs = exchange.all_gather_bytes(self._config.SerializeToString(deterministic=True))
        ranks = [rank for rank, config in enumerate(configs) if config != configs[0]]
        if ranks:
            raise Reason.CHECKPOINT_MISMATCH.error(
                f"rank {ranks[0]} has read another {lora.CONFIG} than rank 0 in {self._request.path}",
                field="path",
                next_step="Make the adapter's files equal on all hosts of the stage, and load it again.",
            )


class Unload(Action):
    """UnloadAdapter, optionally with an abort of its requests."""

    def __init__(self, rank: Rank, request: UnloadAdapterRequest) -> None:
        self._rank = rank
        self._request = request

    def admit(self) -> bool:
        """Refuse while an update is open, the adapter is not loaded, or requests use the adapter and are not to be
        aborted.
        """
        rank, name = self._rank, self._request.name
        assert rank.scheduler is not None
        rank.refuse_during_update()
        rank.adapters.find(name, "name")
        if not self._request.abort_requests:
            refuse(rank.scheduler.using(name), f"are waiting or running with adapter {name!r}")
        return True

    def run(self) -> AdapterList:
        """Unload the adapter and end its requests."""
        self._rank.drop_adapter(self._request.name)
        return listed(self._rank)


def listed(rank: Rank) -> AdapterList:
    """Return the adapters of this rank, sorted by name."""
    return AdapterList(adapters=[adapter.info for _, adapter in sorted(rank.adapters.loaded.items())])

"""PauseGeneration, ContinueGeneration and FlushCache, for all requests and for an adapter."""

from __future__ import annotations

import time

import torch

from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import (
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    PAUSE_MODE_UNSPECIFIED,
    MemoryTag,
    PauseMode,
)
from rlctl.v1.verbs_pb2 import (
    ContinueGenerationRequest,
    FlushCacheRequest,
    FlushReport,
    PauseGenerationRequest,
)
from rlctl_torch.rank import Rank, Weights
from rlctl_torch.steps.ordered_commands import Action

PAUSE_MODES = (PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE, PAUSE_MODE_DRAIN)
CACHE_TIERS = ("kv",)


def mode_name(mode: PauseMode.ValueType) -> str:
    """Return the name of a mode, such as "in_place" for PAUSE_MODE_IN_PLACE."""
    return PauseMode.Name(mode).removeprefix("PAUSE_MODE_").lower()


class Pause(Action):
    """PauseGeneration. A repeat of the mode is confirmed; new requests wait during the pause."""

    def __init__(self, rank: Rank, request: PauseGenerationRequest) -> None:
        self._rank = rank
        self._mode = _mode_of(request)

    def admit(self) -> bool:
        """Refuse a mode that would end requests frozen in place. A drain waits until no sample runs."""
        rank = self._rank
        assert rank.scheduler is not None
        if self._mode == PAUSE_MODE_DRAIN and (frozen := rank.scheduler.frozen()) and not rank.paused:
            raise Reason.PAUSE_MODE_CONFLICT.error(
                f"{frozen} samples are frozen in place by the pause of their adapter; they end only after its continue",
                field="mode",
            )
        if rank.paused == PAUSE_MODE_IN_PLACE and self._mode in (PAUSE_MODE_ABORT, PAUSE_MODE_DRAIN):
            raise Reason.PAUSE_MODE_CONFLICT.error(
                f"generation is paused in_place; {mode_name(self._mode)} would have to end frozen requests",
                field="mode",
            )
        if self._mode == PAUSE_MODE_DRAIN and not rank.paused:
            rank.draining = True
            return rank.scheduler.running == 0
        return True

    def give_up(self) -> None:
        """End the drain, so that waiting requests start again."""
        self._rank.draining = False

    def run(self) -> None:
        """Pause. Rank 0 also aborts all requests or retracts the running samples, by mode."""
        rank = self._rank
        rank.draining = False
        if rank.scheduler is not None and rank.paused != self._mode:
            if self._mode == PAUSE_MODE_ABORT:
                rank.scheduler.abort_all()
            elif self._mode == PAUSE_MODE_RETRACT:
                rank.scheduler.retract_all()
        rank.paused = self._mode


class PauseAdapter(Action):
    """PauseGeneration of an adapter. A repeat of the mode is confirmed; new requests wait during the pause."""

    def __init__(self, rank: Rank, request: PauseGenerationRequest) -> None:
        self._rank = rank
        self._name = request.adapter
        self._mode = _mode_of(request)

    def admit(self) -> bool:
        """Refuse a mode that would end requests frozen in place. A drain waits until no sample of the adapter runs."""
        rank, scheduler = self._rank, self._rank.scheduler
        assert scheduler is not None
        runs = scheduler.runs_with(self._name)
        frozen = runs and (scheduler.is_paused(self._name) or rank.paused == PAUSE_MODE_IN_PLACE)
        if frozen and self._mode in (PAUSE_MODE_ABORT, PAUSE_MODE_DRAIN):
            raise Reason.PAUSE_MODE_CONFLICT.error(
                f"requests with adapter {self._name!r} are frozen in place; {mode_name(self._mode)} would have to "
                "end frozen requests",
                field="mode",
            )
        if self._mode == PAUSE_MODE_DRAIN and not scheduler.is_paused(self._name):
            scheduler.drain_paused(self._name)
            return not runs
        return True

    def give_up(self) -> None:
        """End the drain, so that waiting requests start again."""
        scheduler = self._rank.scheduler
        if scheduler is not None and not scheduler.is_paused(self._name):
            scheduler.continue_adapter(self._name)

    def run(self) -> None:
        """Pause the adapter. Rank 0 also aborts its requests or retracts its running samples, by mode."""
        if self._rank.scheduler is not None:
            self._rank.scheduler.pause_adapter(self._name, self._mode)


class ContinueAdapter(Action):
    """ContinueGeneration of an adapter, in any state of the weights. Confirms if the adapter is not paused."""

    def __init__(self, rank: Rank, request: ContinueGenerationRequest) -> None:
        self._rank = rank
        self._name = request.adapter

    def run(self) -> None:
        if self._rank.scheduler is not None:
            self._rank.scheduler.continue_adapter(self._name)


class Continue(Action):
    """ContinueGeneration. Confirms if generation is not paused."""

    def __init__(self, rank: Rank, request: ContinueGenerationRequest) -> None:
        self._rank = rank
        self._empty_cache = request.torch_empty_cache if request.HasField("torch_empty_cache") else True

    def admit(self) -> bool:
        """Refuse during an in-place update, with released memory, or without whole weights."""
        rank = self._rank
        if rank.in_place:
            rank.refuse_during_update()
        if rank.released:
            names = ", ".join(MemoryTag.Name(t).removeprefix("MEMORY_TAG_").lower() for t in sorted(rank.released))
            raise Reason.MEMORY_RELEASED.error(f"released: {names}; generation needs every region")
        if rank.weights is Weights.MIXED:
            raise Reason.WEIGHTS_DIRTY.error(f"the weights are {rank.weights.value}")
        if rank.weights is Weights.LOST:
            raise Reason.WEIGHTS_STALE.error("the weights were released, and no update has written them since")
        return True

    def run(self) -> None:
        if self._empty_cache and self._rank.device.type == "cuda":
            torch.cuda.empty_cache()
        self._rank.paused = PAUSE_MODE_UNSPECIFIED


class Flush(Action):
    """FlushCache. The engine keeps no entries after their request, so the flush only checks for entries in use."""

    def __init__(self, rank: Rank, request: FlushCacheRequest) -> None:
        self._rank = rank
        timeout = request.idle_timeout
        self._until = time.monotonic() + timeout.seconds + timeout.nanos / 1e9

    def admit(self) -> bool:
        """Wait for running samples for the time in the request. Samples frozen in place never end."""
        rank = self._rank
        assert rank.scheduler is not None
        running = rank.scheduler.running
        if not running:
            return True
        frozen = rank.paused or rank.scheduler.frozen() == running
        if frozen or time.monotonic() >= self._until:
            state = "frozen in place" if frozen else "running"
            raise Reason.ACTIVE_REQUESTS.error(
                f"{running} samples are {state} and use their KV entries", metadata={"count": str(running)}
            )
        return False

    def run(self) -> FlushReport:
        """Report the entries dropped by finished and retracted samples since the last flush; rank 0 counts."""
        scheduler = self._rank.scheduler
        return FlushReport(tiers=CACHE_TIERS, tokens=0 if scheduler is None else scheduler.take_dropped())


def _mode_of(request: PauseGenerationRequest) -> PauseMode.ValueType:
    mode = request.mode or PAUSE_MODE_ABORT
    if mode not in PAUSE_MODES:
        raise Reason.UNSUPPORTED.error(f"the torch engine has no pause mode {mode}", field="mode")
    return mode

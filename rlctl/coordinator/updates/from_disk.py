"""Whole updates in a single call, whose targets read a checkpoint or an adapter from disk."""

from __future__ import annotations

import asyncio
import functools
import logging

from rlctl.contract.errors import Reason
from rlctl.contract.outcomes import acknowledged, blame
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.transaction.planner import Planner
from rlctl.coordinator.transaction.update import Update
from rlctl.coordinator.transaction.verification_levels import Expected
from rlctl.coordinator.updates.manager import Updates
from rlctl.v1.common_pb2 import VERIFICATION_LEVEL_EXPECTED, VERIFICATION_LEVEL_NONE
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.update_pb2 import (
    DATA_PATH_DISK,
    BeginWeightUpdateRequest,
    RolloutStrategy,
    Trainer,
)
from rlctl.v1.verbs_pb2 import (
    UPDATE_KIND_ADAPTER,
    UPDATE_KIND_FULL,
    UPDATE_KIND_PARTIAL,
    Adapter,
    InspectCheckpointRequest,
    LoadAdapterRequest,
    UpdateOptions,
    UpdateWeightsFromDiskRequest,
)

log = logging.getLogger(__name__)

Request = UpdateWeightsFromDiskRequest | LoadAdapterRequest

_READ_AGAIN = ("", "auto", "safetensors")
"""Load formats of checkpoints that engines can be launched with or healed from."""


class FromDisk:
    """Opens updates from disk and supplies their content."""

    def __init__(self, context: Context, updates: Updates, planner: Planner) -> None:
        self._roster = context.roster
        self._clock = context.clock
        self._updates = updates
        self._planner = planner

    async def update(self, request: UpdateWeightsFromDiskRequest, timeout_s: float | None) -> Run:
        """Run a whole update in a single call: every target reads a checkpoint."""
        target = request.header.target
        model = self._planner.only_updatable(target)
        begin = BeginWeightUpdateRequest(
            header=request.header,
            model=model,
            version=request.weight_version or self._label(),
            path=DATA_PATH_DISK,
            kind=UPDATE_KIND_PARTIAL if request.target_modules else UPDATE_KIND_FULL,
            apply=request.apply,
            rollout=RolloutStrategy(max_unavailable=request.max_unavailable),
            options=request.options,
            trainer=self._nobody("disk", model),
        )

        def vet(update: Update) -> None:
            update.levels(Expected(digest=request.expected_digest))
            if not request.target_modules and request.load_format in _READ_AGAIN:
                update.checkpoint = request.model_path

        content = functools.partial(self._read, request=request)
        return await self._updates.begin_whole(begin, timeout_s, request, content, vet=vet)

    def _label(self) -> str:
        """Return a label for an unnamed version, from the random end of an id. The start of an id is the same for a
        minute.
        """
        return f"disk-{self._clock.new_id()[-12:]}"

    def _nobody(self, name: str, model: str) -> Trainer:
        """Return a trainer with the model's present incarnation. An update from disk fences no trainer."""
        return Trainer(name=name, incarnation=self._roster.model(model).record.trainer_incarnation)

    async def load_adapter(self, request: LoadAdapterRequest, timeout_s: float | None) -> Run:
        """Run a whole adapter update in a single call: every stage of the model reads the adapter from disk."""
        model = self._planner.only_model(request.header.target)
        version = request.version or self._label()
        begin = BeginWeightUpdateRequest(
            header=request.header,
            model=model,
            version=version,
            path=DATA_PATH_DISK,
            kind=UPDATE_KIND_ADAPTER,
            adapter=request.name,
            options=UpdateOptions(abort_all_requests=request.abort_requests),
            trainer=self._nobody("adapters", model),
        )
        adapter = Adapter(name=request.name, version=version, path=request.path, pinned=request.pinned)

        def vet(_: Update) -> None:
            loaded = {entry.name for entry in self._roster.model(model).record.adapters}
            if request.only_new and request.name in loaded:
                raise Reason.ADAPTER_EXISTS.error(f"{model} has an adapter {request.name} already", field="name")

        content = functools.partial(self._read, request=request)
        return await self._updates.begin_whole(begin, timeout_s, request, content, adapter=adapter, vet=vet)

    async def _read(self, update: Update, *, request: Request) -> None:
        """Let every target read. An abort meanwhile does not wait for the reads."""
        digest = ""
        if isinstance(request, UpdateWeightsFromDiskRequest):
            digest = await self._inspect(update, request)
        if not update.owner.decided.is_set():
            if not update.aside:
                await update.check_journal()
            await update.ready()
        if update.owner.decided.is_set():
            return
        command = type(request).FromString(request.SerializeToString())
        compares = all(VERIFICATION_LEVEL_EXPECTED in slot.capabilities.verification for slot in update.targets)
        if isinstance(command, UpdateWeightsFromDiskRequest) and compares:
            command.expected_digest = digest  # a read with a different digest is rolled back
        reading = asyncio.create_task(update.step(command, update.targets))
        aborted = asyncio.create_task(update.owner.decided.wait())
        await asyncio.wait({reading, aborted}, return_when=asyncio.FIRST_COMPLETED)
        aborted.cancel()
        if not reading.done():
            reading.add_done_callback(_tell)
            return
        results = reading.result()
        update.received += results
        for result in results:
            update.run.add(result)
        failed = [r for r in results if not acknowledged(r, update=True)]
        if failed and update.remaining - len(failed) < update.quorum:
            raise blame(failed[0])
        update.owner.decide(expected=Expected(digest=digest))

    async def _inspect(self, update: Update, request: UpdateWeightsFromDiskRequest) -> str:
        """Let every target inspect the checkpoint before any pause. Returns the expected model digest, if known.

        The digest is the request's or, for a full update, the digest that all targets find declared in the checkpoint.
        Raises the first refusal.
        """
        inspect = InspectCheckpointRequest(
            model_path=request.model_path, load_format=request.load_format, target_modules=request.target_modules
        )
        results = await update.step(inspect, update.targets)
        failed = [result for result in results if not acknowledged(result, update=False)]
        for result in failed:
            update.run.add(result)
        if failed and update.remaining - len(failed) < update.quorum:
            raise blame(failed[0])
        declared = {rank.checkpoint.model_digest for result in results for rank in result.rank_results}
        verifies = update.record.request.options.verify != VERIFICATION_LEVEL_NONE
        usable = len(declared) == 1 and update.full and not failed and verifies
        return request.expected_digest or (declared.pop() if usable else "")


def _tell(reading: asyncio.Task[list[StageResult]]) -> None:
    """Log the failure of a read whose update was aborted."""
    error = None if reading.cancelled() else reading.exception()
    if error is not None:
        log.warning("a read from disk of an aborted update failed: %s", error)

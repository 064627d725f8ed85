"""Adapters of a model: the end of an update that loads an adapter, and unloading.

The adapter is staged and verified at every target while generation continues. Then the targets are sealed, which stops
only the requests with the adapter. Then the adapter's version goes on record. From then on no stage serves a different
version, since grants name the versions that may be served. Only then the targets swap the adapter in. A target that
fails the swap has no adapter, rather than the old adapter.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.outcomes import blame, taken_back
from rlctl.coordinator.fleet import versions
from rlctl.coordinator.fleet.capabilities import can_digest
from rlctl.coordinator.fleet.model_state import ModelState, model_put
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.transaction import verification_levels
from rlctl.coordinator.transaction.commit import NOT_CONFIRMED, Commit, Levels
from rlctl.coordinator.transaction.verification_levels import Expected
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    VERIFICATION_LEVEL_NONE,
    WeightVersion,
)
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.verbs_pb2 import (
    AbortUpdateRequest,
    Adapter,
    CheckWeightsRequest,
    CommitUpdateRequest,
    UnloadAdapterRequest,
)


class CommitAdapter(Commit):
    """Finishes an update whose targets have staged an adapter. Weights and version stay as they are."""

    async def restore(self, expected: Expected) -> None:
        """Verify and swap in missing adapters of the model at targets. Raises if a target did not confirm."""
        update = self._update
        levels = await self._written(expected)
        confirmed, _ = await self._complete(update.targets, levels, expected)
        for result in await self._put(confirmed):
            if result.outcome != OUTCOME_APPLIED:
                raise update.short_of_quorum(0, self._cause())
        await self._await_admission(confirmed)

    async def _complete(self, slots: Sequence[Slot], levels: Levels, expected: Expected) -> tuple[list[Slot], str]:
        """Verify the staged adapter. Returns the targets with the right content, and the digest, or ""."""
        update = self._update
        self._levels = levels
        # Always digested: an adapter is small, missing tensors show here, and a later load must match.
        checked = [slot for slot in slots if can_digest(slot)]
        results = await update.step(CheckWeightsRequest(adapter=self._adapter.name), checked)
        failed = {result.slot: blame(result) for result in results if result.outcome != OUTCOME_APPLIED}
        errors = verification_levels.judge_digests(results, levels, expected)
        scale = self._adapter.scale if self._adapter.HasField("scale") else None
        answered = [result for result in results if result.slot not in errors]
        other_scales, self._scale = verification_levels.judge_scales(answered, scale)
        errors |= other_scales
        update.timeline.fail(errors, levels)
        errors |= failed
        if len(slots) - len(errors) >= update.quorum:
            await update.check_journal()
            sealed = await update.seal_adapter([slot for slot in slots if slot.name not in errors])
            errors |= {result.slot: blame(result) for result in sealed if result.outcome != OUTCOME_APPLIED}
        for slot in slots:
            if slot.name in errors:
                self._run.add(_refused(slot, errors[slot.name]))
        if errors and len(slots) - len(errors) < update.quorum:
            raise next(iter(errors.values()))
        digests = {r.rank_results[0].check.model_digest for r in results if r.slot not in errors}
        return [slot for slot in slots if slot.name not in errors], digests.pop() if digests else ""

    async def _publish(self, good: Sequence[Slot], digest: str, beside: Sequence[WeightVersion] = ()) -> None:
        assert not beside, "the version of the weights stays as it is"
        update = self._update
        if update.published:
            return
        adapter = Adapter()
        adapter.CopyFrom(self._adapter)
        adapter.digest = digest
        adapter.lora_rank = adapter.lora_rank or _rank_of(self._run)
        if self._scale is not None:
            adapter.scale = self._scale
        if not adapter.path:
            adapter.config.CopyFrom(update.record.request.adapter_config)
        async with self._roster.publishing:
            record = versions.with_adapter(update.model, adapter)
            await update.record_published(model_put(record))
            update.model.record = record
        self._roster.changed()
        for slot in good:
            self._peers.grant(slot)
        results = await self._put(good)
        failed = [slot for slot, r in zip(good, results, strict=True) if r.outcome != OUTCOME_APPLIED]
        await update.step(AbortUpdateRequest(reason=NOT_CONFIRMED), failed, cleanup=True)
        self._run.operation.weight_version.CopyFrom(update.record.plan.version)
        self._run.operation.verification.CopyFrom(self._evidence())
        self._run.operation.adapters.extend(record.adapters)

    async def _put(self, slots: Sequence[Slot]) -> list[StageResult]:
        request = CommitUpdateRequest(version=self._update.record.plan.version)
        try:
            results = await self._update.step(request, slots, cleanup=True)
        except RlctlError as error:
            # The results of the staging are no results of the commit.
            unknown = Reason.JOURNAL_FAILED.error(error.message, outcome=OUTCOME_UNKNOWN)
            self._spoil({slot.name: unknown for slot in slots})
            raise
        for result in results:
            if result.outcome == OUTCOME_APPLIED:
                self._certify_one(result, self._levels.get(result.slot, VERIFICATION_LEVEL_NONE))
            self._run.add(result)
        return results

    @property
    def _adapter(self) -> Adapter:
        assert self._update.adapter is not None
        return self._update.adapter

    _levels: Levels
    _scale: float | None


async def unload(
    request: UnloadAdapterRequest,
    model: ModelState,
    targets: Sequence[Slot],
    run: Run,
    deadline: float,
    context: Context,
) -> None:
    """Unload an adapter at its holders.

    If a holder may have unloaded the adapter, the model loses it, and on return no stage serves it. Remaining holders
    are cleared as orphans (`orphans.py`). If the journal does not record the loss, heals load the adapter again: no
    holder's result is APPLIED.
    """
    run.refuse_given_up()
    results = await context.fanout.step(request, targets, run, deadline)
    unchanged = all(r.outcome not in versions.POSSIBLY_DONE and r.error.reason != _NOT_FOUND for r in results)
    if not unchanged:
        async with context.roster.publishing:
            record = versions.without_adapter(model, request.name)
            try:
                await context.journal.write([model_put(record)])
            except RlctlError as error:
                cause = f"unloaded, but the adapter is still the model's, and a heal may load it again: {error.message}"
                for result in results:
                    if result.outcome == OUTCOME_APPLIED:
                        run.add(taken_back(result, cause, OUTCOME_UNKNOWN))
                raise
            model.record = record
        await context.peers.tell(model)
    run.operation.adapters.extend(model.record.adapters)


_NOT_FOUND = Reason.ADAPTER_NOT_FOUND.name


def holders(request: UnloadAdapterRequest, model: ModelState, slots: Sequence[Slot]) -> list[Slot]:
    """Return the stages that hold an adapter, or all stages if no stage reports it. Raises ADAPTER_NOT_FOUND."""
    name = request.name
    reporting = [
        slot for slot in slots if slot.report is not None and name in {loaded.name for loaded in slot.report.adapters}
    ]
    adapter_names = sorted(adapter.name for adapter in model.record.adapters)
    if not reporting and name not in adapter_names:
        raise Reason.ADAPTER_NOT_FOUND.error(
            f"{model.record.name} has no adapter {name!r}; it has: {', '.join(adapter_names) or 'none'}", field="name"
        )
    return reporting or list(slots)


def _refused(slot: Slot, error: RlctlError) -> StageResult:
    """Return the result of a target that drops the staged adapter and keeps its former adapter."""
    return StageResult(
        slot=slot.name,
        incarnation=slot.record.incarnation,
        outcome=OUTCOME_REJECTED,
        error=error.detail(),
        state=slot.state,
    )


def _rank_of(run: Run) -> int:
    ranks = [rank for result in run.operation.stage_results for rank in result.rank_results]
    return max((adapter.lora_rank for rank in ranks for adapter in rank.adapters.adapters), default=0)

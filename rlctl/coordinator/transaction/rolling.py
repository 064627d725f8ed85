"""Rolling in-place updates: batch by batch, with a pass of the sources (or a read from disk) for each batch.

A batch is paused, written, verified and admitted before the next batch gets a command. The first batch that serves the
version publishes the version. After a later failure the other stages are STALE, or DIRTY if written, and the operation
is PARTIAL.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from rlctl.contract.errors import Reason
from rlctl.coordinator.fleet.model_state import model_put
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.transaction.commit import Commit
from rlctl.coordinator.transaction.planner import Planner
from rlctl.coordinator.transaction.process_groups import GroupBook
from rlctl.coordinator.transaction.update import Update
from rlctl.coordinator.transaction.verification_levels import Expected, refuse_other_key
from rlctl.v1.update_pb2 import BeginWeightUpdateResponse, CommitBatchRequest, CommitWeightUpdateRequest


class Rolling:
    """Commits rolling in-place updates batch by batch."""

    def __init__(self, context: Context, groups: GroupBook, planner: Planner) -> None:
        self._roster = context.roster
        self._journal = context.journal
        self._groups = groups
        self._planner = planner

    async def see_through(self, update: Update, commit: Commit, written: Callable[[], Awaitable[None]]) -> None:
        """Commit all batches. Raises a failure before the publish.

        ``written`` returns once the present batch is written and decided.
        """
        try:
            await written()
            await commit.commit_batch(self._expected(update))
            while update.waiting:
                await self._next_batch(update)
                await written()
                await commit.commit_batch(self._expected(update))
        except Exception as error:
            if not update.published:
                raise
            await commit.break_off(error)
            await update.leave_groups(self._groups.unformed(update.record.plan))

    def decide(self, update: Update, request: CommitBatchRequest | CommitWeightUpdateRequest) -> None:
        """Decide for the version, with the digests that the sources state.

        Raises FIELD_REQUIRED if the verification level needs a digest, FIELD_INVALID for a digest with a different key,
        VERIFICATION_UNREACHABLE if a target reaches no level, DIGEST_MISMATCH if an earlier batch received different
        weights.
        """
        expected = Expected(
            request.expected_digest, request.sent_digest or request.expected_digest, request.fingerprints
        )
        refuse_other_key(expected, update.record.plan.digest_key)
        update.levels(expected)
        if update.rolls_in_place and update.published:
            digest = update.model.record.model_digest
            if digest and expected.digest and expected.digest != digest:
                raise Reason.DIGEST_MISMATCH.error(
                    f"the sources sent {expected.digest[:16]}, to the batches that serve the version {digest[:16]}",
                    field="expected_digest",
                    next_step="Leave the weights as they are until the update has ended.",
                )
        update.owner.decide(expected=expected)

    async def commit_batch(self, update: Update, request: CommitBatchRequest) -> BeginWeightUpdateResponse | Run:
        """Decide a batch for the version and wait for the commit of the batch.

        Returns the plan of the next batch, or the operation if the update has ended.
        """
        plan = update.record.plan
        async with update.planning:
            if request.batch > plan.batch.number:
                raise Reason.FIELD_INVALID.error(f"the update is at batch {plan.batch.number}", field="batch")
            batch_done = update.batch_done
            if request.batch == plan.batch.number:
                if plan.batch.last:
                    raise Reason.ILLEGAL_STATE.error(
                        f"batch {plan.batch.number} is the last batch, which ends with the update",
                        next_step="Call CommitWeightUpdate.",
                    )
                self.decide(update, request)
        if request.batch == plan.batch.number:
            await batch_done.wait()
        return update.run if update.ended else plan

    def refuse_more(self, update: Update) -> None:
        """Raise ILLEGAL_STATE if a further batch follows."""
        batch = update.record.plan.batch
        if update.rolls_in_place and not batch.last:
            raise Reason.ILLEGAL_STATE.error(
                f"batch {batch.number} is not the last batch: {len(update.waiting)} targets wait for theirs",
                next_step="Call CommitBatch.",
            )

    def _expected(self, update: Update) -> Expected:
        """Return the digests that the sources state, with the digest of the batches that serve the version."""
        return replace(update.owner.expected, served=update.model.record.model_digest if update.published else "")

    async def _next_batch(self, update: Update) -> None:
        async with update.planning:
            update.next_batch()
            plan, begin = update.record.plan, update.record.request
            async with self._roster.publishing:
                abandoned = self._planner.add_groups(plan, begin, update.targets)
                await self._journal.write([model_put(update.model.record), update.put()])
            await update.leave_groups(abandoned)
            update.open_batch()

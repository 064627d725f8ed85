"""An update that rolls in place: batch by batch, each in a pass of the sources (or reading from disk) of its own.

A batch is paused, written, verified and admitted before the next one hears of the update. From the first that serves
the version it is published: what fails later leaves the rest STALE, or DIRTY where it was written, and the operation
PARTIAL.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from rlctl.contract.errors import Reason
from rlctl.coordinator.fleet.roster import Roster, model_put
from rlctl.coordinator.operations.operations import Run
from rlctl.coordinator.transaction.commit import Finish
from rlctl.coordinator.transaction.planner import Planner
from rlctl.coordinator.transaction.process_groups import GroupBook
from rlctl.coordinator.transaction.transfer import OpenUpdate
from rlctl.coordinator.transaction.verification_levels import Expected, refuse_other_key
from rlctl.ports import Journal
from rlctl.v1.update_pb2 import BeginWeightUpdateResponse, CommitBatchRequest, CommitWeightUpdateRequest


class Rolling:
    """From batch to batch."""

    def __init__(self, book: GroupBook, planner: Planner, roster: Roster, journal: Journal) -> None:
        self._book = book
        self._planner = planner
        self._roster = roster
        self._journal = journal

    async def see_through(self, opened: OpenUpdate, finish: Finish, written: Callable[[], Awaitable[None]]) -> None:
        """Batch by batch to the end. ``written`` returns when the present one is, and is to be committed. Raises what
        failed before the version was published.
        """
        session, run = opened.session, opened.run
        try:
            await written()
            await finish.commit_batch(run, self._known(opened))
            while session.waiting:
                await self._turn(opened)
                await written()
                await finish.commit_batch(run, self._known(opened))
        except Exception as error:
            if not session.published:
                raise
            await finish.break_off(run, error)
            await session.leave_groups(self._book.unformed(session.record.plan))

    def decide(self, opened: OpenUpdate, request: CommitBatchRequest | CommitWeightUpdateRequest) -> None:
        """Decide for the version, given what the sources say of it. Raises FIELD_REQUIRED when the level to verify at
        needs a digest, DIGEST_MISMATCH when another batch was sent other weights.
        """
        expected = Expected(
            request.expected_digest, request.sent_digest or request.expected_digest, request.fingerprints
        )
        refuse_other_key(expected, opened.session.record.plan.digest_key)
        opened.session.levels(expected)
        if opened.session.rolls_in_place and opened.session.published:
            known = opened.session.model.record.model_digest
            if known and expected.digest and expected.digest != known:
                raise Reason.DIGEST_MISMATCH.error(
                    f"the sources sent {expected.digest[:16]}, to the batches that serve the version {known[:16]}",
                    field="expected_digest",
                    next_step="Leave the weights as they are until the update has ended.",
                )
        opened.decide(expected=expected)

    async def commit_batch(self, opened: OpenUpdate, request: CommitBatchRequest) -> BeginWeightUpdateResponse | Run:
        """Decide a batch for the version, and wait for the plan of the next one, or the update, which ends without."""
        plan = opened.session.record.plan
        async with opened.planning:
            if request.batch > plan.batch.number:
                raise Reason.FIELD_INVALID.error(f"the update is at batch {plan.batch.number}", field="batch")
            turned = opened.turned
            if request.batch == plan.batch.number:
                if plan.batch.last:
                    raise Reason.ILLEGAL_STATE.error(
                        f"batch {plan.batch.number} is the last one: it ends with the update",
                        next_step="CommitWeightUpdate it.",
                    )
                self.decide(opened, request)
        if request.batch == plan.batch.number:
            await turned.wait()
        return opened.run if opened.ended else plan

    def refuse_more(self, opened: OpenUpdate) -> None:
        """Raise ILLEGAL_STATE when another batch follows the present one."""
        batch = opened.session.record.plan.batch
        if opened.session.rolls_in_place and not batch.last:
            raise Reason.ILLEGAL_STATE.error(
                f"batch {batch.number} is not the last one: {len(opened.session.waiting)} targets wait for theirs",
                next_step="CommitBatch it.",
            )

    def _known(self, opened: OpenUpdate) -> Expected:
        """What the sources say of the weights, and what the batches hold that serve the version."""
        session = opened.session
        return replace(opened.expected, held=session.model.record.model_digest if session.published else "")

    async def _turn(self, opened: OpenUpdate) -> None:
        session = opened.session
        async with opened.planning:
            session.turn()
            plan, begin = session.record.plan, session.record.request
            async with self._roster.publishing:
                abandoned = self._planner.add_groups(plan, begin, session.targets)
                await self._journal.write([model_put(session.model.record), session.put(session.record.phase)])
            await session.leave_groups(abandoned)
            opened.turn()

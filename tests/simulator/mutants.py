"""Safeguards that can be switched off, one at a time: a simulation that cannot fail proves nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from rlctl.command_stream.commander import Commander
from rlctl.command_stream.executor import Executor
from rlctl.contract import memory_regions
from rlctl.contract.verbs import Verb
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.fleet.stage_links import Peers
from rlctl.coordinator.healing.orphans import Orphans
from rlctl.coordinator.operations.fanout import Fanout
from rlctl.coordinator.operations.operations import Operations
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.service import Coordinator
from rlctl.coordinator.transaction import verification_levels
from rlctl.coordinator.transaction.commit import Commit
from rlctl.coordinator.updates.manager import Updates
from rlctl.coordinator.updates.written_tensors import WrittenTensors
from rlctl.runtime import shielding
from rlctl.stage.facts import Facts
from rlctl.stage.serving_state import Serving
from rlctl.stage.state_machine import Stage
from rlctl.trainer import lead, member
from rlctl.trainer.pending_update import UpdateState
from rlctl.v1.common_pb2 import OUTCOME_REJECTED
from rlctl.worker.follower import Follower
from tests.simulator.ports.journal import SimJournal

Patch = tuple[Any, str, Any]
"""Class or module, attribute, replacement."""


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _no_epoch(self: Facts, verb: Verb, request: Any) -> None:
    request.header.fence.fleet_epoch = self.fleet_epoch
    _refuse(self, verb, request)


_refuse = Facts.refuse


def _from_receipt(self: Stage, grant: Any) -> None:
    if grant.echo:
        grant.echo = int(self._clock.uptime() * 1e6)
    _grant(self, grant)


_grant = Stage.grant


def _obeys_anybody(self: Any, link: Any) -> bool:
    del self, link
    return True


def _any_grant(self: Stage, grant: Any) -> None:
    self._grant_number = 0
    _grant(self, grant)


async def _attach_beside(self: Stage, attach: Any, link: Any) -> Any:
    """Attach while the former link goes on."""
    former, self._link = self._link, None
    attached = await _attach(self, attach, link)
    self._link = self._link or former
    return attached


_attach = Stage.attach


async def _everybody(self: Coordinator, registration: Any) -> None:
    """Accept every registration for a slot."""
    del self, registration


async def _not_silenced(self: Peers, model: Any, only: Any) -> None:
    del self
    model.only = frozenset(only)


def _every_time(self: Executor, command_id: str, *what: Any, **more: Any) -> Any:
    self._records.pop(command_id, None)
    return _start(self, command_id, *what, **more)


_start = Executor._start


def _never_known(self: Operations, request_id: str, request: Any) -> None:
    del self, request_id, request


async def _no_lease(self: Updates, update: Any) -> None:
    """Ignore the lease and the deadline, which may be after the end of a run."""
    del self
    await update.owner.decided.wait()
    if update.owner.verdict is not None:
        raise update.owner.verdict


def _unvetted(self: Fanout, slot: Any, verb: Any, result: Any, *_: Any, **__: Any) -> Any:
    del self, slot, verb
    return result


async def _no_quarantine(self: Roster, causes: Any) -> None:
    del self, causes


def _always_right(results: Any, levels: Any, expected_digest: str) -> dict[str, Any]:
    del results, levels, expected_digest
    return {}


def _always_computed(results: Any, probe: Any) -> dict[str, Any]:
    del results, probe
    return {}


def _decode_always_right(results: Any, *, required: bool) -> tuple[dict[str, Any], frozenset[str]]:
    del required
    return {}, frozenset(result.slot for result in results)


async def _published_first(self: Commit, expected: Any) -> None:
    """Publish the version as soon as it was written."""
    await self._publish(list(self._update.targets), expected.digest)
    await _commit(self, expected)


_commit = Commit.commit


async def _ended_with_its_caller(self: Run, **how: Any) -> Any:
    """End an operation when its caller disconnects."""
    try:
        return await _answer(self, **how)
    except asyncio.CancelledError:
        if self.task is not None:
            self.task.cancel()
        raise


_answer = Run.answer


def _by_order(self: Commander, message: Any) -> None:
    """Match a late answer to the next command, as on a connection without names for answers."""
    if message.HasField("result"):
        late = self._pending.get(message.result.command_id)
        if late is None or late.deadline < self._clock.now():
            self._pending.pop(message.result.command_id, None)
            message.result.command_id = next(iter(self._pending), "")
    _take(self, message)


_take = Commander._take


def _all_kept(results: Any) -> frozenset[Any]:
    """Restore weights with the resume, whether the engine has kept them or not."""
    return memory_regions.released(results)


MUTANTS: dict[str, list[Patch]] = {
    "adapter_gate": [(Serving, "refuse_paused", _nothing)],
    "adapter_scope": [],
    "adapter_seal": [],
    "admission": [(Facts, "at_admitted_version", property(lambda self: self.version.sequence > 0))],
    "at_most_once": [(Executor, "_start", _every_time)],
    "bucket_order": [],
    "completeness": [],
    "dirty_refusal": [(Facts, "_mixed", _nothing)],
    "fencing": [
        (Facts, "refuse", _no_epoch),
        (Stage, "_refuse_attach", _nothing),
        (SimJournal, "owned", lambda self: self is not None),
    ],
    "decode_check": [(verification_levels, "judge_decode", _decode_always_right)],
    "follower_link": [(Follower, "obeys", _obeys_anybody)],
    "journal_fencing": [(SimJournal, "owned", lambda self: self is not None)],
    "grant_order": [
        (Stage, "grant", _any_grant),
        (Stage, "obeys", _obeys_anybody),
        (Stage, "attach", _attach_beside),
    ],
    "idempotency": [(Operations, "known", _never_known)],
    "kept_weights": [(memory_regions, "kept", _all_kept)],
    "late_results": [(Commander, "_take", _by_order)],
    "lease_echo": [(Stage, "grant", _from_receipt)],
    "lease_expiry": [(Updates, "_decision", _no_lease)],
    "kept_adapter_pauses": [(Slot, "owed_adapters", ())],
    "kept_pauses": [(Slot, "owes_pause", False)],
    "ongoing_gate": [(Serving, "refuse_ongoing", _nothing)],
    "partial_end": [(WrittenTensors, "incomplete", _nothing)],
    "probe": [(verification_levels, "judge_probe", _always_computed)],
    "presumed_abort": [(Orphans, "_orphan", _nothing)],
    "publish_last": [(Commit, "commit", _published_first)],
    "quarantine": [(Roster, "quarantine", _no_quarantine)],
    "second_stage": [(Coordinator, "_refuse_second", _everybody)],
    "serving_lease": [(Serving, "_refuse_without_lease", _nothing)],
    "shielding": [(shielding, "shielded", lambda task: task), (Run, "answer", _ended_with_its_caller)],
    "silence": [(Peers, "silence", _not_silenced)],
    "verification": [(verification_levels, "judge_digests", _always_right)],
    "uncertain_end": [(UpdateState, "outcome", OUTCOME_REJECTED)],
    "unpublished": [(lead, "refuse_unpublished", _nothing), (member, "refuse_unpublished", _nothing)],
    "vetting": [(Fanout, "_vetted", _unvetted)],
}
"""A mutant without a patch is a rule of the engine; the engine checks the mutant's name."""


@contextlib.contextmanager
def without(names: Iterable[str]) -> Iterator[None]:
    undo = []
    try:
        for name in names:
            for owner, attribute, replacement in MUTANTS[name]:
                undo.append((owner, attribute, vars(owner)[attribute]))
                setattr(owner, attribute, replacement)
        yield
    finally:
        for owner, attribute, original in reversed(undo):
            setattr(owner, attribute, original)

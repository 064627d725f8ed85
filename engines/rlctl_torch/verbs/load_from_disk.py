"""Weights from disk, read by every rank straight into place; inspection of checkpoints, and pulls.

All ranks together refuse a checkpoint before the first byte: its path, every header, names, shapes, the architecture. A
later failure (a disk error, a file that changes, a wrong digest) is undone by reading the former checkpoint of the
weights again. Its files are still open. So the rollback takes no memory, and a pull that has replaced the files does
not matter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from rlctl.contract.digests import key_of
from rlctl.contract.durations import add_seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED
from rlctl.v1.verbs_pb2 import (
    CheckpointReport,
    InspectCheckpointRequest,
    PullReport,
    PullWeightsRequest,
    UpdateWeightsFromDiskRequest,
    WeightsReport,
)
from rlctl.weights.checkpoint.atomic_write import Patience
from rlctl.weights.checkpoint.checkpoint import StoredWeights
from rlctl.weights.checkpoint.load_formats import DIRECT, STANDARD, check_format, open_stored
from rlctl.weights.shards.load_hooks import refuse_draft
from rlctl.weights.shards.shard_map import Shard, ShardMap, model_digest
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl.weights.versions.manifest import read_manifest
from rlctl.weights.versions.pull import pull_within
from rlctl_torch.rank import OpenUpdate, Origin, Rank, Weights
from rlctl_torch.steps.background import Later
from rlctl_torch.steps.ordered_commands import with_outcome
from rlctl_torch.verbs.update import InUpdate


@dataclass
class _Load:
    """An opened checkpoint that fits the model.

    Attributes:
        path: directory of the checkpoint, links followed.
        direct: the tensors have the engine's own names and this rank's shapes.
        names: checkpoint names of the tensors to read.
    """

    path: str
    stored: StoredWeights
    direct: bool
    names: Set[str]

    def read(self, shards: ShardMap, load_format: str) -> None:
        """Read into place. Raises with outcome DIRTY once something may have been written."""
        try:
            _destination(shards, direct=self.direct).load(self.stored, only=self.names)
        except RlctlError:
            raise
        except Exception as error:  # a custom loader may raise anything
            raise Reason.CHECKPOINT_NOT_FOUND.error(
                f"loader {load_format!r} failed: {type(error).__name__}: {error}",
                field="load_format",
                outcome=OUTCOME_DIRTY,
            ) from error


def _open_load(rank: Rank, path: str, load_format: str, target_modules: Sequence[str]) -> _Load:
    """Open a checkpoint and make every check that needs no tensors.

    Raises PATH_NOT_ALLOWED, UNSUPPORTED, FIELD_INVALID, CHECKPOINT_NOT_FOUND, CHECKPOINT_MISMATCH.
    """
    resolved = rank.roots.resolve_checkpoint(path, field="model_path")
    selected = _tensors_of(target_modules, rank.writable) if target_modules else None
    stored = open_stored(resolved, load_format, rank=rank.ranks.rank, size=rank.ranks.size)
    direct = load_format == DIRECT
    try:
        rank.model.check_identity(stored)
        names = _destination(rank.writable, direct=direct).select(stored, only=selected)
        return _Load(resolved, stored, direct, names)
    except RlctlError:
        stored.close()
        raise


def _destination(shards: ShardMap, *, direct: bool) -> ShardMap:
    """Return the shard map to load into. With ``direct`` each part is a full tensor under its checkpoint name."""
    if not direct:
        return shards
    memory = {name: shards.part_in_place(name) for name in shards.shards}
    return ShardMap({name: Shard(TensorMeta.of(name, part), part) for name, part in memory.items()})


def _tensors_of(modules: Sequence[str], shards: ShardMap) -> set[str]:
    """Return the tensors of the modules and of their submodules. Raises FIELD_INVALID for a module without tensors."""
    chosen: set[str] = set()
    for index, module in enumerate(modules):
        module_names = {name for name in shards.shards if name == module or name.startswith(f"{module}.")}
        if not module_names:
            raise Reason.FIELD_INVALID.error(
                f"the model has no module {module!r} with tensors", field=f"target_modules[{index}]"
            )
        chosen |= module_names
    return chosen


class FromDisk(InUpdate):
    """UpdateWeightsFromDisk: every rank reads its slices."""

    def __init__(self, rank: Rank, request: UpdateWeightsFromDiskRequest, update_id: str) -> None:
        super().__init__(rank, update_id)
        check_format(request.load_format)
        refuse_draft(request.options.selector, "options.selector")
        self._request = request

    def run(self) -> WeightsReport | Later:
        """Check the checkpoint on all ranks, then read its tensors. A failure from then on is rolled back, except in a
        shadow copy.
        """
        return self._fill(self._load)

    def _load(self, update: OpenUpdate) -> WeightsReport:
        rank, request = self._rank, self._request
        opened: list[_Load] = []

        def check() -> None:
            if update.stages_adapter is not None:
                raise Reason.FIELD_CONFLICT.error("the open update is of an adapter, not of the base weights")
            opened.append(_open_load(rank, request.model_path, request.load_format, request.target_modules))
            self._check_kind(opened[0].names)

        try:
            update.council.agree(check)
            update.council.agree(update.loading.prepare)
        except RlctlError:
            for load in opened:
                load.stored.close()
            raise
        load = opened[0]
        started = time.perf_counter()
        intact = rank.weights is Weights.WHOLE and not update.touched
        update.touched = True
        origin = Origin(load.stored, load.direct)
        update.receiver.writing(load.names)
        try:
            update.council.agree(lambda: load.read(update.shards, request.load_format))
            rank.synchronise()
            origin.digest = self._compare(update)
        except RlctlError as error:
            load.stored.close()
            if update.shadow is None:
                self._roll_back(error, rank.origin if intact else None)
                update.receiver.undone()
                update.touched = False
            raise with_outcome(error, OUTCOME_REJECTED) from error
        update.receiver.wrote(load.names)
        report = update.report
        report.tensors += len(load.names)
        report.bytes_received += _bytes_of(rank, load.names)
        add_seconds(report.load, time.perf_counter() - started)
        if len(load.names) == len(rank.writable.shards):
            update.origin = origin
            update.checkpoint = request.model_path
        else:
            load.stored.close()
        return report

    def _check_kind(self, names: Collection[str]) -> None:
        missing = len(self._rank.writable.shards) - len(names)
        if missing and self._open().loading.load.full:
            raise Reason.FIELD_CONFLICT.error(
                f"target_modules leaves {missing} tensors as they are, but the update is full",
                field="target_modules",
                next_step="Declare the update as partial.",
            )

    def _compare(self, update: OpenUpdate) -> str:
        """Return the model digest, or "" without an expected digest. Raises DIGEST_MISMATCH."""
        expected = self._request.expected_digest
        if not expected:
            return ""
        shards = self._rank.model.shards if update.shadow is None else update.shadow.shards
        with update.council.exchanging() as exchange:
            digest = model_digest(shards, exchange).digest
        if digest != expected:
            raise Reason.DIGEST_MISMATCH.error(
                f"the model digest is {digest} after loading {self._request.model_path}, {expected} was expected",
                field="expected_digest",
                metadata={"expected": expected, "found": digest},
                outcome=OUTCOME_DIRTY,
            )
        return digest

    def _roll_back(self, error: RlctlError, origin: Origin | None) -> None:
        """Read the former checkpoint again, on all ranks. Raises the error with outcome DIRTY if this fails."""
        rank = self._rank

        def read_again() -> None:
            if origin is None:
                raise Reason.CHECKPOINT_NOT_FOUND.error("the weights before did not come from a checkpoint as a whole")
            shards = _destination(rank.model.shards, direct=origin.direct)
            origin.stored.read_into(
                [(name, shard.slice, shards.part_in_place(name)) for name, shard in shards.shards.items()]
            )

        try:
            rank.ranks.agree(read_again)
            rank.synchronise()
            assert origin is not None
            if origin.digest and rank.model_digest(key_of(origin.digest)) != origin.digest:
                raise Reason.DIGEST_MISMATCH.error("the digest of the restored weights differs from the earlier digest")
        except RlctlError as failure:
            error.message = f"{error.message}; the earlier weights could not be brought back: {failure.message}"
            raise with_outcome(error, OUTCOME_DIRTY) from error
        error.message = f"{error.message}; the weights are again what they were before"


class Disk:
    """File operations of a rank during generation, which do not touch the weights."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._stop = threading.Event()

    def inspect(self, request: InspectCheckpointRequest) -> CheckpointReport:
        """Check a checkpoint as a load does, without the load. Raises the errors of a load before its first byte."""
        rank = self._rank
        check_format(request.load_format)
        load = _open_load(rank, request.model_path, request.load_format, request.target_modules)
        load.stored.close()
        manifest = read_manifest(Path(load.path), blame="model_path") if request.load_format in STANDARD else None
        return CheckpointReport(
            tensors=len(load.names),
            bytes=_bytes_of(rank, load.names),
            left=len(rank.writable.shards) - len(load.names),
            version=manifest.version if manifest else "",
            model_digest=manifest.digest if manifest else "",
        )

    def pull(self, request: PullWeightsRequest, deadline: float) -> PullReport:
        """Bring a local directory to a published version; ``deadline`` on :func:`time.monotonic`'s clock.

        Raises as :func:`rlctl.weights.versions.pull.pull_within`.
        """
        return pull_within(self._rank.roots, request, self._rank.config.model_path, Patience(deadline, self._stop))

    def stop(self) -> None:
        """End running pulls. Their directories are unchanged."""
        self._stop.set()


def _bytes_of(rank: Rank, names: Collection[str]) -> int:
    return sum(rank.writable.shards[name].local.nbytes for name in names)

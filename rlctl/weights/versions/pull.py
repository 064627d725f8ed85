"""Bringing a local copy of a checkpoint to a published version: complete versions are copied, deltas are replayed.

Nothing is changed in place. Every tensor of the target is computed from the seed and all later deltas, written into a
new directory, and checked. The seed is the local copy, a complete version, or the checkpoint with which the engine was
started. Then the new directory replaces the old directory atomically. A directory contains its version, so both change
together. A delta is thus applied exactly once, even with a crash at any moment. The price is space for a second copy on
the local disk.

Versions have rlctl's layout (:mod:`rlctl.weights.versions.publish`) or slime's
(:mod:`rlctl.weights.versions.slime_layout`). Only the plan differs: slime's versions have no digests, so the digests of
the copy are computed during the write.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.os_errors import exhausted
from rlctl.v1.verbs_pb2 import PullReport, PullWeightsRequest
from rlctl.weights.checkpoint import atomic_write
from rlctl.weights.checkpoint.allowed_roots import Roots
from rlctl.weights.checkpoint.atomic_write import Patience
from rlctl.weights.checkpoint.checkpoint import INDEX, SINGLE, compare, open_files
from rlctl.weights.checkpoint.safe_open import read_regular
from rlctl.weights.checkpoint.safetensors_file import TensorFile
from rlctl.weights.tensor.digest import digest_of_bytes
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl.weights.versions import slime_layout
from rlctl.weights.versions.compression import decompressed
from rlctl.weights.versions.manifest import MANIFEST, Entry, Manifest, is_named, read_manifest
from rlctl.weights.versions.publish import Published, files_beside, look_up, published, write_files
from rlctl.weights.versions.slime_layout import Slime, SlimeDelta

SOURCE = "source_dir"
LOCAL = "local_checkpoint_dir"
AGAIN = "Publish a full version, and pull again."


@dataclass(frozen=True)
class Pulled:
    """Result of a pull.

    Attributes:
        manifest: manifest of the version in the local directory.
        changed: this call wrote the version; False: the version was there, or another process wrote it meanwhile.
        deltas: number of replayed deltas.
        bytes_read: bytes of weights and deltas that were read.
    """

    manifest: Manifest
    changed: bool
    deltas: int = 0
    bytes_read: int = 0


def pull_within(roots: Roots, request: PullWeightsRequest, base_dir: str, patience: Patience) -> PullReport:
    """Run :func:`pull` as an engine's verb, between directories below ``roots``. Raises PATH_NOT_ALLOWED too."""
    pulled = pull(
        roots.resolve(request.source_dir, field=SOURCE),
        roots.resolve_checkpoint(request.local_checkpoint_dir, field=LOCAL),
        request.target_version,
        base_dir=os.path.realpath(base_dir),
        patience=patience,
        roots=roots,
    )
    return PullReport(
        version=pulled.manifest.version,
        sequence=pulled.manifest.sequence,
        model_digest=pulled.manifest.digest,
        changed=pulled.changed,
        deltas=pulled.deltas,
        bytes_read=pulled.bytes_read,
    )


def pull(
    source_dir: str,
    local_checkpoint_dir: str,
    target_version: str,
    *,
    base_dir: str = "",
    patience: Patience | None = None,
    threads: int = 0,
    roots: Roots | None = None,
) -> Pulled:
    """Bring ``local_checkpoint_dir`` to a version published in ``source_dir``; afterwards it can be loaded.

    ``base_dir`` is the checkpoint at which a chain of deltas may begin if no complete version is published. It is
    version "0", as for slime's trainers, if nothing is published in rlctl's layout. ``threads`` 0: one for each core,
    up to 8. No version may be, or hold, a link out of ``roots``. Processes that pull into the same directory take
    turns; later processes find the result. Memory: two or three times the largest tensor, for each thread.

    After an error the local directory is unchanged. Raises CHECKPOINT_NOT_FOUND (no such version; a missing version
    that a delta needs; a file that is truncated, damaged or changed), CHECKPOINT_MISMATCH (a delta's base is not the
    version that is there, or has other tensors), UNSUPPORTED (an unknown form of slime's layout, or a missing package
    for it), DIGEST_MISMATCH (a tensor differs from its checksum, before or after), DISK_FULL, FIELD_INVALID (the
    directory cannot be written; it holds files that were not pulled, the versions themselves, or the engine's
    checkpoint), PATH_NOT_ALLOWED (by ``roots``), DEADLINE_EXCEEDED and CANCELLED (by ``patience``).
    """
    patience = patience or Patience()
    place = Path(os.path.realpath(local_checkpoint_dir))
    with atomic_write.writing(place, LOCAL):
        place.parent.mkdir(parents=True, exist_ok=True)
        # Only a pull locks, and only a pull creates this directory.
        ours = atomic_write.was_locked(place) or not place.exists()
        _local_version(place, ours=ours)  # no lock for a refused directory: with a lock it would count as a copy
    with atomic_write.locked(place, patience, LOCAL):
        with atomic_write.writing(place, LOCAL):
            atomic_write.recover(place)
            here = _local_version(place, ours=ours)
        plan = _plan(Path(source_dir), target_version, here, base_dir, roots)
        if here is not None and not plan.deltas and plan.seed.manifest is here.manifest:
            return Pulled(here.manifest, changed=False)
        if Path(os.path.realpath(source_dir)).is_relative_to(place):
            raise Reason.FIELD_INVALID.error(f"{source_dir} lies within {place}, which a pull replaces", field=SOURCE)
        if not plan.can_replace(place):
            raise Reason.FIELD_INVALID.error(
                f"{plan.seed.path}, which the engine was started with, lies within {place}, which a pull replaces",
                field=LOCAL,
                next_step="Name another directory, or start the engine with another checkpoint.",
            )
        with contextlib.ExitStack() as stack:
            files = _open(plan.seed.path, stack)
            changes = [make(stack) for make in plan.deltas]
            work = _Replay(plan, files, changes, patience)
            with atomic_write.writing(place, LOCAL), atomic_write.building(place) as new:
                manifest = work.write(new, threads or min(8, os.cpu_count() or 1))
                plan.check_unchanged()
                atomic_write.write_file(new / MANIFEST, manifest.to_json())
                atomic_write.put_in_place(new, place)
            return Pulled(manifest, changed=True, deltas=len(changes), bytes_read=work.bytes_read)


class _Change(Protocol):
    """An opened delta."""

    path: Path

    def check(self, metas: Mapping[str, TensorMeta], seed: Path) -> None:
        """Raise CHECKPOINT_MISMATCH if the delta does not fit these tensors in ``seed``."""

    def apply(self, name: str, data: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return a tensor's bytes after this delta and the number of bytes read; ``data`` may be changed."""


@dataclass(frozen=True)
class _Seed:
    """Start of the replay; ``manifest`` has the expected contents. None: a checkpoint without a manifest."""

    path: Path
    manifest: Manifest | None
    field: str = "base_dir"


@dataclass(frozen=True)
class _Plan:
    """The plan for a copy of a version.

    Attributes:
        tensors: the expected result; None: not known as a whole, and the copy's digests are computed.
        seed: start of the replay.
        deltas: functions that open the deltas, in the order of the replay.
        read: the versions in slime's layout that are read.
        origin: as in the manifest of the copy.
    """

    version: str
    sequence: int
    tensors: Mapping[str, Entry] | None
    seed: _Seed
    deltas: Sequence[Callable[[contextlib.ExitStack], _Change]]
    read: Sequence[Slime] = ()
    origin: tuple[str, ...] = ()

    def can_replace(self, place: Path) -> bool:
        """Return False if the copy would replace slime's version 0, or if an earlier pull has replaced it."""
        return not any(
            version.number == 0 and Path(os.path.realpath(version.path)).is_relative_to(place) for version in self.read
        )

    def check_unchanged(self) -> None:
        """Raise CHECKPOINT_NOT_FOUND if a version was changed during the read."""
        for version in self.read:
            version.check_unchanged()


def _local_version(place: Path, *, ours: bool) -> Published | None:
    """Return the version in the local directory; None for a missing, empty or damaged directory.

    Damage comes from a crash of the system. ``ours``: a pull has made the directory. Then a damaged manifest counts as
    damage, and an older copy without the mark ``pulled`` is accepted, unless its name is that of a published version.
    Raises FIELD_INVALID for a directory that is no copy; OSError.
    """
    if not place.exists() or not any(place.iterdir()):
        return None
    try:
        manifest = read_manifest(place, blame=LOCAL)
    except RlctlError as error:
        if ours:
            return None  # the directory was pulled once: another pull repairs it
        raise _not_pulled(f"{place} holds files of unknown origin") from error
    if manifest is None:
        raise _not_pulled(f"{place} holds files that were not pulled")
    if not manifest.pulled and (is_named(place, manifest) or not ours):
        raise _not_pulled(f"{place} is a published version, no copy of one")
    sizes = {name: file.size for name, file in manifest.files.items()} | dict(manifest.shards)
    complete = all((place / name).is_file() and (place / name).stat().st_size == size for name, size in sizes.items())
    return Published(place, manifest) if complete else None


def _not_pulled(cause: str) -> RlctlError:
    next_step = "Name an empty directory, or a new one."
    return Reason.FIELD_INVALID.error(cause, field=LOCAL, next_step=next_step)


def _is_at(here: Manifest, target: Manifest) -> bool:
    return (here.version, here.sequence, here.digest) == (target.version, target.sequence, target.digest)


def _plan(source: Path, version: str, here: Published | None, base_dir: str, roots: Roots | None) -> _Plan:
    """Plan a copy of a version in either layout; rlctl's layout takes precedence."""
    published_target = look_up(source, version, roots=roots)
    number = slime_layout.number_of(version)
    if published_target is None and number is not None:
        target = slime_layout.find(source, number, roots) if number else None
        if number == 0 and base_dir and look_up(source) is None:
            target = slime_layout.version_0(base_dir)
        if target is not None:
            return _plan_slime(source, target, here, base_dir, roots)
    return _plan_ours(source, published_target or published(source, version, roots), here, base_dir, roots)


def _plan_slime(source: Path, target: Slime, here: Published | None, base_dir: str, roots: Roots | None) -> _Plan:
    deltas: list[Slime] = []
    at = target
    while not (copied := here is not None and _is_copy(here.manifest, at, base_dir)) and at.delta is not None:
        deltas.append(at)
        at = _base_of(source, at, base_dir, roots)
    if here is not None and copied:
        seed, start, read = _Seed(here.path, here.manifest), here.manifest.origin[1:], deltas
    else:
        seed, start, read = _Seed(at.path, None, SOURCE if at.number else "base_dir"), (), [*deltas, at]
        if at.number == 0:
            start = (at.identity,)
    opens = [partial(SlimeDelta, delta) for delta in reversed(deltas)]
    return _Plan(str(target.number), target.number, None, seed, opens, read, (target.identity, *start))


def _is_copy(here: Manifest, version: Slime, base_dir: str) -> bool:
    """Return whether the local copy is of this very version and began at the engine's present checkpoint."""
    if here.origin[:1] != (version.identity,) or here.sequence != version.number:
        return False
    start = here.origin[1:]
    return not start or (bool(base_dir) and start == (slime_layout.version_0(base_dir).identity,))


def _base_of(source: Path, delta: Slime, base_dir: str, roots: Roots | None) -> Slime:
    assert delta.delta is not None
    number = delta.delta.base
    if number == 0 and base_dir:
        return slime_layout.version_0(base_dir)
    base = slime_layout.find(source, number, roots) if number else None
    if base is not None:
        return base
    if number:
        cause = f"version {number}, which is not published: {slime_layout.directory_of(source, number)} is not there"
        next_step = "Keep the versions back to the newest complete version, or publish a complete version."
    else:
        cause = "version 0, the checkpoint that the engine was started with; it has none"
        next_step = "Start the engine with a checkpoint, or publish a complete version."
    raise Reason.CHECKPOINT_NOT_FOUND.error(
        f"{delta.path} is a difference to {cause}", field=SOURCE, next_step=next_step
    )


def _plan_ours(source: Path, target: Published, here: Published | None, base_dir: str, roots: Roots | None) -> _Plan:
    seed, deltas = _chain(source, target, here, base_dir, roots)
    manifest = target.manifest
    opens = [partial(_Delta, delta) for delta in deltas]
    return _Plan(manifest.version, manifest.sequence, manifest.tensors, seed, opens)


def _chain(
    source: Path, target: Published, here: Published | None, base_dir: str, roots: Roots | None
) -> tuple[_Seed, list[Published]]:
    """Return the start of the replay, and the deltas in order."""
    deltas: list[Published] = []
    at = target
    while True:
        if here is not None and _is_at(here.manifest, at.manifest):
            return _Seed(here.path, here.manifest), deltas[::-1]
        base = at.manifest.base
        if base is None:
            return _Seed(at.path, at.manifest), deltas[::-1]
        deltas.append(at)
        # The delta's writer may have used another label for the base; two versions may have the same sequence.
        published_base = look_up(source, base.version, base.sequence, roots) or look_up(
            source, "", base.sequence, roots
        )
        if published_base is not None:
            if not published_base.manifest.is_base_of(at.manifest):
                raise Reason.CHECKPOINT_MISMATCH.error(
                    f"{at.path} is a difference to {base.version!r} with digest {base.digest[:16]}; "
                    f"{published_base.path} has {published_base.manifest.digest[:16]}",
                    field=SOURCE,
                    next_step=AGAIN,
                )
            at = published_base
        elif here is not None and here.manifest.is_base_of(at.manifest):
            return _Seed(here.path, here.manifest), deltas[::-1]
        elif base_dir:
            return _Seed(Path(base_dir), _before(at.manifest)), deltas[::-1]
        else:
            raise Reason.CHECKPOINT_NOT_FOUND.error(
                f"{at.path} is a difference to version {base.version!r} (sequence {base.sequence}), which is not "
                f"published in {source}",
                field=SOURCE,
            )


def _before(delta: Manifest) -> Manifest:
    """Return the base's manifest as recorded in a delta."""
    assert delta.base is not None
    entries = {name: Entry(entry.meta, entry.base_sha256) for name, entry in delta.tensors.items()}
    return Manifest(delta.base.version, delta.base.sequence, entries)


def _open(path: Path, stack: contextlib.ExitStack) -> list[TensorFile]:
    files = open_files(str(path), field=SOURCE)
    for file in files:
        stack.callback(file.close)
    return files


class _Delta:
    """An opened delta, checked against its manifest."""

    def __init__(self, published: Published, stack: contextlib.ExitStack) -> None:
        self.path, self.manifest = published.path, published.manifest
        self._stored: dict[str, TensorFile] = {}
        for name, size in published.manifest.shards.items():
            file = TensorFile(published.path / name, field=SOURCE)
            stack.callback(file.close)
            if file.size != size:
                raise Reason.CHECKPOINT_NOT_FOUND.error(
                    f"{file.path}: it has {file.size} bytes, its manifest says {size}", field=SOURCE
                )
            self._stored |= dict.fromkeys(file.metas, file)
        stored = {name for name, entry in published.manifest.tensors.items() if entry.encoding != "same"}
        if self._stored.keys() != stored:
            raise Reason.CHECKPOINT_NOT_FOUND.error(
                f"{published.path}: its files hold other tensors than its index", field=SOURCE
            )

    def check(self, metas: Mapping[str, TensorMeta], seed: Path) -> None:
        _compare(metas, self.manifest, seed)

    def apply(self, name: str, data: torch.Tensor) -> tuple[torch.Tensor, int]:
        entry = self.manifest.tensors[name]
        if entry.encoding == "same":
            return data, 0
        payload = self._payload(name, entry)
        if entry.encoding == "xor":
            return data.bitwise_xor_(payload), payload.numel()
        return payload, payload.numel()

    def _payload(self, name: str, entry: Entry) -> torch.Tensor:
        file = self._stored[name]
        stored = torch.empty(file.metas[name].nbytes, dtype=torch.uint8)
        file.read_bytes(file.offsets[name], stored)
        if entry.compression:
            try:
                stored = decompressed(stored, entry.meta.nbytes)
            except ValueError as error:
                raise self._damaged(name, str(error)) from error
        if stored.numel() != entry.meta.nbytes:
            raise self._damaged(name, f"{stored.numel()} bytes instead of {entry.meta.nbytes}")
        return stored

    def _damaged(self, name: str, cause: str) -> RlctlError:
        return Reason.CHECKPOINT_NOT_FOUND.error(
            f"{self.path}: its data of {name} is damaged: {cause}", field=SOURCE, next_step=AGAIN
        )


class _Replay:
    """Computes the target from the seed and the deltas, file by file of the seed."""

    def __init__(self, plan: _Plan, files: Sequence[TensorFile], deltas: Sequence[_Change], patience: Patience) -> None:
        self._plan = plan
        self._seed = plan.seed
        self._files = files
        self._deltas = deltas
        self._patience = patience
        self.bytes_read = 0
        self._digests: dict[str, str] = {}
        metas = {name: meta for file in files for name, meta in file.metas.items()}
        if plan.seed.manifest is not None:
            _compare(metas, plan.seed.manifest, plan.seed.path)
        for delta in deltas:
            delta.check(metas, plan.seed.path)

    def write(self, new: Path, threads: int) -> Manifest:
        """Write all files of the target but the manifest; return the manifest. Raises OSError."""
        files = self._files_beside()
        with contextlib.ExitStack() as stack:
            # All space is reserved first: a full disk is reported before any read.
            outputs = [_Output(file, new, stack) for file in self._files]
            with ThreadPoolExecutor(threads, "rlctl-pull") as pool:
                jobs = [pool.submit(self._tensor, out, meta) for out in outputs for meta in out.file.metas.values()]
                try:
                    self.bytes_read = sum(job.result() for job in jobs)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            for output in outputs:
                output.finish()
        metas = {name: meta for file in self._files for name, meta in file.metas.items()}
        return Manifest(
            self._plan.version,
            self._plan.sequence,
            {name: Entry(meta, self._digests[name]) for name, meta in metas.items()},
            files=write_files(files, new),
            shards={output.file.path.name: output.file.size for output in outputs},
            pulled=True,
            origin=self._plan.origin,
        )

    def _files_beside(self) -> dict[str, bytes]:
        """Return the files beside the weights: those in the seed's manifest, or all of a plain checkpoint."""
        path, manifest = self._seed.path, self._seed.manifest
        entries = manifest.files if manifest is not None else {}
        if not entries:
            contents = files_beside(path, blame=self._seed.field)
            if [file.path.name for file in self._files] != [SINGLE]:
                contents[INDEX] = read_regular(path / INDEX)
            return contents
        try:
            contents = {name: read_regular(path / name) for name in entries}
        except OSError as error:
            action = f"{path} cannot be read"
            lack = exhausted(error, action, SOURCE)
            raise lack or Reason.CHECKPOINT_NOT_FOUND.error(f"{action}: {error}", field=SOURCE) from error
        for name, expected in entries.items():
            if hashlib.sha256(contents[name]).hexdigest() != expected.sha256:
                raise Reason.DIGEST_MISMATCH.error(
                    f"{path / name} does not match its checksum", field=SOURCE, next_step=AGAIN
                )
        return contents

    def _tensor(self, output: _Output, meta: TensorMeta) -> int:
        self._patience.check("before everything was pulled")
        name = meta.name
        data = torch.empty(meta.nbytes, dtype=torch.uint8)
        output.file.read_bytes(output.file.offsets[name], data)
        digest = digest_of_bytes(meta, data)
        if self._seed.manifest is not None:
            self._check(name, digest, self._seed.manifest.tensors[name].sha256, f"before: in {output.file.path}")
        changed = 0
        for delta in self._deltas:
            data, read = delta.apply(name, data)
            changed += read
        if changed:
            digest = digest_of_bytes(meta, data)
        if self._deltas and self._plan.tensors is not None:
            self._check(name, digest, self._plan.tensors[name].sha256, f"after {self._deltas[-1].path}")
        self._digests[name] = digest
        output.write(name, data)
        return meta.nbytes + changed

    def _check(self, name: str, digest: str, expected: str, where: str) -> None:
        if digest != expected:
            raise Reason.DIGEST_MISMATCH.error(
                f"{name} does not match its checksum {where}",
                field=SOURCE,
                next_step=AGAIN,
                metadata={"expected": expected, "found": digest},
            )


def _compare(metas: Mapping[str, TensorMeta], manifest: Manifest, seed: Path) -> None:
    compare(metas, manifest.metas, what=f"what {seed} holds")
    mismatches = [name for name, meta in manifest.metas.items() if metas[name].dtype != meta.dtype]
    if mismatches:
        raise Reason.CHECKPOINT_MISMATCH.error(
            f"{len(mismatches)} tensors are of another dtype than in {manifest.version!r} ({mismatches[0]})",
            field=SOURCE,
            next_step=AGAIN,
        )


class _Output:
    """A file of the new directory, with the layout of the seed's file."""

    def __init__(self, file: TensorFile, new: Path, stack: contextlib.ExitStack) -> None:
        self.file = file
        self._fd = atomic_write.create(new / file.path.name, file.size)
        stack.callback(os.close, self._fd)
        header = torch.empty(min(file.offsets.values(), default=file.size), dtype=torch.uint8)
        file.read_bytes(0, header)
        atomic_write.write_at(self._fd, header.numpy().data, 0)

    def write(self, name: str, data: torch.Tensor) -> None:
        atomic_write.write_at(self._fd, data.numpy().data, self.file.offsets[name])

    def finish(self) -> None:
        atomic_write.sync(self._fd)

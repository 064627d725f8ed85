"""Publishing a version as files: complete, or as a delta. The trainer's side of PullWeights.

An incomplete version is never visible. A version is built under a temporary name and renamed at the end, with its
manifest as the last file. Both kinds are safetensors files, so a full version can be loaded directly.

For every changed tensor a delta stores the new bytes (``overwrite``) or new XOR old bytes (``xor``). After a small
change almost all XOR bytes are zeros and compress to nothing. A second XOR would restore the old bytes, so both
encodings carry the digest of every tensor before and after.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import nn

from rlctl.contract.errors import Reason
from rlctl.contract.os_errors import exhausted
from rlctl.weights.checkpoint import atomic_write
from rlctl.weights.checkpoint.allowed_roots import Roots
from rlctl.weights.checkpoint.atomic_write import Patience
from rlctl.weights.checkpoint.checkpoint import (
    CONFIG,
    INDEX,
    SINGLE,
    Checkpoint,
    compare,
    index_of,
    open_checkpoint,
    read_config,
)
from rlctl.weights.checkpoint.safe_open import MOST_BYTES, read_regular
from rlctl.weights.checkpoint.safetensors_file import header_of
from rlctl.weights.tensor.digest import combine, digest_of_bytes, tensor_digest
from rlctl.weights.tensor.finite import is_finite, refusal
from rlctl.weights.tensor.source import WeightSource, as_offer, as_source, left_out, only, spares_of, unannounced, unfit
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes
from rlctl.weights.versions.compression import compressed
from rlctl.weights.versions.manifest import (
    MANIFEST,
    Base,
    Compression,
    Encoding,
    Entry,
    FileEntry,
    Manifest,
    directory_name,
    find_version,
    is_named,
    read_manifest,
)

SHARD_BYTES = 4 << 30
"""Maximum bytes of tensors in a file of a full version, unless a single tensor is larger."""

DELTA_BYTES = 256 << 20
"""Bytes of a delta that are collected in memory before a write."""

TURN_S = 60.0
"""Time to wait for another publisher that renames a version into place."""

FULL = "Publish a full version."

_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json"),
    *(".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".ckpt", ".tflite"),  # of other frameworks
)
"""Suffixes of weight files and their indices, which are not copied alongside a version."""

Weights: TypeAlias = nn.Module | WeightSource | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Published:
    """A version that can be pulled.

    Attributes:
        path: its directory.
        manifest: the manifest; ``manifest.digest`` is the expected model digest of the engines.
    """

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class BaseVersion:
    """A local full version as the base of a delta.

    Attributes:
        path: its directory: a published or a pulled version, or a plain checkpoint.
        version: label; "": from the manifest.
        sequence: 0: from the manifest.
    """

    path: str | Path
    version: str = ""
    sequence: int = 0


def publish_full(
    source_dir: str | Path,
    weights: Weights,
    *,
    version: str,
    sequence: int,
    files_from: str | Path,
    shard_bytes: int = SHARD_BYTES,
    finite: bool = True,
) -> Published:
    """Publish a complete version below ``source_dir``.

    ``weights`` are full tensors under checkpoint names; ``files_from`` is a checkpoint whose other files (config,
    tokenizer) are copied. ``sequence`` must be above that of every version published there; a repeated publication is
    confirmed. ``finite``: refuse weights with NaN or infinite values.

    Raises WEIGHTS_NOT_FINITE, FIELD_INVALID (an impossible label or sequence, or a taken one with other weights; more
    tensors than fit a manifest; no permission to write), CHECKPOINT_NOT_FOUND (``files_from`` holds no config, or a
    file that is too large), DISK_FULL, DEADLINE_EXCEEDED (another publisher of this host renames for more than 60 s).
    After an error nothing is published.
    """
    source = as_source(weights)
    other_files = files_beside(Path(files_from), blame="files_from")
    place = Path(source_dir) / directory_name(version, sequence)
    _refuse_late(place, sequence)
    with atomic_write.writing(place, "source_dir"), _building(place) as new:
        entries: dict[str, Entry] = {}
        shards: dict[str, int] = {}
        tensors = _checked(source, finite=finite)

        def take_in(meta: TensorMeta, data: torch.Tensor) -> None:
            entries[meta.name] = Entry(meta, digest_of_bytes(meta, data))

        plan = _shards(source.metas(), shard_bytes)
        for name, metas in plan.items():
            shards[name] = _write_tensors(new / name, metas, tensors, take_in)
        deque(tensors, maxlen=0)  # raises for surplus tensors
        if list(plan) != [SINGLE]:
            data = index_of({meta.name: name for name, metas in plan.items() for meta in metas}, source.metas())
            other_files[INDEX] = data
        manifest = Manifest(version, sequence, entries, files=write_files(other_files, new), shards=shards)
        return _finish(new, place, manifest)


def publish_delta(
    source_dir: str | Path,
    weights: Weights,
    *,
    version: str,
    sequence: int,
    base: BaseVersion,
    encoding: Literal["overwrite", "xor"] = "xor",
    compress: bool = True,
    finite: bool = True,
) -> Published:
    """Publish the difference of ``weights`` to a base version below ``source_dir``; otherwise as :func:`publish_full`.

    Holds at most two copies of the largest tensor and 256 MiB of the delta in memory. The base of the next delta is
    this version: keep a copy up to date with :func:`rlctl.weights.versions.pull.pull`.

    Raises CHECKPOINT_MISMATCH if names, shapes or dtypes differ from the base's: publish a full version then. Raises
    DIGEST_MISMATCH if the base differs from its manifest.
    """
    source = as_offer(weights)
    old, declared_base = _open_base(base)
    try:
        dropped = left_out(spares_of(source), old.metas)
        source = only(source, {meta.name for meta in source.metas()} - dropped)
        place = Path(source_dir) / directory_name(version, sequence)
        if declared_base.sequence >= sequence:
            raise Reason.FIELD_INVALID.error(
                f"sequence {sequence} does not follow its base's, {declared_base.sequence}", field="sequence"
            )
        _refuse_late(place, sequence)
        _refuse_other_tensors(source.metas(), old)
        with atomic_write.writing(place, "source_dir"), _building(place) as new:
            writer = _DeltaWriter(new)
            entries: dict[str, Entry] = {}
            for meta, tensor in zip(source.metas(), _checked(source, finite=finite), strict=True):
                entries[meta.name], payload = _difference(meta, tensor, old, encoding, compress)
                if payload is not None:
                    writer.add(meta.name, payload, tensor)
            shards = writer.finish()
            actual_base = Base(
                declared_base.version, declared_base.sequence, combine({n: e.base_sha256 for n, e in entries.items()})
            )
            if declared_base.digest not in ("", actual_base.digest):  # no other copy of the base has these bytes
                raise Reason.DIGEST_MISMATCH.error(
                    f"the files of {base.path} differ from its manifest", field="base", next_step=FULL
                )
            return _finish(new, place, Manifest(version, sequence, entries, base=actual_base, shards=shards))
    finally:
        old.close()


def files_beside(checkpoint: Path, *, blame: str) -> dict[str, bytes]:
    """Read the files beside a checkpoint's weights: config, tokenizer. Raises CHECKPOINT_NOT_FOUND."""
    try:
        names = sorted(path.name for path in checkpoint.iterdir() if path.is_file())
        files = {name: read_regular(checkpoint / name) for name in names if not _is_left_out(name)}
    except OSError as error:
        action = f"{checkpoint} cannot be read"
        lack = exhausted(error, action, blame)
        raise lack or Reason.CHECKPOINT_NOT_FOUND.error(f"{action}: {error}", field=blame) from error
    if CONFIG not in files:
        raise Reason.CHECKPOINT_NOT_FOUND.error(f"{checkpoint} holds no {CONFIG}", field=blame)
    read_config(str(checkpoint), field=blame)  # a config that engines would refuse is not published
    return files


def _is_left_out(name: str) -> bool:
    return name.endswith(_WEIGHTS) or name == MANIFEST or name.startswith(".")


def write_files(files: Mapping[str, bytes], to: Path) -> dict[str, FileEntry]:
    """Write small files; return their manifest entries. Raises OSError."""
    for name, data in files.items():
        atomic_write.write_file(to / name, data)
    return {name: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}


@contextlib.contextmanager
def _building(place: Path) -> Iterator[Path]:
    place.parent.mkdir(parents=True, exist_ok=True)
    atomic_write.sweep(place.parent)
    with atomic_write.building(place) as path:
        yield path


def _refuse_late(place: Path, sequence: int) -> None:
    source = place.parent
    with atomic_write.writing(source, "source_dir"):
        later_versions = [path.name for path in source.glob("*-*") if _sequence(path) >= sequence and path != place]
    if later_versions:
        raise Reason.FIELD_INVALID.error(
            f"sequence {sequence} does not follow {max(later_versions)}, which is published in {source}",
            field="sequence",
        )


def _finish(new: Path, place: Path, manifest: Manifest) -> Published:
    """Rename a finished version into place. An existing equal version is confirmed, a different version refused.

    Other publishers may have published meanwhile; publishers on this host take turns.
    """
    encoded = manifest.to_json()
    if len(encoded) > MOST_BYTES:  # no pull could read it
        raise Reason.FIELD_INVALID.error(
            f"its manifest would have {len(encoded)} bytes, more than the {MOST_BYTES} that are read", field="weights"
        )
    atomic_write.write_file(new / MANIFEST, encoded)
    with atomic_write.alone(place.parent, Patience(time.monotonic() + TURN_S)):
        _refuse_late(place, manifest.sequence)
        existing = read_manifest(place)
        if existing is None and atomic_write.put_in_place(new, place, over=lambda: read_manifest(place) is None):
            return Published(place, manifest)
        existing = existing or read_manifest(place)
    if existing is None or (existing.digest, existing.base) != (manifest.digest, manifest.base):
        raise Reason.FIELD_INVALID.error(
            f"{place} is published already, with other weights",
            field="version",
            next_step="Use a higher sequence, or another directory.",
        )
    for name in sorted((existing.files.keys() | manifest.files.keys()) - {INDEX}):  # shards may be cut differently
        if existing.files.get(name) != manifest.files.get(name):
            raise Reason.FIELD_INVALID.error(f"{place} is published already, with another {name}", field="files_from")
    return Published(place, existing)


def _sequence(path: Path) -> int:
    number = path.name.partition("-")[0]
    return int(number) if number.isdecimal() and (path / MANIFEST).is_file() else 0


def _shards(metas: list[TensorMeta], shard_bytes: int) -> dict[str, list[TensorMeta]]:
    """Assign tensors to files, in the source's order: file name → tensors."""
    groups: list[list[TensorMeta]] = [[]]
    size = 0
    for meta in metas:
        if groups[-1] and size + meta.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(meta)
        size += meta.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{n:05}-of-{len(groups):05}.safetensors": group for n, group in enumerate(groups, 1)}


def _checked(source: WeightSource, *, finite: bool) -> Iterator[torch.Tensor]:
    """Yield a source's tensors, exactly as announced and in that order.

    Raises FIELD_INVALID; with ``finite``, WEIGHTS_NOT_FINITE for the first tensor with such values.
    """
    tensors = source.tensors()
    for meta in source.metas():
        name, tensor = next(tensors, ("nothing more", None))
        if tensor is None or (actual := TensorMeta.of(name, tensor)) != meta:
            raise unfit(f"the source announced {meta} and gave {name if tensor is None else actual}")
        if finite and not is_finite(tensor):
            raise refusal([name], len(source.metas()))
        yield tensor
    if (extra := next(tensors, None)) is not None:
        raise unannounced(extra[0])


def _write_tensors(
    path: Path,
    metas: list[TensorMeta],
    tensors: Iterator[torch.Tensor],
    written: Callable[[TensorMeta, torch.Tensor], None],
) -> int:
    """Write one file with the next ``len(metas)`` tensors; return its size. Raises OSError."""
    header = header_of(metas, {"format": "pt"})
    size = len(header) + sum(meta.nbytes for meta in metas)
    fd = atomic_write.create(path, size)
    try:
        atomic_write.write_at(fd, memoryview(header), 0)
        offset = len(header)
        for meta in metas:
            data = as_bytes(next(tensors)).cpu()
            atomic_write.write_at(fd, data.numpy().data, offset)
            written(meta, data)
            offset += meta.nbytes
        atomic_write.sync(fd)
    finally:
        os.close(fd)
    return size


def _open_base(base: BaseVersion) -> tuple[Checkpoint, Base]:
    """Open the base's tensors, and describe the base; without a digest if it has no manifest."""
    manifest = read_manifest(Path(base.path), blame="base")
    if manifest is not None and manifest.base is not None:
        raise Reason.FIELD_INVALID.error(f"{base.path} is a delta itself; pull it into a full copy", field="base")
    label = base.version or (manifest.version if manifest else "")
    sequence = base.sequence or (manifest.sequence if manifest else 0)
    if not label or not sequence:
        raise Reason.FIELD_REQUIRED.error(f"{base.path} does not say which version it is", field="base")
    declared_base = Base(label, sequence, manifest.digest if manifest else "")
    return open_checkpoint(str(base.path), field="base"), declared_base


def _refuse_other_tensors(metas: list[TensorMeta], old: Checkpoint) -> None:
    compare({meta.name: meta for meta in metas}, old.metas, what="the version to publish")
    mismatches = [meta.name for meta in metas if old.metas[meta.name].dtype != meta.dtype]
    if mismatches:
        raise Reason.CHECKPOINT_MISMATCH.error(
            f"{len(mismatches)} tensors are of another dtype than in the base ({mismatches[0]})",
            field="weights",
            next_step=FULL,
        )


def _difference(
    meta: TensorMeta, tensor: torch.Tensor, old: Checkpoint, encoding: Literal["overwrite", "xor"], compress: bool
) -> tuple[Entry, torch.Tensor | None]:
    """Return the entry of a tensor and the bytes to store; None for an unchanged tensor."""
    base_tensor = old.read(meta.name)
    new = as_bytes(tensor).cpu()
    base_sha256 = tensor_digest(meta.name, base_tensor)
    sha256 = digest_of_bytes(meta, new)
    if sha256 == base_sha256:
        return Entry(meta, sha256, base_sha256, "same"), None
    payload = new ^ as_bytes(base_tensor) if encoding == "xor" else new
    compression: Compression = ""
    if compress and (frame := compressed(payload)).numel() < payload.numel():
        payload, compression = frame, "zstd"
    chosen: Encoding = encoding
    return Entry(meta, sha256, base_sha256, chosen, compression), payload


class _DeltaWriter:
    """Collects the stored bytes of a delta and writes files of bounded size."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pending: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._shards: dict[str, int] = {}

    def add(self, name: str, payload: torch.Tensor, tensor: torch.Tensor) -> None:
        """Add the stored bytes of a tensor. Bytes in the tensor's memory are copied: the source reuses the memory."""
        shares_memory = payload.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        self._pending[name] = payload.clone() if shares_memory else payload
        self._bytes += payload.nbytes
        if self._bytes >= DELTA_BYTES:
            self._write()

    def finish(self) -> dict[str, int]:
        """Write the remaining bytes; return the files and their sizes."""
        if self._pending:
            self._write()
        return self._shards

    def _write(self) -> None:
        metas = [TensorMeta.of(name, payload) for name, payload in self._pending.items()]
        name = f"delta-{len(self._shards) + 1:05}.safetensors"
        source = iter(self._pending.values())
        self._shards[name] = _write_tensors(self._directory / name, metas, source, lambda *_: None)
        self._pending, self._bytes = {}, 0


def published(source_dir: str | Path, version: str, roots: Roots | None = None) -> Published:
    """Return a published version. Raises CHECKPOINT_NOT_FOUND, and PATH_NOT_ALLOWED for links out of ``roots``."""
    result = look_up(Path(source_dir), version, roots=roots)
    if result is None:
        raise Reason.CHECKPOINT_NOT_FOUND.error(
            f"version {version!r} is not published in {source_dir}", field="target_version"
        )
    return result


def look_up(source: Path, version: str = "", sequence: int = 0, roots: Roots | None = None) -> Published | None:
    """Return a published version by label, sequence or both; None if it does not exist.

    Raises CHECKPOINT_NOT_FOUND for an unreadable directory and for a manifest that is damaged or of another version,
    PATH_NOT_ALLOWED if the version, or a file of it, is a link out of ``roots``.
    """
    try:
        path = find_version(source, version, sequence)
    except OSError as error:
        action = f"{source} cannot be read"
        lack = exhausted(error, action, "source_dir")
        raise lack or Reason.CHECKPOINT_NOT_FOUND.error(f"{action}: {error}", field="source_dir") from error
    if path is not None and roots is not None:
        roots.resolve_checkpoint(str(path), field="source_dir")
    manifest = None if path is None else read_manifest(path)
    if path is None or manifest is None:
        return None
    if not is_named(path, manifest):
        raise Reason.CHECKPOINT_NOT_FOUND.error(
            f"{path} holds version {manifest.version!r} (sequence {manifest.sequence})", field="source_dir"
        )
    return Published(path, manifest)

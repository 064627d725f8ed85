"""Versions in slime's layout, written by slime's trainers to a disk and read by ``/pull_weights``.

The facts, from slime 624b824: ``update_weight_from_disk.py`` and ``update_weight_from_disk_delta.py`` in
``slime/backends/megatron_utils/update_weight`` write it, ``docker/patch/latest/sglang-pull_weights.patch`` reads it.

- Version N is in ``weight_v{N:06d}/``. Version 0 is the checkpoint with which the engine was started.
- A version is a delta if the ``metadata`` of its ``model.safetensors.index.json`` has ``delta_encoding``. Any other
  version is complete: a checkpoint of safetensors files with a config.
- A delta's ``metadata`` holds texts: ``version`` and ``base_version`` (numbers), ``delta_encoding`` (``xor`` or
  ``overwrite``), ``compression_format`` (``zstd``) and ``checksum_format`` (``xxh3-128``, ``blake3`` or ``adler32``).
- A delta's files hold the changed tensors under their names, each as the bytes (U8, one dimension) of a zstd frame. A
  version without changes has no file. The ``__metadata__`` of a file has a checksum for each of its tensors, in hex:
  of all bytes of the tensor after the delta.
- A frame of ``xor`` holds new bytes XOR old bytes. A frame of ``overwrite`` holds a count, as many positions in
  ascending order (little-endian u32 each), and the new byte for each position.

Unchanged tensors of a delta have no checksum, and a version has no digest. A copy therefore records the identity of its
version (:attr:`Slime.identity`). A restarted trainer publishes other versions under the same numbers. Their identity
differs, and a copy of an old version is no base for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.os_errors import exhausted
from rlctl.weights.checkpoint import json_files
from rlctl.weights.checkpoint.allowed_roots import Roots
from rlctl.weights.checkpoint.checkpoint import INDEX, open_files
from rlctl.weights.checkpoint.safe_open import read_regular
from rlctl.weights.checkpoint.safetensors_file import TensorFile
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl.weights.versions.compression import package

SOURCE = "source_dir"

_CHUNK_BYTES = 2 << 20
"""Bytes that are decompressed at a time."""

_POSITIONS = 1 << 20
"""Positions of ``overwrite`` that are applied at a time: numpy widens each to 8 bytes."""

_DIGITS = 18
"""Maximum digits of a version's number; more do not fit a sequence."""

_READ_ON = "Publish the version again, or pull an earlier version."


class _Hash(Protocol):
    def update(self, data: Any, /) -> object: ...

    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: memoryview) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_CHECKSUMS: Mapping[str, Callable[[], _Hash]] = {
    "xxh3-128": lambda: package("xxhash").xxh3_128(),
    "blake3": lambda: package("blake3").blake3(),
    "adler32": _Adler32,
}
_ENCODINGS = ("xor", "overwrite")


@dataclass(frozen=True)
class DeltaFacts:
    """Contents of a delta's index.

    Attributes:
        base: number of the base.
        encoding: ``xor`` or ``overwrite``.
        checksum: name of the checksum.
    """

    base: int
    encoding: str
    checksum: str


@dataclass(frozen=True)
class Slime:
    """A version in slime's layout, or the checkpoint that is version 0.

    Attributes:
        path: its directory.
        number: N.
        identity: hex, from the directory's path and the names, sizes and times of its files.
        delta: None for a complete version.
    """

    path: Path
    number: int
    identity: str
    delta: DeltaFacts | None = None

    def check_unchanged(self) -> None:
        """Raise CHECKPOINT_NOT_FOUND if a file was added, removed or changed since the version was found."""
        if _identity(self.path) != self.identity:
            raise _damaged(self.path, "its files were changed while they were read", "Pull again.")


def number_of(version: str) -> int | None:
    """Return the number of a requested version in slime's layout, or None for a label that is no number."""
    digits = version.isascii() and version.isdigit() and len(version) <= _DIGITS
    return int(version) if digits and str(int(version)) == version else None


def directory_of(source: Path, number: int) -> Path:
    return source / f"weight_v{number:06d}"


def find(source: Path, number: int, roots: Roots | None = None) -> Slime | None:
    """Return a version from 1 on, or None if it does not exist.

    Raises CHECKPOINT_NOT_FOUND (an unreadable version or a damaged index), UNSUPPORTED (an unknown encoding,
    compression or checksum), PATH_NOT_ALLOWED (links out of ``roots``).
    """
    path = directory_of(source, number)
    try:
        if not path.is_dir():
            return None
    except OSError as error:
        raise _damaged(path, f"its status cannot be read: {error}") from error
    if roots is not None:
        roots.resolve_checkpoint(str(path), field=SOURCE)
    identity = _identity(path)
    try:
        index = json_files.parse(read_regular(path / INDEX))
        metadata = index.get("metadata", {})
        if not isinstance(metadata, dict):
            raise TypeError("its metadata is no map")
        is_delta = "delta_encoding" in metadata
    except FileNotFoundError:
        is_delta, metadata = False, {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        lack = exhausted(error, f"{path / INDEX} cannot be read", SOURCE)
        raise lack or _damaged(path / INDEX, f"it cannot be read: {error}") from error
    return Slime(path, number, identity, _facts(path / INDEX, metadata, number) if is_delta else None)


def version_0(base_dir: str) -> Slime:
    """Return the checkpoint with which the engine was started. Raises CHECKPOINT_NOT_FOUND."""
    return Slime(Path(base_dir), 0, _identity(Path(base_dir), "The engine needs the checkpoint that it started with."))


def _identity(path: Path, next_step: str = _READ_ON) -> str:
    """Return the identity of a version, to tell versions with the same number apart."""
    lines = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name.endswith(".tmp") or not entry.is_file():
                    continue
                status = entry.stat()
                lines.append(f"{entry.name}\0{status.st_size}\0{status.st_mtime_ns}")
    except OSError as error:
        lack = exhausted(error, f"{path} cannot be read", SOURCE)
        raise lack or _damaged(path, f"it cannot be read: {error}", next_step) from error
    return hashlib.sha256(os.fsencode("\n".join((os.path.realpath(path), *sorted(lines))))).hexdigest()


def _facts(index: Path, metadata: Mapping[str, Any], number: int) -> DeltaFacts:
    try:
        texts = {
            name: json_files.text(metadata[name])
            for name in ("version", "base_version", "delta_encoding", "compression_format", "checksum_format")
        }
    except KeyError as error:
        raise _damaged(index, f"its metadata has no {error.args[0]}") from error
    except ValueError as error:
        raise _damaged(index, f"its metadata: {error}") from error
    version, base = (_number(index, name, texts[name]) for name in ("version", "base_version"))
    if version != number:
        raise _damaged(index, f"its metadata.version is {version}, its directory is version {number}")
    if base >= number:
        raise _damaged(index, f"its metadata.base_version is {base}, which is not before version {number}")
    for name, supported in (
        ("delta_encoding", _ENCODINGS),
        ("compression_format", ("zstd",)),
        ("checksum_format", tuple(_CHECKSUMS)),
    ):
        if texts[name] not in supported:
            raise Reason.UNSUPPORTED.error(
                f"{index}: metadata.{name} is {texts[name]!r}",
                field=SOURCE,
                next_step=f"Publish with {name} {' or '.join(supported)}.",
            )
    return DeltaFacts(base, texts["delta_encoding"], texts["checksum_format"])


def _number(index: Path, name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
        raise _damaged(index, f"its metadata.{name} is {text[:60]!r}, which is no number")
    return int(text)


class SlimeDelta:
    """An opened delta: all headers are read, no tensor is.

    Attributes:
        path: its directory.
    """

    def __init__(self, version: Slime, stack: contextlib.ExitStack) -> None:
        """Open a delta.

        Raises CHECKPOINT_NOT_FOUND, CHECKPOINT_MISMATCH (index and files disagree), and UNSUPPORTED without the
        packages to read it.
        """
        assert version.delta is not None
        self.path = version.path
        self._encoding = version.delta.encoding
        self._hash = _CHECKSUMS[version.delta.checksum]
        self._hash()
        self._zstd = package("zstandard")
        self._stored: dict[str, TensorFile] = {}
        for file in open_files(str(version.path), field=SOURCE):
            stack.callback(file.close)
            for name, meta in file.metas.items():
                if meta.dtype != torch.uint8 or len(meta.shape) != 1:
                    raise self._cannot_apply(name, f"it is stored as {meta.dtype} {meta.shape}, no bytes")
                if name not in file.metadata:
                    raise self._cannot_apply(name, f"{file.path.name} has no checksum of it in __metadata__")
            self._stored |= dict.fromkeys(file.metas, file)

    def check(self, metas: Mapping[str, TensorMeta], seed: Path) -> None:
        """Raise CHECKPOINT_MISMATCH for a changed tensor that is not in ``metas``, the tensors in ``seed``."""
        if unknown := sorted(self._stored.keys() - metas.keys()):
            raise Reason.CHECKPOINT_MISMATCH.error(
                f"{self.path} changes {len(unknown)} tensors that {seed} does not hold ({unknown[0]})",
                field=SOURCE,
                next_step="Start the engine with the checkpoint that the trainer has as its --hf-checkpoint.",
            )

    def apply(self, name: str, data: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Apply the delta to a tensor's bytes, in place; return the new bytes and the number of bytes read.

        Raises CHECKPOINT_NOT_FOUND (the stored bytes are damaged), DIGEST_MISMATCH (the checksum differs).
        """
        file = self._stored.get(name)
        if file is None:
            return data, 0
        room = data.numel() if self._encoding == "xor" else 4 + 5 * data.numel()
        size = file.metas[name].nbytes
        if size > room + room // 128 + 1024:  # zstd never lengthens data by more
            raise self._cannot_apply(name, f"{size} bytes are stored for a tensor of {data.numel()}")
        stored = torch.empty(size, dtype=torch.uint8)
        file.read_bytes(file.offsets[name], stored)
        try:
            with self._zstd.ZstdDecompressor().stream_reader(stored.numpy().data) as plain:
                apply = _xor if self._encoding == "xor" else _overwrite
                apply(plain, data.numpy())
                if plain.read(1):
                    raise ValueError("there are more bytes than the tensor has")
        except (ValueError, self._zstd.ZstdError) as error:
            raise self._cannot_apply(name, str(error)) from error
        checksum = self._hash()
        checksum.update(data.numpy().data)
        if (actual := checksum.hexdigest()) != (expected := file.metadata[name]):
            raise Reason.DIGEST_MISMATCH.error(
                f"{name} does not match its checksum after {self.path}",
                field=SOURCE,
                next_step=f"Either {file.path} is damaged, or the delta was made to another base.",
                metadata={"expected": expected, "found": actual},
            )
        return data, size

    def _cannot_apply(self, name: str, cause: str) -> RlctlError:
        return _damaged(self.path, f"its data of {name} is damaged: {cause}")


def _xor(plain: Any, data: np.ndarray[Any, Any]) -> None:
    for start in range(0, data.size, _CHUNK_BYTES):
        part = data[start : start + _CHUNK_BYTES]
        part ^= _exactly(plain, part.size)


def _overwrite(plain: Any, data: np.ndarray[Any, Any]) -> None:
    count = int(_exactly(plain, 4).view("<u4")[0])
    if count > data.size:
        raise ValueError(f"{count} positions in a tensor of {data.size} bytes")
    positions = _exactly(plain, 4 * count).view("<u4")
    if count and (positions[-1] >= data.size or not (positions[:-1] < positions[1:]).all()):
        raise ValueError(f"its positions do not ascend within a tensor of {data.size} bytes")
    values = _exactly(plain, count)
    for start in range(0, count, _POSITIONS):
        data[positions[start : start + _POSITIONS]] = values[start : start + _POSITIONS]


def _exactly(plain: Any, size: int) -> np.ndarray[Any, Any]:
    """Read exactly the next ``size`` bytes. Raises ValueError for fewer."""
    block = np.empty(size, dtype=np.uint8)
    view = block.data
    while view.nbytes:
        count = plain.readinto(view)
        if not count:
            raise ValueError(f"it ends {view.nbytes} bytes early")
        view = view[count:]
    return block


def _damaged(path: Path, cause: str, next_step: str = _READ_ON) -> RlctlError:
    return Reason.CHECKPOINT_NOT_FOUND.error(f"{path}: {cause}", field=SOURCE, next_step=next_step)

"""A safetensors file: the checked places of its tensors, and reads directly into memory.

The bytes are read with ``preadv`` into existing memory: the kernel's page cache is copied once, nothing is mapped. So
weights never alias a file. A file that is truncated during a read causes a typed error; a mapping would kill the
process (SIGBUS).

Format: https://github.com/huggingface/safetensors#format (8 bytes of length, little-endian, then a JSON header, then
the tensors' bytes without gaps).
"""

from __future__ import annotations

import json
import os
import struct
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.os_errors import exhausted
from rlctl.weights.checkpoint import json_files
from rlctl.weights.checkpoint.safe_open import open_regular
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes, parse_dtype

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
"""torch's names of dtypes by their names in headers."""

METADATA = "__metadata__"
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library, too; a larger number is no length of a header."""

_LENGTH = struct.Struct("<Q")
_CODES = {name: code for code, name in DTYPES.items()}


class TensorFile:
    """An opened file with a header that was checked against the size. Threads may read at the same time.

    Attributes:
        path: path at the opening.
        metas: the tensors, by name, in the order of their bytes.
        offsets: start of each tensor's bytes in the file.
        stamp: device, inode, size and modification time at the opening.
        metadata: the header's free text entries.
    """

    def __init__(self, path: Path, *, field: str = "model_path") -> None:
        """Open a file. Raises CHECKPOINT_NOT_FOUND, with ``field``: no such file, or no complete safetensors file."""
        self.path = path
        self._field = field
        try:
            self._fd = open_regular(path)
            self._closing = weakref.finalize(self, os.close, self._fd)
            self.stamp = _stamp(os.fstat(self._fd))
            header, begin = self._header()
            self.metadata = _metadata(header.pop(METADATA, {}))
            self.metas, self.offsets = self._tensors(header, begin)
        except FileNotFoundError:
            raise self._unreadable("there is no such file") from None
        except (OSError, ValueError) as error:
            lack = exhausted(error, f"{path} cannot be read", field)
            raise lack or self._unreadable(f"it cannot be read: {error}") from error

    @property
    def size(self) -> int:
        return self.stamp[2]

    def read_bytes(self, offset: int, into: torch.Tensor) -> None:
        """Fill ``into`` (contiguous, on the host) with the file's bytes from ``offset`` on.

        Raises CHECKPOINT_NOT_FOUND if the file ends early or cannot be read.
        """
        view = as_bytes(into).numpy().data
        try:
            while view.nbytes:
                count = os.preadv(self._fd, [view], offset)
                if not count:
                    raise self._unreadable("the file was cut short while it was read")
                view = view[count:]
                offset += count
        except OSError as error:
            raise self._unreadable(f"it cannot be read: {error}") from error

    def check_unchanged(self) -> None:
        """Raise CHECKPOINT_NOT_FOUND unless the path still names the opened file, unchanged."""
        try:
            unchanged = _stamp(os.stat(self.path)) == self.stamp
        except OSError:
            unchanged = False
        if not unchanged:
            raise self._unreadable("the file was changed or removed while the checkpoint was open")

    def check_contents(self) -> None:
        """Raise CHECKPOINT_NOT_FOUND if the opened file was changed, even if its path names another file by now."""
        if _stamp(os.fstat(self._fd)) != self.stamp:
            raise self._unreadable("the file was changed while the checkpoint was open")

    def close(self) -> None:
        self._closing()

    def _header(self) -> tuple[dict[str, Any], int]:
        prefix = os.pread(self._fd, _LENGTH.size, 0)
        if len(prefix) < _LENGTH.size:
            raise ValueError("it is too short for a header")
        (length,) = _LENGTH.unpack(prefix)
        if length > min(MAX_HEADER_BYTES, self.size - _LENGTH.size):
            raise ValueError(f"its header would be {length} bytes long, the file has {self.size}")
        data = os.pread(self._fd, length, _LENGTH.size)
        header = json_files.parse(data)
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        return header, _LENGTH.size + length

    def _tensors(self, header: Mapping[str, Any], begin: int) -> tuple[dict[str, TensorMeta], dict[str, int]]:
        tensors: list[tuple[int, int, TensorMeta]] = []
        for name, entry in header.items():
            json_files.text(name)
            try:
                dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            except (TypeError, KeyError, ValueError):
                raise ValueError(f"{name} has no dtype, shape and offsets") from None
            try:
                shape, start, end = json_files.shape(shape), json_files.number(start), json_files.number(end)
            except ValueError as error:
                raise ValueError(f"{name} has no proper shape and offsets: {error}") from None
            if not isinstance(dtype, str) or dtype not in DTYPES:
                raise ValueError(f"{name} has dtype {dtype}, which this version cannot read")
            meta = TensorMeta(name, parse_dtype(DTYPES[dtype], self._field), shape)
            if meta.nbytes != end - start:
                raise ValueError(f"{name} has {end - start} bytes instead of {meta.nbytes}")
            tensors.append((start, end, meta))
        tensors.sort(key=lambda tensor: tensor[:2])
        position = 0
        for start, end, meta in tensors:
            if start != position:
                raise ValueError(f"{meta.name} begins at byte {start} of the tensors, {position} comes next")
            position = end
        if begin + position != self.size:
            raise ValueError(f"it has {self.size} bytes, its header promises {begin + position}")
        return {meta.name: meta for _, _, meta in tensors}, {meta.name: begin + start for start, _, meta in tensors}

    def _unreadable(self, cause: str) -> RlctlError:
        return Reason.CHECKPOINT_NOT_FOUND.error(f"{self.path}: {cause}", field=self._field)


def header_of(metas: list[TensorMeta], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes before the tensors of a file with these tensors, in this order.

    Raises FIELD_INVALID for a dtype or a name that the format does not allow.
    """
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for meta in metas:
        code = _CODES.get(str(meta.dtype).removeprefix("torch."))
        if code is None:
            raise Reason.FIELD_INVALID.error(f"{meta.name}: safetensors files hold no {meta.dtype}")
        if meta.name == METADATA:
            raise Reason.FIELD_INVALID.error(f"safetensors files hold no tensor of the name {METADATA}")
        entries[meta.name] = {"dtype": code, "shape": meta.shape, "data_offsets": [end, end + meta.nbytes]}
        end += meta.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    # Readers that map files need tensors that start at a multiple of 8.
    header += b" " * (-len(header) % 8)
    return _LENGTH.pack(len(header)) + header


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("its metadata is no map of texts")
    return value


def _stamp(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

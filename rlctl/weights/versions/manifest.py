"""The manifest of a published version: ``rlctl-manifest.json``, written last.

A version has a directory below the directory of all versions, named by its sequence and label, such as
``00000042-step-42`` (characters that file names cannot hold are quoted as in URLs). A directory without a manifest is
no version: its writer is still at work, or dead.

The manifest (JSON, ``format`` 1) holds ``version``, ``sequence``, ``kind`` ("full" or "delta"), of a delta ``base``
(version, sequence and digest of its base), ``digest``, ``files`` (name → size and SHA-256 of the files without
weights), ``shards`` (file → size), and per tensor ``dtype``, ``shape``, ``sha256``; in a delta also ``base_sha256``,
``encoding`` and ``compression``. The manifest of a pulled copy has ``pulled`` true: a pull replaces nothing else. A
copy of a version in slime's layout has ``origin``: the identity of that version, and the identity of the engine's own
checkpoint if the copy began there (:mod:`rlctl.weights.versions.slime_layout`).

``sha256`` is a tensor's digest as everywhere in rlctl (:func:`rlctl.weights.tensor.digest.tensor_digest`), and
``digest`` the model digest over these. So published, pulled and served weights are comparable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.os_errors import exhausted
from rlctl.weights.checkpoint import json_files
from rlctl.weights.checkpoint.json_files import number, text
from rlctl.weights.checkpoint.safe_open import read_regular
from rlctl.weights.tensor.digest import combine
from rlctl.weights.tensor.tensors import TensorMeta, dtype_name, parse_dtype

MANIFEST = "rlctl-manifest.json"
FORMAT = 1

Encoding = Literal["", "same", "overwrite", "xor"]
Compression = Literal["", "zstd"]

_LAST = (1 << 64) - 1
"""The highest sequence: the limit of messages."""

_LONGEST_NAME = 219
"""Maximum length of a version's directory name, in bytes.

File systems allow 255, and the name during the build is 36 bytes longer.
"""


@dataclass(frozen=True)
class Entry:
    """A tensor of a version.

    Attributes:
        meta: description of the tensor.
        sha256: its digest, hex.
        base_sha256: of a delta: its digest in the base.
        encoding: of a delta: "same" (as in the base), "overwrite" (the new bytes), "xor" (new bytes XOR old bytes).
        compression: of a delta: compression of the stored bytes; "" for none.
    """

    meta: TensorMeta
    sha256: str
    base_sha256: str = ""
    encoding: Encoding = ""
    compression: Compression = ""


@dataclass(frozen=True)
class Base:
    """The base of a delta."""

    version: str
    sequence: int
    digest: str


@dataclass(frozen=True)
class FileEntry:
    """A file without weights: a config, a tokenizer.

    Attributes:
        size: in bytes.
        sha256: over its bytes, hex.
    """

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A version.

    Attributes:
        version: its label.
        sequence: grows with every version of a directory.
        tensors: every tensor of the version, by checkpoint name; in a delta also unchanged tensors.
        base: base of a delta; None: the version is complete.
        files: files beside the weights.
        shards: size of each file with weights, in bytes.
        pulled: a copy of a published version. Copies from before this mark lack it.
        origin: of a copy of a version in slime's layout: identity of the version, and of the checkpoint of its start.
    """

    version: str
    sequence: int
    tensors: Mapping[str, Entry]
    base: Base | None = None
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    shards: Mapping[str, int] = field(default_factory=dict)
    pulled: bool = False
    origin: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The model digest of the version, hex."""
        return combine({name: entry.sha256 for name, entry in self.tensors.items()})

    @property
    def metas(self) -> dict[str, TensorMeta]:
        return {name: entry.meta for name, entry in self.tensors.items()}

    def is_base_of(self, delta: Manifest) -> bool:
        """Return whether ``delta`` has this version as its base, by the weights and not only by the name."""
        base = delta.base
        return base is not None and (base.sequence, base.digest) == (self.sequence, self.digest)

    def to_json(self) -> bytes:
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
            "sequence": self.sequence,
            "kind": "full" if self.base is None else "delta",
            "digest": self.digest,
            "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in self.files.items()},
            "shards": dict(self.shards),
            "tensors": {name: _entry_to_json(entry) for name, entry in self.tensors.items()},
        }
        if self.base is not None:
            body["base"] = vars(self.base)
        if self.pulled:
            body["pulled"] = True
        if self.origin:
            body["origin"] = self.origin
        return json.dumps(body, indent=1).encode()


def directory_name(version: str, sequence: int) -> str:
    """Return the name of a version's directory.

    Raises FIELD_INVALID for an empty or too long label, or an impossible sequence.
    """
    name = f"{sequence:08d}-{_label(version)}"
    if not version or not 1 <= sequence <= _LAST or len(name) > _LONGEST_NAME:
        raise Reason.FIELD_INVALID.error(
            f"no version can be published as {version[:60]!r}, sequence {sequence}", field="version"
        )
    return name


def find_version(source: Path, version: str = "", sequence: int = 0) -> Path | None:
    """Return the directory of a published version by label, sequence or both; the latest if several, None if none."""
    encoded = _label(version)
    candidates: list[tuple[int, Path]] = []
    for path in source.iterdir() if source.is_dir() else ():
        number, dash, label = path.name.partition("-")
        named = dash and number.isdecimal() and (not version or label == encoded)
        if named and sequence in (0, int(number)) and (path / MANIFEST).is_file():
            candidates.append((int(number), path))
    return max(candidates)[1] if candidates else None


def is_named(directory: Path, manifest: Manifest) -> bool:
    """Return whether a version's directory is named after its manifest."""
    number, _, label = directory.name.partition("-")
    return number.isdecimal() and (int(number), label) == (manifest.sequence, _label(manifest.version))


def read_manifest(directory: Path, *, blame: str = "source_dir") -> Manifest | None:
    """Read the manifest of a directory, or return None without a manifest.

    Raises CHECKPOINT_NOT_FOUND, with the field ``blame``, for a damaged manifest or an unknown format.
    """
    path = directory / MANIFEST
    try:
        return _from_json(json_files.parse(read_regular(path)), blame)
    except FileNotFoundError:
        return None
    except RlctlError as error:
        raise _damaged(path, error.message, blame) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        lack = exhausted(error, f"{path} cannot be read", blame)
        raise lack or _damaged(path, f"{type(error).__name__}: {error}", blame) from error


def _label(version: str) -> str:
    try:
        return quote(version, safe=" ")
    except (TypeError, UnicodeEncodeError) as error:  # no message could hold it either
        raise Reason.FIELD_INVALID.error(f"no version can be called {version!r:.60}", field="version") from error


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    body: dict[str, Any] = {"dtype": dtype_name(entry.meta.dtype), "shape": entry.meta.shape, "sha256": entry.sha256}
    if entry.encoding:
        body |= {"base_sha256": entry.base_sha256, "encoding": entry.encoding, "compression": entry.compression}
    return body


def _from_json(body: dict[str, Any], blame: str) -> Manifest:
    if body["format"] != FORMAT:
        raise ValueError(f"format {body['format']!r} is not {FORMAT}")
    version, sequence, pulled = text(body["version"]), number(body["sequence"]), body.get("pulled", False)
    if sequence > _LAST or not isinstance(pulled, bool):
        raise ValueError(f"sequence {sequence}, pulled {pulled!r}")
    base = None
    if "base" in body:
        base_body = body["base"]
        base = Base(text(base_body["version"]), number(base_body["sequence"]), text(base_body["digest"]))
    if base is not None and not base.sequence < sequence:  # so that a chain of bases ends
        raise ValueError(f"its base is version {base.version!r} (sequence {base.sequence}), which is not before it")
    if body["kind"] != ("full" if base is None else "delta"):
        raise ValueError(f"kind {body['kind']!r} contradicts its contents")
    tensors = {}
    for name, entry in body["tensors"].items():
        encoding, compression = entry.get("encoding", ""), entry.get("compression", "")
        allowed = ("",) if base is None else ("same", "overwrite", "xor")
        if encoding not in allowed or compression not in ("", "zstd"):
            raise ValueError(f"{name}: encoding {encoding!r}, compression {compression!r}")
        meta = TensorMeta(text(name), parse_dtype(entry["dtype"], blame), json_files.shape(entry["shape"]))
        tensors[name] = Entry(meta, text(entry["sha256"]), text(entry.get("base_sha256", "")), encoding, compression)
    files = {name: FileEntry(number(file["size"]), text(file["sha256"])) for name, file in body["files"].items()}
    shards = {name: number(size) for name, size in body["shards"].items()}
    for name in (*files, *shards):
        if Path(name).name != name or name in ("", ".", "..", MANIFEST) or b"\0" in os.fsencode(name):
            raise ValueError(f"{name!r} is no file of the directory")
    origin = tuple(map(text, body.get("origin", ())))
    manifest = Manifest(version, sequence, tensors, base, files, shards, pulled, origin)
    if manifest.digest != body["digest"]:
        raise ValueError("its digest is not the digest of its tensors")
    return manifest


def _damaged(path: Path, cause: str, blame: str) -> RlctlError:
    return Reason.CHECKPOINT_NOT_FOUND.error(f"{path} is no manifest that can be read: {cause}", field=blame)

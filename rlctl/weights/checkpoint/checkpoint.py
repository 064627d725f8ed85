"""Checkpoints on disk: a directory with ``config.json`` and safetensors files, single or sharded with an index.

Readers disagree about directories with further safetensors files. transformers prefers the single file to an index.
SGLang and vLLM prefer the index, and load every file without an index. vLLM prefers ``consolidated*`` files to all
other files. Such a directory is refused: an engine must load the same files that are checked here.

Every defect of a checkpoint is found at the opening, before any tensor is read: each file's header is checked against
the file's size and the index. Tensors are read whole or as slices, always into separate memory. Weights that alias a
file mapping would change, or kill the process, at a rewrite of the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.os_errors import exhausted
from rlctl.weights.checkpoint import json_files
from rlctl.weights.checkpoint.parallel_read import Part, read_parts
from rlctl.weights.checkpoint.safe_open import read_regular
from rlctl.weights.checkpoint.safetensors_file import TensorFile
from rlctl.weights.tensor.slices import Slice
from rlctl.weights.tensor.tensors import TensorMeta, castable, dtype_name

CONFIG = "config.json"
STEM = "model"
SUFFIX = ".safetensors"
INDEX_SUFFIX = f"{SUFFIX}.index.json"
SINGLE = STEM + SUFFIX
INDEX = STEM + INDEX_SUFFIX

_SHOWN = 5
"""Maximum number of names of each kind in the message of a mismatch; the metadata has all names."""


@dataclass(frozen=True)
class Located:
    """A tensor in a file.

    Attributes:
        file: the file.
        offset: start of the tensor's bytes in the file.
        meta: description of the tensor.
    """

    file: TensorFile
    offset: int
    meta: TensorMeta


class StoredWeights(Protocol):
    """Opened and checked weights on disk: the result of a loader, and the input of a shard map.

    Attributes:
        path: the directory as given, with the ``config.json``.
        metas: descriptions of all tensors, by name.
        config: contents of ``config.json``.
    """

    path: str
    metas: Mapping[str, TensorMeta]
    config: Mapping[str, Any]

    def check_unchanged(self) -> None:
        """Raise CHECKPOINT_NOT_FOUND if a read would no longer return the contents that were checked at the opening."""

    def read_into(self, destinations: Sequence[tuple[str, Slice, torch.Tensor]]) -> int:
        """Copy parts of full tensors into memory of the parts' shapes, cast to its dtype; return the bytes read.

        Reads the opened files, even if the path names other files by now. Keeps no reference to the memory, and the
        memory never refers to a file. Raises CHECKPOINT_NOT_FOUND if a file was changed or a read fails; some parts are
        then in place and others are not.
        """

    def close(self) -> None:
        """Close the files; no tensor can be read afterwards."""


class Checkpoint:
    """An opened checkpoint of safetensors files; see :class:`StoredWeights`.

    Attributes:
        files: the opened files.
    """

    def __init__(
        self,
        path: str,
        config: Mapping[str, Any],
        files: Sequence[TensorFile],
        *,
        located: Mapping[str, Located] | None = None,
        field: str = "model_path",
        stem: str = "",
    ) -> None:
        """Wrap opened files; ``located`` has the places of the tensors if the files' own headers do not.

        ``stem``: as for :func:`open_files`; "" for files that are only a part of their directory.
        """
        self.path = path
        self.config = config
        self.files = list(files)
        self._field = field
        self._stem = stem
        if located is None:
            located = {
                name: Located(file, file.offsets[name], meta) for file in files for name, meta in file.metas.items()
            }
        self._located = dict(located)
        self.metas: Mapping[str, TensorMeta] = {name: tensor.meta for name, tensor in located.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return the whole tensor, contiguous, in separate memory.

        Raises CHECKPOINT_NOT_FOUND for an unknown tensor, or a file that was changed after the opening.
        """
        entry = self._find(name)
        entry.file.check_unchanged()
        tensor = torch.empty(entry.meta.shape, dtype=entry.meta.dtype)
        self.read_into([(name, Slice(), tensor)])
        return tensor

    def check_unchanged(self) -> None:
        for file in self.files:
            file.check_unchanged()
        if not self._stem:
            return
        try:
            names = list(_select(Path(self.path), self._stem, self._field))
        except RlctlError as error:
            cause = f"the directory was changed while the checkpoint was open: {error.message}"
            raise _not_found(Path(self.path), cause, self._field) from error
        if names != [file.path.name for file in self.files]:
            raise _not_found(Path(self.path), "its index was changed while the checkpoint was open", self._field)

    def same_files(self, other: Checkpoint) -> bool:
        """Return whether a checkpoint that was opened later has the same files, unchanged in between."""
        return [file.stamp for file in self.files] == [file.stamp for file in other.files]

    def read_into(self, destinations: Sequence[tuple[str, Slice, torch.Tensor]], *, threads: int = 0) -> int:
        """See :class:`StoredWeights`; ``threads`` as for :func:`rlctl.weights.checkpoint.parallel_read.read_parts`."""
        parts = []
        for name, part, target in destinations:
            entry = self._find(name)
            parts.append(Part(entry.file, entry.offset, entry.meta, part, target))
        files = {id(part.file): part.file for part in parts}.values()
        for file in files:
            file.check_contents()
        count = read_parts(parts, threads=threads)
        for file in files:
            file.check_contents()
        return count

    def close(self) -> None:
        """Close the files; no tensor can be read afterwards."""
        self._located.clear()
        for file in self.files:
            file.close()

    def _find(self, name: str) -> Located:
        if name not in self._located:
            cause = "it was closed" if name in self.metas else f"it has no tensor {name!r}"
            raise Reason.CHECKPOINT_NOT_FOUND.error(f"{self.path}: {cause}", field=self._field)
        return self._located[name]


def open_checkpoint(path: str, *, field: str = "model_path") -> Checkpoint:
    """Open a checkpoint and check all of its headers; no tensor is read.

    ``path`` is a directory on this machine; ``field`` is the request field for errors.

    Raises CHECKPOINT_NOT_FOUND (no such directory, config or file; a file that is truncated or not a safetensors file),
    CHECKPOINT_MISMATCH (the index and the files disagree, or the directory holds further safetensors files).
    """
    config = read_config(path, field=field)
    return Checkpoint(path, config, open_files(path, field=field), field=field, stem=STEM)


def read_config(path: str, *, field: str = "model_path", name: str = CONFIG) -> dict[str, Any]:
    """Read a checkpoint's ``config.json``, or the file ``name`` in its place. Raises CHECKPOINT_NOT_FOUND."""
    directory = Path(path)
    try:
        exists = directory.is_dir()
    except (OSError, ValueError) as error:  # an invalid file name, or a directory without access
        raise _not_found(directory, f"its status cannot be read: {error}", field) from error
    if not exists:
        raise _not_found(directory, "there is no such directory", field)
    return _read_json(directory / name, field)


def open_files(path: str, *, field: str = "model_path", stem: str = STEM) -> list[TensorFile]:
    """Open the safetensors files of a directory, single or sharded, by name; ``stem`` is the prefix of the names.

    Raises as :func:`open_checkpoint`.
    """
    directory = Path(path)
    selected = _select(directory, stem, field)
    files = [TensorFile(directory / name, field=field) for name in selected]
    for file in files:
        names = selected[file.path.name]
        if names is None:
            continue
        index = directory / (stem + INDEX_SUFFIX)
        if missing := sorted(names - file.metas.keys()):
            raise _mismatch(f"{index}: {file.path.name} does not hold {_some(missing)}", field)
        if extra := sorted(file.metas.keys() - names):
            raise _mismatch(f"{index}: {file.path.name} holds {_some(extra)}, against the index", field)
    return files


def index_of(weight_map: Mapping[str, str], metas: Iterable[TensorMeta]) -> bytes:
    """Return the contents of the index of a sharded checkpoint: the file of each tensor."""
    total = sum(meta.nbytes for meta in metas)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(weight_map)}, indent=1).encode()


def compare(metas: Mapping[str, TensorMeta], reference: Mapping[str, TensorMeta], *, what: str) -> None:
    """Check that two sets of tensors have the same names and shapes, and castable dtypes.

    ``what`` names the first set in words ("the checkpoint /models/a"). Raises CHECKPOINT_MISMATCH. Its message lists
    the first names that are missing, extra, or of another shape or dtype; its metadata (``missing``, ``extra``,
    ``shapes``, ``dtypes``) lists all, a name a line.
    """
    common = sorted(metas.keys() & reference.keys())
    differences = {
        "missing": sorted(reference.keys() - metas.keys()),
        "extra": sorted(metas.keys() - reference.keys()),
        "shapes": [
            f"{name} {metas[name].shape} instead of {reference[name].shape}"
            for name in common
            if metas[name].shape != reference[name].shape
        ],
        "dtypes": [
            f"{name} {dtype_name(metas[name].dtype)} instead of {dtype_name(reference[name].dtype)}"
            for name in common
            if not castable(metas[name].dtype, reference[name].dtype)
        ],
    }
    differences = {kind: names for kind, names in differences.items() if names}
    if differences:
        words = "; ".join(_summary(kind, names) for kind, names in differences.items())
        raise Reason.CHECKPOINT_MISMATCH.error(
            f"{what} does not fit: {words}",
            metadata={kind: "\n".join(names) for kind, names in differences.items()},
        )


def _select(directory: Path, stem: str, field: str) -> dict[str, set[str] | None]:
    """Return the safetensors files of a checkpoint by name, with the tensors that the index assigns to each.

    Without an index the result is one file, with None. Raises as :func:`open_checkpoint`, also for files that an engine
    could load besides or instead.
    """
    single, index = stem + SUFFIX, stem + INDEX_SUFFIX
    try:
        # Engines also look for files by their suffix, without hidden files.
        present = {name for name in os.listdir(directory) if name.endswith((SUFFIX, INDEX_SUFFIX)) and name[0] != "."}
    except OSError as error:
        lack = exhausted(error, f"{directory} cannot be listed", field)
        raise lack or _not_found(directory, f"it cannot be listed: {error}", field) from error
    selected: dict[str, set[str] | None] = {single: None}
    if (directory / index).exists():
        selected = dict(sorted(_read_index(directory / index, field).items()))
    elif not (directory / single).exists():
        raise _not_found(directory, f"it holds neither {single} nor {index}", field)
    if unread := sorted(present - selected.keys() - {index}):
        origin = f"{index} does not name" if index in present else f"are no part of {single}"
        raise _mismatch(
            f"{directory} holds safetensors files that {origin}: {_some(unread)}; engines differ in which files of "
            "such a directory they load",
            field,
            next_step="Remove the files that do not belong to the checkpoint, or an index that is out of date.",
        )
    return selected


def _read_index(index: Path, field: str) -> dict[str, set[str] | None]:
    weight_map = _read_json(index, field).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise _not_found(index, "it has no weight_map from names to files", field)
    promised: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        promised.setdefault(file_name, set()).add(name)
    for name in promised:
        if Path(name).name != name or name in ("", "."):
            raise _mismatch(f"{index}: {name!r} is no file of this directory", field)
        if not name.endswith(SUFFIX) or name[0] == ".":
            raise _mismatch(f"{index}: {name!r} is not called *{SUFFIX}; engines would leave it out", field)
    return dict(promised)


def _read_json(path: Path, field: str) -> dict[str, Any]:
    try:
        value = json_files.parse(read_regular(path))
    except FileNotFoundError:
        raise _not_found(path, "there is no such file", field) from None
    except (OSError, ValueError) as error:
        lack = exhausted(error, f"{path} cannot be read", field)
        raise lack or _not_found(path, f"it cannot be read: {error}", field) from error
    if not isinstance(value, dict):
        raise _not_found(path, "it holds no JSON object", field)
    return value


def _not_found(path: Path, cause: str, field: str) -> RlctlError:
    return Reason.CHECKPOINT_NOT_FOUND.error(f"{path}: {cause}", field=field)


def _mismatch(cause: str, field: str, *, next_step: str = "") -> RlctlError:
    return Reason.CHECKPOINT_MISMATCH.error(cause, field=field, next_step=next_step)


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def _summary(kind: str, names: list[str]) -> str:
    label = {"missing": "missing", "extra": "extra", "shapes": "of another shape", "dtypes": "of another dtype"}[kind]
    return f"{len(names)} {label} ({_some(names)})"

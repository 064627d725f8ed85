"""Load formats: the layout of a checkpoint's files, by the name in a request.

======================  =================================================================================
"" "auto" "safetensors"  a Hugging Face checkpoint, single file or sharded with an index
"direct"                tensors under the engine's own parameter names, in a rank's own shapes:
                        ``model-rank-R-part-P.safetensors`` (as SGLang's and vLLM's sharded state), or at a single
                        rank ``model.safetensors``
"flattened_bucket"      full tensors under checkpoint names, packed into buckets of bytes: each tensor of the files is
                        one bucket (1-d, U8), and the file's metadata describes its contents
any other name          an installed loader of this name
======================  =================================================================================

A custom loader is a callable ``(path) -> StoredWeights`` that is installed with the engine, as an entry point of the
group ``rlctl.loaders``. It opens and checks a directory, and raises typed errors. A request only names one of these
loaders; a name is never imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.serialized_tensors.payload import FLATTENED
from rlctl.weights.checkpoint import json_files
from rlctl.weights.checkpoint.checkpoint import (
    STEM,
    Checkpoint,
    Located,
    StoredWeights,
    open_checkpoint,
    open_files,
    read_config,
)
from rlctl.weights.checkpoint.safetensors_file import TensorFile
from rlctl.weights.tensor.tensors import TensorMeta, parse_dtype

DIRECT = "direct"
STANDARD = ("", "auto", "safetensors")
GROUP = "rlctl.loaders"

BUCKETS = "rlctl.buckets"
"""Metadata entry of a file of packed buckets: JSON, bucket name → list of [name, dtype, shape, first byte]."""

Loader = Callable[[str], StoredWeights]

_PART = re.compile(r"model-rank-(\d+)-part-(\d+)\.safetensors")


def load_formats() -> list[str]:
    """Return every name that :func:`open_stored` accepts."""
    return sorted({*STANDARD[1:], DIRECT, FLATTENED, *(point.name for point in entry_points(group=GROUP))})


def check_format(name: str) -> None:
    """Raise UNSUPPORTED, with the known names, if no loader has this name."""
    if name and name not in load_formats():
        raise Reason.UNSUPPORTED.error(
            f"there is no load format {name!r}; there are: {', '.join(load_formats())}", field="load_format"
        )


def open_stored(path: str, load_format: str = "", *, rank: int = 0, size: int = 1) -> StoredWeights:
    """Open a directory and check everything but the tensors' contents. ``rank`` and ``size`` matter only for "direct".

    Raises UNSUPPORTED (no such format), CHECKPOINT_NOT_FOUND and CHECKPOINT_MISMATCH as
    :func:`rlctl.weights.checkpoint.checkpoint.open_checkpoint`. Typed errors of a custom loader pass through; any other
    error becomes CHECKPOINT_NOT_FOUND.
    """
    check_format(load_format)
    if load_format in STANDARD:
        return open_checkpoint(path)
    if load_format == DIRECT:
        return _open_direct(path, rank, size)
    if load_format == FLATTENED:
        return _open_flattened(path)
    try:
        return _find(load_format)(path)
    except RlctlError:
        raise
    except Exception as error:  # third-party code
        raise _unreadable(path, f"loader {load_format!r} failed: {type(error).__name__}: {error}") from error


def _find(name: str) -> Loader:
    (point,) = entry_points(group=GROUP, name=name)
    loader: Loader = point.load()
    return loader


def _open_direct(path: str, rank: int, size: int) -> Checkpoint:
    config = read_config(path)
    parts: dict[int, list[str]] = {}
    for file in sorted(Path(path).iterdir()):
        if match := _PART.fullmatch(file.name):
            parts.setdefault(int(match[1]), []).append(file.name)
    if not parts and size == 1:
        return Checkpoint(path, config, open_files(path), stem=STEM)
    if sorted(parts) != list(range(size)):
        stored_ranks = ", ".join(map(str, sorted(parts))) or "none"
        raise Reason.CHECKPOINT_MISMATCH.error(
            f"{path} holds the parts of ranks {stored_ranks}, not of {size} ranks", field="model_path"
        )
    files = [TensorFile(Path(path) / name) for name in parts[rank]]
    _refuse_twice(path, files)
    return Checkpoint(path, config, files)


def _open_flattened(path: str) -> Checkpoint:
    config, files = read_config(path), open_files(path)
    located: dict[str, Located] = {}
    for file in files:
        try:
            contents = json_files.parse(file.metadata[BUCKETS].encode())
            tensors = [(key, *tensor) for key, bucket in contents.items() for tensor in bucket]
            for key, name, dtype, shape, start in tensors:
                meta = TensorMeta(json_files.text(name), parse_dtype(dtype, "model_path"), json_files.shape(shape))
                offset = json_files.number(start)
                if offset + meta.nbytes > file.metas[key].nbytes or name in located:
                    raise ValueError(f"{name} does not lie in {key}, or comes twice")
                located[name] = Located(file, file.offsets[key] + offset, meta)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unreadable(str(file.path), f"it holds no packed buckets: {error}") from error
    return Checkpoint(path, config, files, located=located, stem=STEM)


def _refuse_twice(path: str, files: Sequence[TensorFile]) -> None:
    names = [name for file in files for name in file.metas]
    if len(names) != len(set(names)):
        raise Reason.CHECKPOINT_MISMATCH.error(f"{path} holds a tensor twice", field="model_path")


def _unreadable(path: str, cause: str) -> RlctlError:
    return Reason.CHECKPOINT_NOT_FOUND.error(f"{path}: {cause}", field="model_path")

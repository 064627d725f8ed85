"""Checks of a checkpoint before an engine server loads it.

SGLang and vLLM load a different architecture with equal tensor names, skip unknown names, and keep tensors that are
missing in the checkpoint. All this counts as success. A load that fails half-way may end the server.
"""

from __future__ import annotations

import glob
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import OUTCOME_SKIPPED
from rlctl.v1.verbs_pb2 import CheckpointReport, PullReport, PullWeightsRequest
from rlctl.weights.checkpoint.allowed_roots import Roots
from rlctl.weights.checkpoint.atomic_write import Patience
from rlctl.weights.checkpoint.checkpoint import Checkpoint, compare, open_checkpoint
from rlctl.weights.checkpoint.load_formats import STANDARD
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.tensors import TensorMeta, dtype_name
from rlctl.weights.versions.manifest import read_manifest
from rlctl.weights.versions.pull import pull_within

_VOLATILE = (
    *("_name_or_path", "transformers_version", "_diffusers_version", "torch_dtype", "dtype", "use_cache"),
    *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "auto_map", "pretraining_tp"),
)
"""Entries of a config that may differ between checkpoints of a model."""

_COMPUTED = (torch.float32, torch.bfloat16, torch.float16)


def digest_of(checkpoint: Checkpoint) -> str:
    """Return the model digest of a checkpoint on disk, hex."""
    digest = ModelDigest()
    for name in checkpoint.metas:
        digest.add(name, checkpoint.read(name))
    return digest.digest()


def digest_at(path: str) -> str:
    """Return the model digest of the checkpoint at a path, hex. Raises CHECKPOINT_NOT_FOUND, CHECKPOINT_MISMATCH."""
    checkpoint = open_checkpoint(path)
    try:
        return digest_of(checkpoint)
    finally:
        checkpoint.close()


def compare_configs(path: str, config: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
    """Raise CHECKPOINT_MISMATCH if a config contradicts the config of the engine's first checkpoint."""
    # An entry of only one config is a default that a different version of the library writes out.
    names = sorted((reference.keys() & config.keys()) - set(_VOLATILE) | {"architectures", "model_type"})
    different = [
        f"{name} is {config.get(name)!r} instead of {reference.get(name)!r}"
        for name in names
        if config.get(name) != reference.get(name)
    ]
    if different:
        raise Reason.CHECKPOINT_MISMATCH.error(
            f"{path} is of another architecture: {'; '.join(different)}", field="model_path"
        )


def refuse_pattern(path: str, *, field: str) -> None:
    """Raise CHECKPOINT_MISMATCH for a directory name that the servers' ``glob`` takes for a pattern.

    The servers would look for its files in matching directories.
    """
    if glob.has_magic(path):
        raise Reason.CHECKPOINT_MISMATCH.error(
            f"{path} contains a wildcard (* ? [), with which the server would read other directories",
            field=field,
            next_step="Rename the directory.",
        )


class Checkpoints:
    """The checkpoints of one engine.

    Attributes:
        reference: the tensors of every update, by name, from the checkpoint of the engine's start.
    """

    def __init__(self, product: str, model_path: str, allowed_roots: tuple[str, ...]) -> None:
        """Raises CHECKPOINT_NOT_FOUND, CHECKPOINT_MISMATCH."""
        refuse_pattern(model_path, field="model_path")
        first = open_checkpoint(model_path)
        self._product = product
        self._model_path = model_path
        self._config = first.config
        self.reference: Mapping[str, TensorMeta] = dict(first.metas)
        self._roots = Roots.around(model_path, allowed_roots)
        self._stop = threading.Event()
        first.close()

    @property
    def dtype(self) -> str:
        """Return the dtype of most bytes of the first checkpoint, such as "float32"; "" for quantised weights."""
        sizes: Counter[torch.dtype] = Counter()
        for meta in self.reference.values():
            sizes[meta.dtype] += meta.nbytes
        (dtype, _), *_ = sizes.most_common(1)
        return dtype_name(dtype).removeprefix("torch.") if dtype in _COMPUTED else ""

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the content of the first checkpoint's config.json."""
        return self._config

    def attached(self, path: str, *, updated: bool = False) -> str:
        """Return the checkpoint that a running server has loaded: the first checkpoint, or a checkpoint of an update.

        ``updated``: rlctl has updated the server. Raises CHECKPOINT_MISMATCH, and as :meth:`open`.
        """
        if os.path.realpath(path) == os.path.realpath(self._model_path):
            return self._model_path
        if not updated:
            raise Reason.CHECKPOINT_MISMATCH.error(
                f"the server has loaded {path}, not {self._model_path}", field="model_path"
            )
        self.open(path, "").close()
        return path

    def resolve(self, path: str, *, field: str) -> str:
        """Resolve the path of a checkpoint to be read. Raises PATH_NOT_ALLOWED, CHECKPOINT_MISMATCH."""
        resolved = self._roots.resolve_checkpoint(path, field=field)
        refuse_pattern(resolved, field=field)
        return resolved

    def open(self, path: str, load_format: str, target_modules: object = ()) -> Checkpoint:
        """Open a checkpoint that the server can load. The caller closes it.

        Raises PATH_NOT_ALLOWED, UNSUPPORTED, CHECKPOINT_NOT_FOUND, CHECKPOINT_MISMATCH.
        """
        if load_format not in STANDARD:
            raise Reason.UNSUPPORTED.error(
                f"{self._product} is told to read safetensors only, not {load_format!r}", field="load_format"
            )
        if target_modules:
            raise Reason.UNSUPPORTED.error(
                f"{self._product} loads checkpoints whole", field="target_modules", outcome=OUTCOME_SKIPPED
            )
        checkpoint = open_checkpoint(self.resolve(path, field="model_path"))
        try:
            compare(checkpoint.metas, self.reference, what=f"the checkpoint {path}")
            compare_configs(path, checkpoint.config, self._config)
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint

    def inspect(self, path: str, load_format: str, target_modules: object) -> CheckpointReport:
        """Check a checkpoint as a load does, without the load. Raises the errors of a load before its first byte."""
        checkpoint = self.open(path, load_format, target_modules)
        checkpoint.close()
        manifest = read_manifest(Path(checkpoint.path), blame="model_path")
        return CheckpointReport(
            tensors=len(checkpoint.metas),
            bytes=sum(meta.nbytes for meta in checkpoint.metas.values()),
            version=manifest.version if manifest else "",
            model_digest=manifest.digest if manifest else "",
        )

    def pull(self, request: PullWeightsRequest, timeout_s: float) -> PullReport:
        """Bring a local directory to a published version during generation. Raises as :func:`pull_within`."""
        return pull_within(self._roots, request, self._model_path, Patience(time.monotonic() + timeout_s, self._stop))

    def stop(self) -> None:
        """End the pulls that are under way."""
        self._stop.set()

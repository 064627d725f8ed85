"""Modules of a diffusion pipeline on disk, and the server's checksum of each module after its load.

A checkpoint in diffusers' layout has a directory of safetensors files for each module (``transformer``, ``vae``). The
server digests a module as SHA-256 over the parameters' names and bytes, in the order of the names. If the server holds
a module in the form of its files, the files give the same checksum. An equal checksum then proves every byte. Tensors
are called ``MODULE.NAME`` here.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl_servers.updates.checkpoints import compare_configs

from rlctl.contract.errors import Reason
from rlctl.weights.checkpoint.allowed_roots import Roots
from rlctl.weights.checkpoint.checkpoint import CONFIG, STEM, Checkpoint, compare, open_files, read_config
from rlctl.weights.checkpoint.load_formats import STANDARD
from rlctl.weights.tensor.digest import tensor_digest
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes

_STEMS = ("diffusion_pytorch_model", STEM)
"""Stems of a module's files in diffusers and transformers."""


@dataclass(frozen=True)
class Sums:
    """Content of a module in the form of its files.

    Attributes:
        live: the server's checksum of the module, hex.
        digests: rlctl's digest of each tensor, hex, by the tensor's name.
        files: the files, for a later check of changes.
    """

    live: str
    digests: Mapping[str, str]
    files: Checkpoint


class Pipelines:
    """The checkpoints of one server.

    Attributes:
        path: the checkpoint of the server's start.
        reference: tensors of that checkpoint, by module.
    """

    def __init__(self, path: str, allowed_roots: tuple[str, ...]) -> None:
        """Raises CHECKPOINT_NOT_FOUND, CHECKPOINT_MISMATCH."""
        self.path = path
        self._roots = Roots.around(path, allowed_roots)
        self._configs: dict[str, Mapping[str, Any]] = {}
        self._known: dict[str, Sums] = {}
        self._first: dict[str, Sums] = {}
        self.reference: dict[str, Mapping[str, TensorMeta]] = {}
        read_config(path, name="model_index.json")
        for directory in sorted(entry for entry in Path(path).iterdir() if any(entry.glob("*.safetensors"))):
            module = _open(directory)
            module.close()
            self._configs[directory.name] = module.config
            self.reference[directory.name] = module.metas

    @contextmanager
    def opened(self, path: str, load_format: str, modules: Collection[str]) -> Iterator[Mapping[str, Checkpoint]]:
        """Open modules of a checkpoint that the server can load, inside the context.

        Raises PATH_NOT_ALLOWED, UNSUPPORTED, CHECKPOINT_NOT_FOUND, CHECKPOINT_MISMATCH.
        """
        if load_format not in STANDARD:
            raise Reason.UNSUPPORTED.error(
                f"SGLang-Diffusion reads safetensors only, not {load_format!r}", field="load_format"
            )
        resolved = Path(self._roots.resolve_checkpoint(path, field="model_path"))
        checkpoints = {}
        with ExitStack() as stack:
            for name in modules:
                directory = resolved / name
                self._roots.resolve_checkpoint(str(directory), field="model_path")
                module = _open(directory)
                stack.callback(module.close)
                self._compare(name, module)
                checkpoints[name] = module
            yield checkpoints

    def sums(self, name: str, module: Checkpoint, until: float) -> Sums:
        """Return the server's content after the load of a module. Files that were read already are not read again.

        ``until``: deadline on ``time.monotonic``. Raises DEADLINE_EXCEEDED, CHECKPOINT_NOT_FOUND.
        """
        cached = self._known.get(module.path)
        if cached is not None and cached.files.same_files(module):
            return cached
        sha256, digests = hashlib.sha256(), {}
        for tensor_name in sorted(module.metas):
            if time.monotonic() > until:
                raise Reason.DEADLINE_EXCEEDED.error(f"{module.path} could not be read in time", field="model_path")
            tensor = module.read(tensor_name)
            sha256.update(tensor_name.encode())
            sha256.update(as_bytes(tensor).numpy().data)
            digests[f"{name}.{tensor_name}"] = tensor_digest(f"{name}.{tensor_name}", tensor)
        sums = Sums(sha256.hexdigest(), digests, module)
        # Of each module only the latest content is needed again.
        self._known = {path: module_sums for path, module_sums in self._known.items() if Path(path).name != name} | {
            module.path: sums
        }
        self._first.setdefault(name, sums)
        return sums

    def refuse_other(self, path: str, module: str, until: float) -> None:
        """Raise CHECKPOINT_MISMATCH if a checkpoint has a different content for a module that is never loaded.

        A checkpoint without the module passes. ``until``: see :meth:`sums`.
        """
        if not (Path(path) / module).exists():
            return
        with self.opened(path, "", [module]) as checkpoints:
            if self.sums(module, checkpoints[module], until).digests != self._first[module].digests:
                raise Reason.CHECKPOINT_MISMATCH.error(
                    f"{module} of {path} differs from that of {self.path}, and the server's copy cannot be "
                    "compared with files, so it is never loaded",
                    field="model_path",
                    next_step="Name the modules to be loaded with target_modules.",
                )

    def _compare(self, name: str, module: Checkpoint) -> None:
        reference = self.reference[name]
        compare(module.metas, reference, what=f"the checkpoint {module.path}")
        cast = [
            tensor_name
            for tensor_name, meta in sorted(reference.items())
            if module.metas[tensor_name].dtype != meta.dtype
        ]
        if cast:
            raise Reason.CHECKPOINT_MISMATCH.error(
                f"{module.path} holds {cast[0]} as {module.metas[cast[0]].dtype}, not {reference[cast[0]].dtype}: what "
                "the server would make of it could not be compared",
                field="model_path",
            )
        if module.config:
            compare_configs(module.path, module.config, self._configs[name])


def _open(directory: Path) -> Checkpoint:
    field = "model_path"
    stems = [stem for stem in _STEMS if any(directory.glob(f"{stem}.safetensors*"))]
    stem = stems[0] if stems else _STEMS[0]
    files = open_files(str(directory), field=field, stem=stem)
    config = read_config(str(directory), field=field) if (directory / CONFIG).exists() else {}
    return Checkpoint(str(directory), config, files, field=field, stem=stem)

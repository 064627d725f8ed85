"""LoRA adapters over vLLM's own LoRA.

vLLM reads an adapter's files again with the next request for the adapter, whenever its workers have forgotten the
adapter: after every update of the base weights (``reset_lora_state`` in its ``v1/worker/lora_model_runner_mixin.py``),
and when more adapters are in use than ``--max-cpu-loras``. Files that have changed by then would serve under the old
name, and missing files end the server. So vLLM reads copies that belong to rlctl.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlctl_servers.adapters import adapters
from rlctl_servers.adapters.adapters import LAYERS, Fitting, LoraLimits
from rlctl_servers.adapters.lora_table import LoraTable, is_from_rlctl
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.admin_calls import Control
from rlctl_servers.updates.checkpoints import Checkpoints, digest_of

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.os_errors import exhausted
from rlctl.engine import Call
from rlctl.v1.verbs_pb2 import AdapterConfig
from rlctl.weights.formats import lora
from rlctl_vllm.options import PRODUCT

UNLOAD_S = 10.0

COPIES = "rlctl-adapters-"
"""Beginning of the names of the copies' directories."""

KEPT_S = 60.0
"""Seconds that a copy outlives its name, because vLLM may still be ending requests with the adapter."""


class Adapters(adapters.Adapters):
    """The adapters of a vLLM server."""

    def __init__(
        self,
        control: Control,
        checkpoints: Checkpoints,
        requests: Requests,
        table: LoraTable,
        config: Mapping[str, Any] | None,
        place: Path | None,
    ) -> None:
        """``config``: vLLM's ``lora_config``; None for a server without adapters.

        ``place``: directory for copies, removed with the server; None for a server that may outlive this process and
        still read the copies.
        """
        super().__init__(PRODUCT, checkpoints, requests, table, limits_of(config or {}))
        self._control = control
        self._place = place
        self._paths: dict[str, Path] = {}
        self._useless: dict[Path, float] = {}
        """Copies without a name at vLLM, with the time of the unload."""

    def close(self, *, busy: bool = False) -> None:
        """Remove the copies that vLLM does not need.

        An attached server ends if it finds no files. It may need those of its names, and while it is ``busy`` with
        requests also those of names that are gone.
        """
        super().close()
        useless = [] if busy else list(self._useless)
        for path in [*useless, *(self._paths.values() if self._place is not None else ())]:
            shutil.rmtree(path, ignore_errors=True)

    async def take_over(self, call: Call) -> None:
        """Unload the adapters of an earlier stage server. Their copies are then removed like the own copies."""
        for name, root in (await self._registered_at(call)).items():
            if is_from_rlctl(name) and root.name.startswith(COPIES) and root.parent == Path(tempfile.gettempdir()):
                self._paths[name] = root
        await super().take_over(call)

    @property
    def stuck(self) -> bool:
        """Whether a pause keeps requests from ending: never, at vLLM."""
        return False

    async def read(self, name: str, fitting: Fitting, pinned: bool, call: Call) -> None:
        """Let vLLM read a copy of the fitting files, under a name."""
        if pinned:
            raise Reason.UNSUPPORTED.error(
                "vLLM keeps only the adapters used last, and reads the others again on request",
                field="pinned",
                next_step="Start vLLM with a place for every adapter: --option max_cpu_loras=N.",
            )
        copy = await asyncio.to_thread(self._copy, fitting)
        if name in self._paths:
            self._useless[self._paths[name]] = time.monotonic()
        self._paths[name] = copy
        body = {"lora_name": name, "lora_path": str(self._paths[name])}
        await self._control.must("/v1/load_lora_adapter", body, call=call, admin=False)

    async def unload(self, name: str) -> bool:
        """Let vLLM forget a name. An unknown name is a success too."""
        now = time.monotonic()
        for path in [path for path, since in self._useless.items() if now - since > KEPT_S]:
            del self._useless[path]  # before the wait: several unloads may run
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        try:
            await self._control.http.call(
                "/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=UNLOAD_S, admin=False
            )
        except (TimeoutError, RlctlError):
            return False
        if name in self._paths:
            self._useless[self._paths.pop(name)] = now
        return True

    async def registered(self, call: Call) -> set[str]:
        return set(await self._registered_at(call))

    def refuse(self, config: AdapterConfig, modules: Collection[str], field: str) -> None:
        """Refuse nothing: vLLM takes all of the layers, and scales as PEFT does."""

    async def _registered_at(self, call: Call) -> dict[str, Path]:
        models = await self._control.ask("/v1/models", call=call, admin=False)
        return {str(card["id"]): Path(card["root"]) for card in models["data"] if card.get("parent")}

    def _copy(self, fitting: Fitting) -> Path:
        """Return a copy of the checked tensors, with the checked config as PEFT writes it.

        Raises CHECKPOINT_NOT_FOUND, DISK_FULL, TOO_MANY_FILES.
        """
        copy: Path | None = None
        try:
            copy = Path(tempfile.mkdtemp(dir=self._place, prefix=COPIES))
            (copy / lora.CONFIG).write_text(json.dumps(lora.to_peft(fitting.config)))
            shutil.copyfile(Path(fitting.path) / lora.TENSORS, copy / lora.TENSORS)
            _, stored = lora.open_adapter(str(copy))
            try:
                if digest_of(stored) != fitting.digest:
                    raise Reason.CHECKPOINT_NOT_FOUND.error(
                        f"{fitting.path} was changed while it was read", field="path"
                    )
            finally:
                stored.close()
        except BaseException as error:
            if copy is not None:
                shutil.rmtree(copy, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            action = f"{fitting.path} cannot be copied to {self._place or tempfile.gettempdir()}"
            lack = exhausted(error, action, "path")
            raise lack or Reason.CHECKPOINT_NOT_FOUND.error(f"{action}: {error}", field="path") from error
        return copy


def limits_of(config: Mapping[str, Any]) -> LoraLimits:
    """Return the limits of the server. The number of adapters is unlimited, because vLLM reads forgotten adapters
    again.
    """
    targets = config.get("target_modules")
    return LoraLimits(
        rank=int(config.get("max_lora_rank") or 0),
        targets=LAYERS if targets is None else LAYERS & set(targets),
        most=0,
    )

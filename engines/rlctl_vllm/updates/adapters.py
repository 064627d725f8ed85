"""LoRA adapters over vLLM's own LoRA.

vLLM reads an adapter's files again with the next request for the adapter, whenever its workers have forgotten the
adapter: after every update of the base weights (``reset_lora_state`` in its ``v1/worker/lora_model_runner_mixin.py``),
and when more adapters are in use than ``--max-cpu-loras``. Files that have changed by then would serve under the old
name, and missing files end the server. So vLLM reads copies that belong to rlctl.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl_servers.adapters import adapters
from rlctl_servers.adapters.adapters import LAYERS, Fitting, LoraLimits
from rlctl_servers.adapters.lora_table import LoraTable, is_from_rlctl
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.admin_calls import Control
from rlctl_servers.server.claim import place_id
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
"""Seconds that a copy outlives its name at least, because vLLM may still be ending requests with the adapter."""

AGAIN_S = 5.0
"""Seconds between two looks that show that no request needs a copy. vLLM's metrics are late until its next step."""

METRICS_S = 5.0

_COUNTS = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")

_NAME = "rlctl-name"
"""File of a copy with its name at vLLM."""


@dataclass
class Useless:
    """A copy without a name at vLLM.

    Attributes:
        name: the former name.
        since: time of the unload.
        free_since: time of the first look at which no request needed the copy; None: a request may need the copy.
    """

    name: str
    since: float
    free_since: float | None = None


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
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """``config``: vLLM's ``lora_config``; None for a server without adapters.

        ``place``: directory for copies, removed with the server; None for a server that may outlive this process and
        still read the copies. ``stopped``: whether vLLM is paused.
        """
        super().__init__(PRODUCT, checkpoints, requests, table, limits_of(config or {}))
        self._control = control
        self._place = place
        self._paths: dict[str, Path] = {}
        self._useless: dict[Path, Useless] = {}
        self._stopped = stopped
        self._prefix = COPIES if place is not None else f"{COPIES}{place_id(control.http.url)}-"

    def close(self, *, busy: bool = False, gone: bool = False) -> None:
        """Remove the copies that vLLM does not need.

        An attached server ends if it finds no files. Unless it is ``gone``, it may need those of its names, and while
        it is ``busy`` with requests also those of names that are gone.
        """
        super().close()
        useless = [] if busy else list(self._useless)
        for path in [*useless, *(self._paths.values() if gone or self._place is not None else ())]:
            shutil.rmtree(path, ignore_errors=True)

    async def take_over(self, call: Call) -> None:
        """Unload the adapters of an earlier stage server. Their copies are then removed like the own copies.

        So are copies of earlier stage servers without a name at vLLM. They may be those of an ended vLLM.
        """
        for name, root in (await self._registered_at(call)).items():
            if is_from_rlctl(name) and root.name.startswith(COPIES) and root.parent == Path(tempfile.gettempdir()):
                self._paths[name] = root
        now = time.monotonic()
        for copy, name, age_s in await asyncio.to_thread(self._copies):
            if copy not in self._paths.values():
                self._useless[copy] = Useless(name, now - age_s)
        await super().take_over(call)
        await self._remove_useless()

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
        copy = await asyncio.to_thread(self._copy, fitting, name)
        if name in self._paths:
            self._useless[self._paths[name]] = Useless(name, time.monotonic())
        self._paths[name] = copy
        body = {"lora_name": name, "lora_path": str(self._paths[name])}
        await self._control.must("/v1/load_lora_adapter", body, call=call, admin=False)

    async def unload(self, name: str) -> bool:
        """Let vLLM forget a name. An unknown name is a success too."""
        await self._remove_useless()
        try:
            await self._control.http.call(
                "/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=UNLOAD_S, admin=False
            )
        except (TimeoutError, RlctlError):
            return False
        if name in self._paths:
            self._useless[self._paths.pop(name)] = Useless(name, time.monotonic())
        return True

    async def _remove_useless(self) -> None:
        """Remove copies after KEPT_S. Those for an attached vLLM stay as long as one of its requests may need them."""
        now = time.monotonic()
        overdue = {path: copy for path, copy in self._useless.items() if now - copy.since > KEPT_S}
        if not overdue:
            return
        waited_for = await self._waited_for() if self._place is None else ""
        for path, copy in overdue.items():
            needed = self._place is None and self._may_be_needed(copy, waited_for, now)
            if not needed and self._useless.pop(path, None) is not None:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    def _may_be_needed(self, copy: Useless, waited_for: str | None, now: float) -> bool:
        if waited_for is None or _label(copy.name) in waited_for or self._stopped():
            copy.free_since = None
            return True
        copy.free_since = now if copy.free_since is None else copy.free_since
        return now - copy.free_since <= AGAIN_S

    async def _waited_for(self) -> str | None:
        """Return a text with the adapters that requests at vLLM have; None if it is not known."""
        try:
            answer = await self._control.http.call("/metrics", timeout_s=METRICS_S, admin=False)
        except (TimeoutError, RlctlError):
            return None
        return adapters_of_requests(str(answer.body)) if answer.ok else None

    def _copies(self) -> list[tuple[Path, str, float]]:
        """Return the copies of this process's user for this server, with their names and ages in seconds."""
        if self._place is not None:
            return []
        copies = []
        for copy in Path(tempfile.gettempdir()).glob(f"{self._prefix}*"):
            with contextlib.suppress(OSError):
                if copy.stat().st_uid == os.getuid():
                    copies.append((copy, (copy / _NAME).read_text(), time.time() - copy.stat().st_mtime))
        return copies

    async def registered(self, call: Call) -> set[str]:
        return set(await self._registered_at(call))

    def refuse(self, config: AdapterConfig, modules: Collection[str], field: str) -> None:
        """Refuse nothing: vLLM takes all of the layers, and scales as PEFT does."""

    async def _registered_at(self, call: Call) -> dict[str, Path]:
        models = await self._control.ask("/v1/models", call=call, admin=False)
        return {str(card["id"]): Path(card["root"]) for card in models["data"] if card.get("parent")}

    def _copy(self, fitting: Fitting, name: str) -> Path:
        """Return a copy of the checked tensors, with the checked config as PEFT writes it.

        Raises CHECKPOINT_NOT_FOUND, DISK_FULL, TOO_MANY_FILES.
        """
        copy: Path | None = None
        try:
            copy = Path(tempfile.mkdtemp(dir=self._place, prefix=self._prefix))
            (copy / _NAME).write_text(name)
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


def adapters_of_requests(metrics: str) -> str | None:
    """Return a text with the adapters of vLLM's running and waiting requests, from its Prometheus text.

    "" without any request; None if it is not known, for example of several engines in one server.
    """
    counts = [line for line in metrics.splitlines() if line.startswith(_COUNTS)]
    if counts and not any(float(line.rpartition(" ")[2]) for line in counts):
        return ""
    if len(counts) != len(_COUNTS):
        return None
    # The value is the time at which the labels were true.
    users = [line for line in metrics.splitlines() if line.startswith("vllm:lora_requests_info{")]
    return max(users, key=lambda line: float(line.rpartition(" ")[2]), default=None)


def _label(name: str) -> str:
    """Return a name as Prometheus writes it."""
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


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

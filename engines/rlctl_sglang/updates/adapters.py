"""LoRA adapters over SGLang's own LoRA."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from rlctl_servers.adapters import adapters
from rlctl_servers.adapters.adapters import LAYERS, Fitting, LoraLimits
from rlctl_servers.adapters.lora_table import LoraTable
from rlctl_servers.ranks import adapter_files
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.admin_calls import Control
from rlctl_servers.updates.checkpoints import Checkpoints

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.verbs_pb2 import AdapterConfig
from rlctl_sglang.server.process import PRODUCT
from rlctl_sglang.state import State
from rlctl_sglang.updates.rank_calls import Ranks

_FUSED = (
    (("q_proj", "k_proj", "v_proj"), ({"q_proj", "v_proj"}, {"q_proj", "k_proj", "v_proj"})),
    (("gate_proj", "up_proj"), ({"gate_proj"}, {"gate_proj", "up_proj"})),
)
"""Layers that SGLang fuses, with the combinations that SGLang can put together. Other combinations fail, or are dropped
silently (``normalize_qkv_proj`` and ``normalize_gate_up_proj`` in ``srt/lora/lora.py``).
"""

UNLOAD_S = 10.0
"""Seconds that a sweep waits for an unload."""

WAIT_S = 3600.0
"""Longest time of an unload at SGLang, in seconds: longer than any request."""


class Adapters(adapters.Adapters):
    """The adapters of one SGLang server."""

    def __init__(
        self,
        control: Control,
        state: State,
        checkpoints: Checkpoints,
        requests: Requests,
        table: LoraTable,
        info: Mapping[str, Any],
        ranks: Ranks | None,
        *,
        elsewhere: bool = False,
    ) -> None:
        """``info``: /server_info; ``ranks``: None for a server of one rank without rlctl's plug-in.

        ``elsewhere``: a rank is not on this host, and may find other files at a path.
        """
        super().__init__(PRODUCT, checkpoints, requests, table, limits_of(info))
        self._control = control
        self._ranks = ranks
        self._elsewhere = elsewhere
        self._state = state
        self._unloads: dict[str, asyncio.Task[bool]] = {}
        """Unloads without an answer: SGLang waits for the requests with the adapter, and loads no other meanwhile."""

    def close(self) -> None:
        super().close()
        for task in self._unloads.values():
            task.cancel()

    @property
    def stuck(self) -> bool:
        """Return whether SGLang is paused. SGLang unloads an adapter after its requests, and a pause holds requests."""
        return self._state.stopped

    async def read(self, name: str, fitting: Fitting, pinned: bool, call: Call) -> None:
        body = {"lora_name": name, "lora_path": fitting.path, "pinned": pinned}
        if self._unloads:
            raise Reason.ACTIVE_REQUESTS.error(
                f"SGLang first unloads {', '.join(self._unloads)}, and waits for requests of other clients with them",
                next_step="Wait for these requests, or end them at SGLang.",
            )
        if self._ranks is not None and self._elsewhere:
            await self._refuse_others(fitting.path, self._ranks, call)
        await self._control.must("/load_lora_adapter", body, call=call)
        if self._ranks is not None:
            await self._refuse_partial(name, self._ranks, call)
            if self._elsewhere:
                await self._refuse_others(fitting.path, self._ranks, call)

    async def _refuse_others(self, path: str, ranks: Ranks, call: Call) -> None:
        """Raise CHECKPOINT_MISMATCH if a rank finds other files at the path than this host has."""
        here = await asyncio.to_thread(adapter_files.report, path)
        others = [rank for rank, files in enumerate(await ranks.adapter_files(path, call)) if files != here]
        if others:
            raise Reason.CHECKPOINT_MISMATCH.error(
                f"the host of rank {', '.join(map(str, others))} has another adapter at {path}",
                field="path",
                next_step="Copy the adapter to every node of the server, or use a directory that all share.",
            )

    async def _refuse_partial(self, name: str, ranks: Ranks, call: Call) -> None:
        """Raise ENGINE_FAILED if a rank has not loaded the adapter. SGLang answers a load once rank 0 has loaded it.

        Each rank carries out its calls in order, so its answer comes after its load, and the files may be removed then.
        """
        missing = [rank for rank, names in enumerate(await ranks.adapters(call)) if name not in names]
        if missing:
            raise Reason.ENGINE_FAILED.error(
                f"SGLang has loaded the adapter at other ranks, but not at rank {', '.join(map(str, missing))}",
                next_step="Check that every node of the server can read the adapter's files, then load it again.",
            )

    async def unload(self, name: str) -> bool:
        """Unload a name at SGLang, or wait for an unload that began earlier. An unknown name counts as unloaded."""
        task = self._unloads.get(name)
        if task is None:
            task = self._unloads[name] = asyncio.create_task(self._unload(name))
            task.add_done_callback(lambda _: self._unloads.pop(name))
        await asyncio.wait([task], timeout=UNLOAD_S)
        return task.done() and task.result()

    async def _unload(self, name: str) -> bool:
        try:
            await self._control.http.call("/unload_lora_adapter", {"lora_name": name}, timeout_s=WAIT_S)
        except (TimeoutError, RlctlError):
            return False
        return True

    async def registered(self, call: Call) -> set[str]:
        models = await self._control.ask("/v1/models", call=call, admin=False)
        return {str(card["id"]) for card in models["data"] if card.get("parent")}

    async def loaded(self, call: Call) -> set[str]:
        ranks = await self._ranks.adapters(call) if self._ranks is not None else []
        return (await self.registered(call)).union(*ranks)

    def refuse(self, config: AdapterConfig, modules: Collection[str], field: str) -> None:
        """Raise UNSUPPORTED for an adapter that SGLang scales differently, or cannot put together."""
        if config.rslora:
            raise Reason.UNSUPPORTED.error("SGLang scales by the rank, not by its root: use_rslora is set", field=field)
        _refuse_parts(modules, field)


def limits_of(info: Mapping[str, Any]) -> LoraLimits:
    """Return the LoRA limits of a server from its /server_info."""
    targets = set(info.get("lora_target_modules") or ())
    return LoraLimits(
        rank=int(info.get("max_lora_rank") or 0),
        targets=LAYERS if "all" in targets else targets & LAYERS,
        most=int(info.get("max_loaded_loras") or 0),
    )


def _refuse_parts(modules: Collection[str], field: str) -> None:
    """Raise UNSUPPORTED for an adapter that adds to parts of fused layers that SGLang cannot put together."""
    for parts, complete in _FUSED:
        parts_by_layer: dict[str, set[str]] = {}
        for module in modules:
            layer, _, last = module.rpartition(".")
            if last in parts:
                parts_by_layer.setdefault(layer, set()).add(last)
        for layer, present in parts_by_layer.items():
            if present not in complete or present != next(iter(parts_by_layer.values())):
                alternatives = " or ".join(", ".join(sorted(alternative)) for alternative in complete)
                raise Reason.UNSUPPORTED.error(
                    f"the adapter has {', '.join(sorted(present))} of {layer}; "
                    f"SGLang takes {alternatives}, the same in every layer",
                    field=field,
                    next_step="Give the layers that are missing matrices of zeros.",
                )

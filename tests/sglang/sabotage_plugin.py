"""A plug-in of SGLang's for tests: a rank acknowledges an update and does something else.

The environment variable SABOTAGE names a file with orders, ``KIND:NAME,...@RANK``: ``drop`` (a tensor is not placed),
``stale`` (none is), ``swap`` (two tensors change places), ``flip`` (a bit of a tensor changes after the commit),
``flip-shadow`` (a bit of a shadow copy changes after the seal), ``late-adapter`` (an adapter is loaded a second later),
``no-adapter`` (it is not loaded), ``other-host:FROM=TO`` (the rank is on a host that has at FROM what TO has here),
``late-memory`` (a release or resume of memory ends a second later, and leaves the file "memory" beside the orders). By
``stale-decode`` decode steps of all ranks compute with weights of the server's start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def register() -> None:
    """Put the sabotage around rlctl's code in this rank."""
    import msgspec
    import torch
    from rlctl_servers.ranks import adapter_files, rank, sabotage
    from rlctl_servers.ranks.model import MemoryMap
    from rlctl_servers.ranks.staged_update import StagedUpdate
    from rlctl_sglang.ranks.model import SGLangModel
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import get_parallel

    report, host_id = adapter_files.report, rank.host_id
    seal, stale_decode = StagedUpdate.seal, sabotage.for_decode
    place, finalize, now = MemoryMap.place, SGLangModel.finalize_load, Path(os.environ["SABOTAGE"])

    def told() -> str:
        return now.read_text() if now.exists() else ""

    def orders(rank: int) -> tuple[str, list[str]]:
        kind, _, rest = told().partition(":")
        names, _, at = rest.rpartition("@")
        return (kind, names.split(",")) if at == str(rank) else ("", [])

    def placing(self: Any, name: str, full: torch.Tensor) -> None:
        kind, names = orders(self._model.rank)
        if kind == "stale" or (kind == "drop" and name in names):
            return
        if kind == "swap" and name in names:
            name = names[1 - names.index(name)]
        place(self, name, full)

    def finishing(self: Any, load: Any) -> None:
        finalize(self, load)
        kind, names = orders(self.rank)
        if kind == "flip":
            self._layout.bind(self._parameters())[names[0]].local.view(torch.int32)[-1, -1] ^= 1

    def sealing(self: Any) -> Any:
        report = seal(self)
        kind, names = orders(self._model.rank)
        if kind == "flip-shadow":
            self._shadow.shards.shards[names[0]].local.view(torch.int32)[-1, -1] ^= 1
        return report

    def for_decode(module: torch.nn.Module, decodes: Callable[..., bool]) -> None:
        os.environ[sabotage.VARIABLE] = "stale-decode"
        stale_decode(module, lambda *args, **kwargs: told() == "stale-decode" and decodes(*args, **kwargs))

    def reading(load: Callable[..., None], *args: Any) -> None:
        kind, _ = orders(get_parallel().tp_rank)
        if kind == "late-adapter":
            time.sleep(1)
        if kind == "no-adapter":
            raise OSError("no such file, as the test wants it")
        load(*args)

    def at_host(path: str) -> str:
        kind, names = orders(torch.distributed.get_rank())  # also on the thread in the background
        there, _, here = names[0].partition("=") if kind == "other-host" else ("", "", "")
        return here if path == there else path

    def loading(load: Callable[..., Any], self: Any, lora_ref: Any) -> Any:
        return load(self, msgspec.structs.replace(lora_ref, lora_path=at_host(lora_ref.lora_path)))

    def host() -> str:
        return "elsewhere" if orders(get_parallel().tp_rank)[0] == "other-host" else host_id()

    def remembering(act: Callable[..., Any], *args: Any) -> Any:
        output = act(*args)
        kind, _ = orders(get_parallel().tp_rank)
        if kind == "late-memory":
            time.sleep(1)
            now.with_name("memory").touch()
        return output

    HookRegistry.register("sglang.srt.lora.lora_manager.LoRAManager.load_lora_weights", reading, HookType.AROUND)
    HookRegistry.register("sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter", loading, HookType.AROUND)
    manager = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    for method in ("release_memory_occupation", "resume_memory_occupation"):
        HookRegistry.register(f"{manager}.{method}", remembering, HookType.AROUND)
    rank.host_id, adapter_files.report = host, lambda path: report(at_host(path))
    sabotage.for_decode = for_decode
    StagedUpdate.seal = sealing  # type: ignore[method-assign]
    MemoryMap.place, SGLangModel.finalize_load = placing, finishing  # type: ignore[method-assign]
    MemoryMap.full_in_place = lambda self, name: None  # type: ignore[method-assign]


def environment(place: Path) -> dict[str, str]:
    """Make the plug-in known to a server; ``place``: a directory for it, whose file "now" has the orders."""
    information = place / "sabotage-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: sabotage\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[sglang.srt.plugins]\nsabotage = sabotage_plugin:register\n")
    (place / "sabotage_plugin.py").write_text(Path(__file__).read_text())
    paths = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": paths, "SABOTAGE": str(place / "now")}

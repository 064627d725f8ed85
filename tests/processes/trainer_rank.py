"""One rank of a distributed trainer, as a process of its own: `python trainer_rank.py SETTINGS` (JSON).

Layouts: "pp-tp" (two pipeline stages of two ranks, which share rows of tensors and experts; each stage a source;
gathers over gloo) and "fsdp" (fully_shard over all ranks, rank 0 the source). Prints one JSON object for every update.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import trainer_models
from with_nccl import stand_in_at_a_source

import rlctl
from rlctl.trainer import publisher as publishing
from rlctl.weights.tensor.finite import local_values
from rlctl.weights.tensor.source import as_source
from rlctl.weights.tensor.tensors import TensorMeta

BUCKET_BYTES = 16 << 10
"""Small, so that what happens half way happens between two broadcasts."""


def rows_of(name: str) -> bool:
    """Whether tensor parallelism cuts this parameter's rows (the others are whole at every rank)."""
    return any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed", "lm_head"))


def expert_of(name: str) -> int | None:
    """Which expert a tensor belongs to, if any."""
    _, found, rest = name.partition(".experts.")
    return int(rest.partition(".")[0]) if found else None


class StageSource:
    """What one pipeline stage holds, shared out over its ranks; iterating gathers over the stage's group.

    Every rank has its rows of the tensors that are cut, half of the experts, and whole what is neither.
    """

    def __init__(
        self, model: Any, stage: int, group: dist.ProcessGroup, happens: Callable[[], None] | None = None
    ) -> None:
        """``happens``: called half way through the first pass."""
        named = list(as_source(model).tensors())
        half = len(named) // 2
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._happens = happens
        own = named[:half] if stage == 0 else named[half:]
        self._metas = [TensorMeta.of(name, tensor) for name, tensor in own]
        parts = {name: self._part(name, tensor) for name, tensor in own}
        self._local = {name: part.clone() for name, part in parts.items() if part is not None}

    def _part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        expert = expert_of(name)
        if expert is not None:
            return tensor if expert % self._size == self._rank else None
        return tensor.chunk(self._size, 0)[self._rank] if rows_of(name) else tensor

    def metas(self) -> list[TensorMeta]:
        return self._metas

    def local(self) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        return (((name,), part) for name, part in self._local.items())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, meta in enumerate(self._metas):
            if index == len(self._metas) // 2 and self._happens is not None:
                happens, self._happens = self._happens, None
                happens()
            yield meta.name, self._gathered(meta)

    def _gathered(self, meta: TensorMeta) -> torch.Tensor:
        expert, local = expert_of(meta.name), self._local.get(meta.name)
        if expert is not None:
            whole = torch.empty(meta.shape, dtype=meta.dtype) if local is None else local
            dist.broadcast(whole, group=self._group, group_src=expert % self._size)
            return whole
        assert local is not None
        if not rows_of(meta.name):
            return local
        parts = [torch.empty_like(local) for _ in range(self._size)]
        dist.all_gather(parts, local, group=self._group)
        return torch.cat(parts)


class Gathering:
    """A model's weights, which nobody can look at before they are gathered."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._source = as_source(model)
        self.parameters = model.parameters

    def metas(self) -> list[TensorMeta]:
        return self._source.metas()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._source.tensors()


class Interrupted:
    """A model's weights, in the middle of which something happens."""

    def __init__(self, model: torch.nn.Module, happens: Callable[[], object]) -> None:
        self._source = as_source(model)
        self._happens = happens

    def metas(self) -> list[TensorMeta]:
        return self._source.metas()

    def local(self) -> Any:
        return local_values(self._source)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, named in enumerate(self._source.tensors()):
            if index == len(self.metas()) // 2:
                self._happens()
            yield named


def weights_of(settings: dict[str, Any], seed: int, stage_group: dist.ProcessGroup | None) -> Any:
    model = trainer_models.make(settings["model"], seed)
    rank, last = dist.get_rank(), seed == settings["seeds"][-1]
    victim = os.getpid() if rank == settings.get("dies") else settings.get("kills") if rank == 0 else None
    happens = functools.partial(os.kill, victim, signal.SIGKILL) if last and victim is not None else None
    if settings["layout"] == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        if last and rank == settings.get("diverges"):
            with torch.no_grad():
                model.model.norm.weight.to_local()[-1] = float("nan")
        if settings.get("gathers"):
            return Gathering(model)
        return model if happens is None else Interrupted(model, happens)
    assert stage_group is not None
    if last and rank == settings.get("diverges"):
        source = StageSource(model, rank // 2, stage_group)
        next(reversed(source._local.values())).view(-1)[-1] = float("nan")
        return source
    if last and rank in settings.get("fails", ()):
        return StageSource(model, rank // 2, stage_group, fail)
    if last and rank == settings.get("stops"):
        return StageSource(model, rank // 2, stage_group, functools.partial(stop_for, settings["stops_s"]))
    return StageSource(model, rank // 2, stage_group, happens)


def fail() -> None:
    """A defect of the trainer's own, which all ranks of a stage have."""
    raise RuntimeError("the gather is wrong")


def stop_for(seconds: float) -> None:
    """Stop this process; another one lets it go on."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def scramble(weights: Any) -> None:
    """What a trainer does as soon as it may: overwrite what was sent."""
    held = weights._local.values() if isinstance(weights, StageSource) else weights.parameters()
    with torch.no_grad():
        for tensor in held:
            tensor.fill_(7.0)


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    publishing.LEASE_TTL_S = settings.get("lease_s", publishing.LEASE_TTL_S)
    if "nccl" in settings.get("backend", ""):
        stand_in_at_a_source()
    rank, size = settings["rank"], settings["size"]
    store = dist.FileStore(settings["store"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    stage_group = None
    if settings["layout"] == "pp-tp":
        for ranks in ([0, 1], [2, 3]):
            made = dist.new_group(ranks)
            stage_group = made if rank in ranks else stage_group
    fleet = rlctl.connect(settings["address"]) if rank == 0 else None
    sources = settings["sources"]
    publisher = rlctl.publisher(
        fleet,
        "actor",
        trainer_group=dist.group.WORLD,
        source=sources.index(rank) if rank in sources else None,
        path=settings.get("path", "broadcast"),
        backend=settings.get("backend", "gloo"),
        bucket_bytes=BUCKET_BYTES,
    )
    version = ""
    for seed in settings["seeds"]:
        base, version = version if seed in settings.get("deltas", ()) else "", f"seed-{seed}"
        started = time.monotonic()
        said: dict[str, Any] = {"rank": rank}
        try:
            weights = weights_of(settings, seed, stage_group)
            pending = publisher.update_async(
                weights,
                version=version,
                base=base,
                deadline_s=settings["deadline_s"],
                **settings.get("options", {}),
            )
            pending.wait_sent()
            scramble(weights)
            result = pending.wait()
            said |= {"digest": result.model_digest, "sent": result.bytes_sent, "sequence": result.version.sequence}
        except rlctl.RlctlError as error:
            said |= {"reason": error.reason.name, "message": str(error)}
        except RuntimeError as error:  # of the trainer's own collectives, which no rank should be left alone with
            said |= {"reason": "untyped", "message": str(error)}
        sys.stdout.write(json.dumps(said | {"elapsed_s": time.monotonic() - started}) + "\n")
        sys.stdout.flush()
    publisher.close()
    if fleet is not None:
        fleet.close()
    # A group of which a rank was killed cannot be taken apart in order.
    os._exit(0)


if __name__ == "__main__":
    main()

"""One rank of a distributed trainer, as a process of its own: `python trainer_rank.py SETTINGS` (JSON).

Layouts: "pp-tp" (two pipeline stages of two tensor-parallel ranks, each stage a source, gathers over gloo) and "fsdp"
(fully_shard over all ranks, rank 0 the source). Prints one JSON object for every update.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import rlctl
from rlctl.client import publisher as publishing
from rlctl.demo import tiny
from rlctl.weights.tensors import TensorMeta


def rows_of(name: str) -> bool:
    """Whether tensor parallelism cuts this parameter's rows (the others are whole at every rank)."""
    return any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed", "lm_head"))


class StageSource:
    """What one pipeline stage holds, cut over its ranks; iterating gathers over the stage's group."""

    def __init__(
        self, model: Any, stage: int, group: dist.ProcessGroup, die_at: int, happens: Callable[[], None] | None = None
    ) -> None:
        """``happens``: called half way through the first pass."""
        named = list(model.named_parameters())
        half = len(named) // 2
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._die_at = die_at
        self._happens = happens
        self._metas = [TensorMeta.of(name, p) for name, p in (named[:half] if stage == 0 else named[half:])]
        whole = {name: parameter.detach() for name, parameter in named}
        self._local = {
            meta.name: self._cut(whole[meta.name]) if rows_of(meta.name) else whole[meta.name] for meta in self._metas
        }

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(self._size, 0)[self._rank].clone()

    def metas(self) -> list[TensorMeta]:
        return self._metas

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, meta in enumerate(self._metas):
            if index == self._die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if index == len(self._metas) // 2 and self._happens is not None:
                happens, self._happens = self._happens, None
                happens()
            local = self._local[meta.name]
            if rows_of(meta.name):
                parts = [torch.empty_like(local) for _ in range(self._size)]
                dist.all_gather(parts, local, group=self._group)
                yield meta.name, torch.cat(parts)
            else:
                yield meta.name, local


def weights_of(settings: dict[str, Any], seed: int, stage_group: dist.ProcessGroup | None) -> Any:
    model = tiny.make(seed=seed)
    rank = dist.get_rank()
    if settings["layout"] == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model
    assert stage_group is not None
    last = seed == settings["seeds"][-1]
    dies = rank == settings.get("dies") and last
    happens = None
    if last and rank == 0 and "kills" in settings:
        happens = functools.partial(os.kill, settings["kills"], signal.SIGKILL)
    return StageSource(model, rank // 2, stage_group, 3 if dies else -1, happens)


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
    )
    for seed in settings["seeds"]:
        started = time.monotonic()
        said: dict[str, Any] = {"rank": rank}
        try:
            weights = weights_of(settings, seed, stage_group)
            pending = publisher.update_async(
                weights,
                version=f"seed-{seed}",
                deadline_s=settings["deadline_s"],
                **settings.get("options", {}),
            )
            pending.wait_sent()
            scramble(weights)
            result = pending.wait()
            said |= {"digest": result.model_digest, "sent": result.bytes_sent, "sequence": result.version.sequence}
        except rlctl.RlctlError as error:
            said |= {"reason": error.reason.name, "message": str(error)}
        except RuntimeError as error:  # of the trainer's own collectives: a rank's own error is raised as it is
            said |= {"reason": "SOURCE_FAILED", "message": str(error)}
        sys.stdout.write(json.dumps(said | {"elapsed_s": time.monotonic() - started}) + "\n")
        sys.stdout.flush()
    publisher.close()
    if fleet is not None:
        fleet.close()
    # A group of which a rank was killed cannot be taken apart in order.
    os._exit(0)


if __name__ == "__main__":
    main()

"""delta, delta_files: what one step of an optimizer changes in bfloat16, as an update with ``base=`` and as files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.weights.versions.publish import BaseVersion, publish_delta, publish_full
from rlctl.weights.versions.pull import pull
from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.rounds import interleaved, median, ratios
from tools.benchmark.weights import fleets
from tools.benchmark.weights.fleets import Running
from tools.benchmark.weights.shapes import ONE_LAYER, Shape

MODEL = Shape(8, 1024, 3072, 16, 8, 128, 32768)
"""160 million parameters, 0.3 GiB: a step of the optimizer takes seconds on two cores."""

LEARNING_RATE = 1e-6
"""A usual one of RL. Ten times as much changes five to seven times as many elements."""

WARM_UP = 5
"""Adam's first steps are larger than the later ones."""

TOKENS = (4, 64)
"""Sequences of a step, and their tokens."""


class Trained:
    """A model in float32 under AdamW, and its weights in bfloat16."""

    def __init__(self, checkpoint: str) -> None:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(checkpoint)
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
        self.changed = 0.0
        self.weights = self._in_bfloat16()
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> None:
        """Take one step. ``changed`` is the share of elements that differ in bfloat16."""
        ids = torch.randint(self._model.config.vocab_size, TOKENS)
        self._optimizer.zero_grad()
        self._model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        before, self.weights = self.weights, self._in_bfloat16()
        count = sum(int((tensor != before[name]).sum()) for name, tensor in self.weights.items())
        self.changed = count / sum(tensor.numel() for tensor in before.values())

    def _in_bfloat16(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().bfloat16() for name, value in self._model.named_parameters()}


@dataclass(frozen=True)
class _Sample:
    """Bytes sent or stored, and seconds."""

    nbytes: int
    total_s: float


@dataclass(frozen=True)
class _World:
    fleet: Running
    trained: Trained


@contextmanager
def _world(setting: Setting) -> Iterator[_World]:
    with fleets.running(setting, ONE_LAYER if setting.quick else MODEL, engines=1) as fleet:
        yield _World(fleet, Trained(fleet.checkpoint))


def _by_group(setting: Setting) -> Reading:
    world = setting.shared(_world)
    label = ""

    def update(*, delta: bool) -> _Sample:
        nonlocal label
        if delta:
            world.trained.step()
        base = label if delta else ""
        weights = list(world.trained.weights.items())
        made = world.fleet.update(weights, verify="expected", digest="sha256", base=base)
        label = made.result.version.label
        return _Sample(made.result.bytes_sent, made.total_s)

    return _compared(setting, world, lambda: update(delta=False), lambda: update(delta=True))


def _by_files(setting: Setting) -> Reading:
    world = setting.shared(_world)
    source, local = setting.directory / "deltas", setting.directory / "deltas-local"
    whole, whole_local = setting.directory / "versions", setting.directory / "versions-local"
    number = 1

    def publish() -> _Sample:
        nonlocal number
        number += 1
        started = time.perf_counter()
        made = publish_full(
            whole, _weights(world), version=f"v{number}", sequence=number, files_from=world.fleet.checkpoint
        )
        pull(str(whole), str(whole_local), f"v{number}")
        return _Sample(_stored(made.path), time.perf_counter() - started)

    def difference() -> _Sample:
        nonlocal number
        number += 1
        world.trained.step()
        started = time.perf_counter()
        made = publish_delta(source, _weights(world), version=f"v{number}", sequence=number, base=BaseVersion(local))
        pull(str(source), str(local), f"v{number}")
        return _Sample(_stored(made.path), time.perf_counter() - started)

    publish_full(source, _weights(world), version="v1", sequence=1, files_from=world.fleet.checkpoint)
    pull(str(source), str(local), "v1")
    return _compared(setting, world, publish, difference)


def _weights(world: _World) -> list[tuple[str, torch.Tensor]]:
    return list(world.trained.weights.items())


def _stored(version: Path) -> int:
    return sum(path.stat().st_size for path in version.glob("*.safetensors"))


def _compared(setting: Setting, world: _World, full: Callable[[], _Sample], delta: Callable[[], _Sample]) -> Reading:
    samples = interleaved(setting.rounds, {"full": full, "delta": delta})
    times = {side: [sample.total_s for sample in taken] for side, taken in samples.items()}
    return Reading.of(
        ratios([sample.nbytes for sample in samples["delta"]], [sample.nbytes for sample in samples["full"]]),
        floor=median(times["full"]) * 1e3,
        floor_unit="ms in full",
        delta_ms=median(times["delta"]) * 1e3,
        time_ratio=ratios(times["delta"], times["full"]).median,
        changed_elements_ratio=world.trained.changed,
    )


BY_GROUP = Figure(
    "delta",
    "bytes of an update verified by SHA-256 with base= after one step of AdamW ÷ of a full update",
    "ratio",
    _by_group,
)
BY_FILES = Figure(
    "delta_files",
    "bytes of a delta published as files (XOR, zstd) after one step of AdamW ÷ of a complete version",
    "ratio",
    _by_files,
)

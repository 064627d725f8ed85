"""Trainer and fleet together: rollouts through the fleet, a gradient step, weights to every engine, checks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from rlctl.contract.errors import RlctlError
from rlctl.demo import tiny
from rlctl.demo.grpo import Rollout, Trainer, rollouts
from rlctl.demo.judge import Judge, Step, Verdict
from rlctl.demo.production import MAX_STALENESS, Production, staleness
from rlctl.demo.task import EVERY, MAX_NEW_TOKENS, Problem, draw
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.rollout.rollout import Asking
from rlctl.sdk.blocking import Fleet
from rlctl.trainer.model_digest import model_digest
from rlctl.trainer.publisher import Publisher
from rlctl.v1.common_pb2 import Evidence, VerificationLevel

_ENGINE_SABOTAGE = {
    "stale-engine": ("actor-1", "stale"),
    "drop-tensor": ("actor-0", "drop-tensor:model.layers.1.mlp.up_proj.weight"),
    "wrong-rank": ("actor-0", "wrong-rank"),
    "stale-decode": ("actor-1", "stale-decode"),
}
SKIPPED_STEP = 2

_LAYOUTS = {"torch": (2, 1), "sglang": (1, 1), "vllm": (1, 1)}
"""Tensor-parallel sizes of the two engines, by default."""

_OPTIONS = {
    "torch": {"max_running": "256", "max_total_tokens": "8192"},
    "sglang": {},
    "vllm": {"max_num_seqs": "256"},
}
"""Options of the engines, by plug-in."""


@dataclass(frozen=True)
class Settings:
    """Settings of a demo run; ``tp_size``: tensor-parallel size of both engines, 0 for the default."""

    seed: int = 0
    warmup_steps: int = 40
    steps: int = 40
    prompts: int = 32
    samples: int = 8
    warmup_learning_rate: float = 2e-3
    learning_rate: float = 1e-4
    engine: str = "torch"
    tp_size: int = 0
    sabotage: str = ""
    mode: str = "sync"


@dataclass(frozen=True)
class Listener:
    """Callbacks for the progress of a run."""

    note: Callable[[str], None]
    step: Callable[[Step], None]


def run(settings: Settings, listener: Listener, directory: Path) -> Verdict:
    """Run the whole demo in ``directory``. Raises RlctlError if the fleet does not start."""
    torch.set_num_threads(1)
    model = tiny.make(settings.seed)
    trainer = Trainer(model, learning_rate=settings.warmup_learning_rate, seed=settings.seed)
    parameters = sum(p.numel() for p in model.parameters())
    listener.note(f"a Llama of {parameters:,} parameters; supervised warm-up of {settings.warmup_steps} steps")
    loss = trainer.supervise(settings.warmup_steps, batch=64)
    listener.note(f"warm-up done, loss {loss:.3f}")
    checkpoint = directory / "checkpoint"
    tiny.save(model, checkpoint)
    local = LaunchedFleet(_engines(settings, checkpoint), directory=directory / "fleet", on_progress=listener.note)
    with local, local.connect() as fleet:
        trainer = Trainer(model, learning_rate=settings.learning_rate, seed=settings.seed)
        return _Loop(settings, listener, fleet, trainer).run()


def _engines(settings: Settings, checkpoint: Path) -> list[EngineSpec]:
    sizes = (settings.tp_size,) * 2 if settings.tp_size else _LAYOUTS[settings.engine]
    slot, value = _ENGINE_SABOTAGE.get(settings.sabotage, ("", ""))
    variable = "RLCTL_TORCH_SABOTAGE" if settings.engine == "torch" else "RLCTL_SERVER_SABOTAGE"
    return [
        EngineSpec(
            name,
            str(checkpoint),
            engine=settings.engine,
            tp_size=tp_size,
            options=_OPTIONS[settings.engine],
            environment={variable: value} if name == slot else {},
        )
        for name, tp_size in zip(("actor-0", "actor-1"), sizes, strict=True)
    ]


class _Loop:
    def __init__(self, settings: Settings, listener: Listener, fleet: Fleet, trainer: Trainer) -> None:
        self._settings = settings
        self._listener = listener
        self._fleet = fleet
        self._trainer = trainer
        self._publisher: Publisher = fleet.publisher("actor", trainer="rlctl demo")
        self._random = random.Random(settings.seed + 1)
        self._sequence = 1
        trainer.remember(self._sequence)
        self._production = Production(
            fleet.rollout("actor"),
            settings.mode,
            settings.prompts,
            lambda count: draw(self._random, count),
            self._asking(),
        )

    def run(self) -> Verdict:
        judge = Judge(MAX_STALENESS[self._settings.mode])
        first = self._evaluate()
        self._listener.note(f"greedy reward on all {len(EVERY)} sums before GRPO: {first:.2f}")
        for number in range(1, self._settings.steps + 1):
            step = Step(number)
            try:
                self._one(step)
            except RlctlError as error:
                step.problem = str(error)
            problem = judge.look(step)
            self._listener.step(step)
            if problem:
                return judge.verdict(first, first)
        self._production.close()
        last = self._evaluate()
        self._publisher.close()
        return judge.verdict(first, last)

    def _one(self, step: Step) -> None:
        started = time.perf_counter()
        batch = self._roll_out(step)
        waited = time.perf_counter()
        step.reward = sum(r.reward for r in batch) / len(batch)
        step.max_logprob_diff = self._trainer.step(batch)
        step.contents = model_digest(self._trainer.model)
        if not (self._settings.sabotage == "skip-sync" and step.step == SKIPPED_STEP):
            update = self._publisher.update(self._trainer.model, version=f"step-{step.step}", decode_check=True)
            step.version = update.version.label
            step.pause_ms = update.pause_s * 1e3
            step.transfer_ms = update.transfer_s * 1e3
            self._sequence = update.version.sequence
            self._trainer.remember(self._sequence, keep=MAX_STALENESS[self._settings.mode] + 1)
            step.verified = {
                result.slot: VerificationLevel.Name(result.verified).removeprefix("VERIFICATION_LEVEL_").lower()
                for result in update.operation.stage_results
            }
        ended = waited if self._settings.mode == "sync" else time.perf_counter()
        step.tokens_per_s = sum(len(r.output) for r in batch) / (ended - started)
        checked = self._fleet.check_weights()
        step.digests = {result.slot: result.rank_results[0].check.model_digest for result in checked.stage_results}
        step.expected = model_digest(self._trainer.model, like=min(step.digests.values(), default=""))
        step.evidence = {
            result.slot: Evidence.Name(result.evidence).removeprefix("EVIDENCE_").lower()
            for result in checked.stage_results
        }

    def _asking(self) -> Asking:
        asking: Asking = {"n": self._settings.samples, "max_new_tokens": MAX_NEW_TOKENS, "temperature": 1.0}
        if self._settings.engine == "torch":
            # SGLang honours seeds only with deterministic inference, which is not available on a CPU.
            asking["seed"] = self._settings.seed * 1_000_003
        return asking

    def _roll_out(self, step: Step) -> list[Rollout]:
        groups = self._production.batch(self._sequence)
        step.staleness = max(staleness(samples, self._sequence) for _, samples in groups)
        step.dropped = self._production.dropped
        return rollouts(groups)

    def _evaluate(self) -> float:
        prompts = [tiny.encode(problem.prompt) for problem in EVERY]
        responses = self._fleet.generate_batch(
            prompts, model="actor", max_new_tokens=MAX_NEW_TOKENS, temperature=0.0, min_version_seq=self._sequence
        )
        return sum(map(_right, EVERY, (response.samples[0].text for response in responses))) / len(EVERY)


def _right(problem: Problem, text: str) -> float:
    return problem.reward(text)

"""Sends inputs in batches, several at a time, and checks the worlds after each batch."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rlctl.runtime import event_loops
from tests.fuzz.oracle import Logs, Resources
from tests.fuzz.targets import Fault, Target
from tests.fuzz.worlds import WORLDS, World

BATCH = 1000
"""Inputs between two checks of the worlds."""

AT_ONCE = 128
"""Inputs under way at a time."""

LIMIT_S = 20.0
"""Longest time of an input. The callers of every input disconnect much earlier."""


@dataclass(frozen=True)
class Found:
    """A fault. ``target`` "": found after the batch of the inputs from ``index`` on."""

    target: str
    index: int
    text: str
    content: str = ""


@dataclass
class Report:
    """Result of a run. ``answers``: counts by target and kind of answer."""

    seed: int
    faults: list[Found] = field(default_factory=list)
    inputs: int = 0
    seconds: float = 0.0
    megabytes: list[int] = field(default_factory=list)
    answers: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, other: Report) -> None:
        """Add the result of another process."""
        self.faults += other.faults
        self.inputs += other.inputs
        self.megabytes += other.megabytes
        for name, counts in other.answers.items():
            self.answers.setdefault(name, Counter()).update(counts)


Progress = Callable[[Report], None]


def run(
    seed: int,
    inputs: range,
    pattern: str = "*",
    *,
    batch: int = BATCH,
    most_faults: int = 20,
    progress: Progress | None = None,
) -> Report:
    """Send inputs to the targets that match a pattern, in turn. ``batch``: inputs between two checks."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="rlctl-fuzz-") as directory, Logs() as logs:
        os.chdir(directory)  # relative paths of inputs
        try:
            return event_loops.run(_Run(seed, pattern, Path(directory), logs, batch, most_faults, progress).run(inputs))
        finally:
            os.chdir(before)


class _Run:
    def __init__(
        self,
        seed: int,
        pattern: str,
        directory: Path,
        logs: Logs,
        batch: int,
        most_faults: int,
        progress: Progress | None,
    ) -> None:
        self._pattern = pattern
        self._directory = directory
        self._logs = logs
        self._batch = batch
        self._most_faults = most_faults
        self._progress = progress
        self._report = Report(seed)
        self._resources = Resources()
        self._worlds: list[World] = []

    async def run(self, inputs: range) -> Report:
        began = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            for name, make in WORLDS.items():
                if fnmatch.fnmatch(name, self._pattern.partition("/")[0]):
                    world = make(self._directory / name)
                    stack.push_async_callback(world.stop)
                    await world.start()
                    self._worlds.append(world)
            if not self._targets():
                raise ValueError(f"no target matches {self._pattern!r}")
            await self._batches(inputs)
        self._report.seconds = time.monotonic() - began
        return self._report

    def _targets(self) -> list[Target]:
        targets = [target for world in self._worlds for target in world.targets]
        matching = (target for target in targets if fnmatch.fnmatchcase(target.name, self._pattern))
        return sorted(matching, key=lambda target: target.name)

    async def _batches(self, inputs: range) -> None:
        for start in range(inputs.start, inputs.stop, self._batch):
            targets = self._targets()
            waiting = iter(range(start, min(start + self._batch, inputs.stop)))
            await asyncio.gather(*(self._send(waiting, targets) for _ in range(AT_ONCE)))
            first = start == inputs.start
            await self._check(start, first=first)
            if first:
                self._resources.begin()
            if start < inputs.start + len(inputs) // 10 + self._batch:
                self._resources.begin_memory()
            self._report.megabytes.append(self._resources.megabytes)
            if self._progress is not None:
                self._progress(self._report)
            if len(self._report.faults) >= self._most_faults:
                break

    async def _send(self, indices: object, targets: list[Target]) -> None:
        for index in indices:  # type: ignore[attr-defined]
            target = targets[index % len(targets)]
            drawn = target.draw(random.Random(f"{self._report.seed}/{target.name}/{index}"))
            try:
                async with asyncio.timeout(LIMIT_S):
                    answer = await target.send(drawn)
            except Fault as fault:
                answer = "FAULT"
                self._report.faults.append(Found(target.name, index, str(fault), drawn.content))
            except TimeoutError:
                answer = "FAULT"
                self._report.faults.append(Found(target.name, index, f"no answer within {LIMIT_S:g} s", drawn.content))
            except Exception as error:  # noqa: BLE001 - an answer that the client cannot read
                answer = "FAULT"
                self._report.faults.append(Found(target.name, index, repr(error), drawn.content))
            self._report.inputs += 1
            self._report.answers.setdefault(target.name, Counter())[answer] += 1

    async def _check(self, start: int, *, first: bool) -> None:
        problems = []
        for world in self._worlds:
            world.forget_connections()
            try:
                await world.check()
            except Fault as fault:
                problems.append(f"{world.name}: {fault}")
        if not first:
            problems += await self._resources.excess()
        problems += dict.fromkeys(self._logs.taken())
        self._report.faults += [Found("", start, problem) for problem in problems]

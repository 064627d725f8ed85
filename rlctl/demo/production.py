"""Groups of samples for the trainer, generated as far ahead as the mode allows."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future

from rlctl.demo import tiny
from rlctl.demo.task import Problem
from rlctl.rollout.rollout import Asking
from rlctl.rollout.sample import RolloutSample
from rlctl.sdk.blocking import Rollout

MODES = ("sync", "one-step-off", "async")
"""Generate, then train · train on samples from the previous step · train on finished samples in any order."""

MAX_STALENESS = {"sync": 0, "one-step-off": 1, "async": 4}
"""Most versions between a sample's oldest token and the trained weights."""

Group = tuple[Problem, list[RolloutSample]]


class Production:
    """Keeps groups in generation and returns finished groups."""

    def __init__(
        self, rollout: Rollout, mode: str, prompts: int, draw: Callable[[int], list[Problem]], asking: Asking
    ) -> None:
        """``prompts``: groups of a batch. ``draw`` returns this many problems. ``asking``: sampling of each group. A
        seed in ``asking`` is the first group's; each further group's seed is larger by one.
        """
        self.dropped = 0
        """Groups so far that had become too old."""
        self._rollout = rollout
        self._mode = mode
        self._prompts = prompts
        self._draw = draw
        self._asking = asking
        self._begun = 0
        self._under_way: dict[Future[list[RolloutSample]], Problem] = {}

    def batch(self, latest: int) -> list[Group]:
        """Return the next groups that are fresh enough for version ``latest``; groups of later batches go on."""
        ready: list[Group] = []
        while len(ready) < self._prompts:
            missing = self._prompts - len(ready)
            ahead = 2 * self._prompts if self._mode == "async" else missing
            self._begin(ahead - len(self._under_way), latest if self._mode == "sync" else 0)
            ready += self._take(missing, latest)
        if self._mode == "one-step-off":
            self._begin(self._prompts, 0)
        return ready

    def close(self) -> None:
        """Cancel all generation."""
        for future in self._under_way:
            future.cancel()
        self._under_way.clear()

    def _begin(self, count: int, min_version: int) -> None:
        for problem in self._draw(count) if count > 0 else ():
            asking = self._asking | {"min_version": min_version}
            if "seed" in asking:
                asking["seed"] += self._begun
            self._begun += 1
            prompt = tiny.encode(problem.prompt)
            work = self._rollout.aio.generate(prompt, **asking)
            self._under_way[self._rollout.loop.submit(work)] = problem

    def _take(self, most: int, latest: int) -> list[Group]:
        """Return the oldest finished groups; outside mode async wait for all groups."""
        condition = concurrent.futures.FIRST_COMPLETED if self._mode == "async" else concurrent.futures.ALL_COMPLETED
        concurrent.futures.wait(self._under_way, return_when=condition)
        done = [future for future in self._under_way if future.done()][:most]
        groups = [(self._under_way.pop(future), future.result()) for future in done]
        fresh = [group for group in groups if staleness(group[1], latest) <= MAX_STALENESS[self._mode]]
        self.dropped += len(groups) - len(fresh)
        return fresh


def staleness(samples: list[RolloutSample], latest: int) -> int:
    """Return the staleness of the oldest token in versions; a token of unknown version counts as older than any."""
    behind = [sample.staleness_at(latest) for sample in samples]
    return max(latest if each is None else each for each in behind)

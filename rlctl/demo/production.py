"""Groups of samples for the trainer, made ahead of it as far as the mode says."""

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
"""Generate, then train · train on what was generated during the step before · take what has finished, whenever."""

MAX_STALENESS = {"sync": 0, "one-step-off": 1, "async": 4}
"""Versions that the oldest token of a sample may be behind the weights that are trained."""

Group = tuple[Problem, list[RolloutSample]]


class Production:
    """Keeps groups in generation and hands them out."""

    def __init__(
        self, rollout: Rollout, mode: str, prompts: int, draw: Callable[[int], list[Problem]], asking: Asking
    ) -> None:
        """``prompts``: groups of a batch. ``draw`` gives so many problems. ``asking``: how each is sampled; a seed in
        it is the first group's, and the next one's is larger by one.
        """
        self.dropped = 0
        """Groups that had become too old, so far."""
        self._rollout = rollout
        self._mode = mode
        self._prompts = prompts
        self._draw = draw
        self._asking = asking
        self._begun = 0
        self._under_way: dict[Future[list[RolloutSample]], Problem] = {}

    def batch(self, latest: int) -> list[Group]:
        """The next groups, none too old beside version number ``latest``; those of later batches go on meanwhile."""
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
        """Stop what is under way."""
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
        """What has finished, the oldest first; all of it unless any will do."""
        when = concurrent.futures.FIRST_COMPLETED if self._mode == "async" else concurrent.futures.ALL_COMPLETED
        concurrent.futures.wait(self._under_way, return_when=when)
        done = [future for future in self._under_way if future.done()][:most]
        groups = [(self._under_way.pop(future), future.result()) for future in done]
        fresh = [group for group in groups if staleness(group[1], latest) <= MAX_STALENESS[self._mode]]
        self.dropped += len(groups) - len(fresh)
        return fresh


def staleness(samples: list[RolloutSample], latest: int) -> int:
    """By how many versions the oldest token is behind; one whose version is not known counts as older than any."""
    behind = [sample.staleness_at(latest) for sample in samples]
    return max(latest if each is None else each for each in behind)

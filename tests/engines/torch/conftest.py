"""Fixtures of the torch engine's tests: checkpoints made once, and engines of one and of two ranks that stay up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rlctl_torch.step_loop
import torch
from torch_models import make_checkpoint
from torch_stage import Follower, Stage
from transformers.utils import logging as transformers_logging

torch.set_num_threads(1)
transformers_logging.disable_progress_bar()

Checkpoints = Callable[..., str]

ON_TWO_RANKS = {"test_torch_adapter_pauses", "test_torch_adapters", "test_torch_checker", "test_torch_disk"}
"""These modules test a single rank with ``--long`` only. Their results do not depend on the number of ranks."""


@pytest.hookimpl(tryfirst=True)  # before marks are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and item.module.__name__ in ON_TWO_RANKS and "[tp1" in item.name:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Makes checkpoints, each once: ``checkpoints("llama", seed=1)`` is a directory."""
    made: dict[tuple[Any, ...], str] = {}

    def make(family: str = "llama", **settings: Any) -> str:
        key = (family, *sorted(settings.items(), key=str))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(family), family, **settings)
        return made[key]

    return make


@pytest.fixture(scope="session")
def follower() -> Iterator[Follower]:
    """A process for the second ranks."""
    process = Follower()
    yield process
    process.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def stage(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Stage]:
    """A Llama on one rank, and on two."""
    follower = request.getfixturevalue("follower") if request.param == 2 else None
    stage = Stage(checkpoints("llama"), follower)
    asyncio.run(stage.start())
    yield stage
    asyncio.run(stage.stop())


@pytest.fixture(scope="module")
def stage1(checkpoints: Checkpoints) -> Iterator[Stage]:
    """A Llama on one rank."""
    stage = Stage(checkpoints("llama"))
    asyncio.run(stage.start())
    yield stage
    asyncio.run(stage.stop())


class Gate:
    """Lets rank 0 take batch steps one by one."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._open = threading.Event()
        self.steps = 0
        self.held = False
        """A step is being held back now."""

    def allow(self, steps: int) -> None:
        """Let so many further steps through."""
        self._permits.release(steps)

    def let_go(self) -> None:
        """Let a step through that is being held back, and no other one."""
        if self.held:
            self.held = False
            self.allow(1)

    def open(self) -> None:
        """Let every step through."""
        self._open.set()
        self._permits.release()

    def pass_through(self) -> None:
        """Called before a step."""
        if not self._open.is_set() and not self._permits.acquire(blocking=False):
            self.held = True
            allowed = self._permits.acquire(timeout=30)
            self.held = False
            assert allowed, "the test holds the steps back for ever"
        self.steps += 1


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Holds back the batch steps of engines in this process until the test allows them."""
    gate = Gate()
    run = rlctl_torch.step_loop.run

    def gated(*args: Any, **kwargs: Any) -> torch.Tensor:
        gate.pass_through()
        return run(*args, **kwargs)

    monkeypatch.setattr(rlctl_torch.step_loop, "run", gated)
    yield gate
    gate.open()

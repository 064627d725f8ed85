"""Fixtures for every tier."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from forking import NURSERY, SHARED, standing_in
from hypothesis import settings

from rlctl.coordinator.updates.manager import Graces
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.launch.local import child_processes
from rlctl.testing import fake_engine
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.transport import grpc
from rlctl.transport.tls.authority import Authority

LAST_LINES = 40

settings.register_profile("rlctl", deadline=None)  # an example may wait for a busy machine
settings.load_profile("rlctl")

grpc.aio.init_grpc_aio()  # never taken down: a server that a failed test left would be waited for until the end of time


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """With a test that failed goes what the processes that it watched have logged last."""
    report: Any = yield
    places = getattr(item, "funcargs", {}).get("tmp_path_factory")
    if report.failed and places is not None:
        for log in sorted(places.getbasetemp().rglob("logs/*.log")):
            if log.stat().st_mtime >= call.start:
                lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
                report.sections.append((f"last of {log.parent.parent.name}/{log.name}", "\n".join(lines)))
    return report


@pytest.fixture(scope="session", autouse=True)
def _engines_are_forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Launchers fork torch engines from one process: see :mod:`tests.support.forking`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_processes, "subprocess", standing_in())
        patch.setenv(SHARED, NURSERY.share(tmp_path_factory.mktemp("forking") / "socket"))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "support" / "launchers"), prepend=os.pathsep)
        yield
    NURSERY.close()


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Default dispositions of the signals that a test sends.

    A background shell and nohup start the tests with some of them ignored, which processes inherit.
    """
    handlers: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    handlers[signal.SIGINT] = signal.default_int_handler
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[str], str]:
    """Makes checkpoints of the fake engine: ``checkpoint("text")`` is a directory whose weights are that text."""

    def make(text: str) -> str:
        directory = tmp_path / f"checkpoint-{text}"
        directory.mkdir(exist_ok=True)
        (directory / "weights.txt").write_text(text)
        return str(directory)

    return make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The demo's model and the checkpoint that it was saved to; tests change copies of them."""
    from rlctl.demo import tiny

    model = tiny.make(seed=3)
    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    tiny.save(model, directory)
    return model, directory


@pytest.fixture(autouse=True)
def _fake_engines_without_faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the faults that a test has set in fake engines.

    Every test requests ``tmp_path_factory`` by this, so that a failure report can find the logs of its processes.
    """
    yield
    fake_engine.FAULTS.clear()


@pytest.fixture
def make_fleet(tmp_path: Path, checkpoint: Callable[[str], str]) -> Callable[..., object]:
    """``async with make_fleet(a=1, b=2)``: stages a and b with one and two ranks."""

    @asynccontextmanager
    async def make(
        *,
        token: str | None = None,
        access_file: str = "",
        lease_s: float = 10.0,
        heal: bool = True,
        graces: Graces | None = None,
        options: Mapping[str, str] = MappingProxyType({}),
        authority: Authority | None = None,
        metrics: str = "",
        **stages: int,
    ) -> AsyncIterator[InProcessFleet]:
        specs = [
            StageSpec(name, checkpoint("one"), tp_size=ranks, options=dict(options)) for name, ranks in stages.items()
        ]
        journal = tmp_path / "journal.db"
        given = {
            "token": token,
            "access_file": access_file,
            "lease_s": lease_s,
            "heal": heal,
            "graces": graces,
            "metrics": metrics,
            "authority": authority,
        }
        async with InProcessFleet(journal, specs, **given) as fleet:
            yield fleet

    return make


@pytest.fixture
async def fleet(make_fleet: Callable) -> AsyncIterator[InProcessFleet]:
    """Stage a with one rank, stage b with two."""
    async with make_fleet(a=1, b=2) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def torch_fleet(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Any, Path]) -> Iterator[LaunchedFleet]:
    """An engine with two ranks and one with a single rank, on the torch engine; tests' directories may be loaded."""
    options = {"allowed_roots": str(tmp_path_factory.getbasetemp())}
    engines = [
        EngineSpec("actor-0", str(tiny[1]), tp_size=2, options=options),
        EngineSpec("actor-1", str(tiny[1]), options=options),
    ]
    with LaunchedFleet(engines, directory=tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet

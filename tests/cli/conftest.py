"""The command line run inside the test, and fleets of fake engines for it to talk to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_helpers import Cli, LiveFleet, run, started

from rlctl.testing.in_process_fleet import StageSpec


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No context, token or state of whoever runs the tests."""
    for name in (
        "CONTEXT",
        "ENDPOINT",
        "OUTPUT",
        "TIMEOUT",
        "COLOR",
        "TOKEN",
        "TOKEN_FILE",
        "TLS_CA",
        "TLS_CERT",
        "TLS_KEY",
    ):
        monkeypatch.delenv(f"RLCTL_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def cli() -> Cli:
    """``cli("pause", "--slot", "a")``: without a fleet."""
    return run


MakeFleet = Callable[..., "contextlib.AbstractContextManager[LiveFleet]"]


@pytest.fixture
def make_fleet(tmp_path: Path) -> MakeFleet:
    """``with make_fleet(a=1, b=2) as rlctl``: stages a and b with one and two ranks, at the same weights."""

    def make(*, token: str | None = None, **stages: int) -> contextlib.AbstractContextManager[LiveFleet]:
        specs = []
        for name, ranks in stages.items():
            directory = tmp_path / name
            directory.mkdir()
            (directory / "weights.txt").write_text("one")
            specs.append(StageSpec(name, str(directory), tp_size=ranks))
        return started(tmp_path / "journal.db", specs, token=token)

    return make


@pytest.fixture
def rlctl(make_fleet: MakeFleet) -> Iterator[LiveFleet]:
    """The command line with a fleet: stage a with one rank, stage b with two."""
    with make_fleet(a=1, b=2) as live:
        yield live

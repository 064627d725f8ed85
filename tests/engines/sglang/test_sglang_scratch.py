"""What a killed server leaves behind is removed, and nothing of anybody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rlctl_sglang.server import leftovers
from rlctl_sglang.server.leftovers import Scratch

MAPS = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(64)
    mapped = mmap.mmap(file.fileno(), 64)
print("mapped", flush=True)
input()
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for temporary files, and one in the place of shared memory."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(leftovers, "SEGMENTS", (f"{tmp_path}/shm/sglang_loads_",))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def servers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes in the place of servers."""
    servers: list[subprocess.Popen[bytes]] = []
    yield servers
    for server in servers:
        server.kill()
        server.communicate()


def launch(own: Scratch, segment: Path) -> subprocess.Popen[bytes]:
    """A server that maps a segment."""
    server = subprocess.Popen(
        [sys.executable, "-c", MAPS, str(segment)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[own.lock],
        process_group=0,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"mapped\n"
    own.note(server.pid)
    return server


def test_only_its_own_is_removed(shared: Path, servers: list[subprocess.Popen[bytes]]) -> None:
    one, other = Scratch(), Scratch()
    mine, others = shared / "sglang_loads_a.shm", shared / "sglang_loads_b.shm"
    servers += [launch(one, mine), launch(other, others), launch(one, shared / "weights")]
    assert one.segments() == [mine]
    one.remove()
    one.remove()
    assert sorted(shared.iterdir()) == [others, shared / "weights"]
    assert not one.path.exists()
    assert other.path.exists()
    other.remove()


def test_what_a_killed_stage_server_left_goes_at_the_next_start_and_not_before_its_server_has_ended(
    shared: Path, servers: list[subprocess.Popen[bytes]]
) -> None:
    killed = Scratch()
    segment = shared / "sglang_loads_a.shm"
    server = launch(killed, segment)
    servers.append(server)
    os.utime(killed.path, (0, 0))
    os.close(killed.lock)  # as the stage server's death leaves it
    first = Scratch()
    assert segment.exists(), "its server still runs"
    server.kill()
    server.communicate()
    second = Scratch()
    assert not segment.exists()
    assert not killed.path.exists()
    for each in (first, second):
        assert each.path.exists()
        each.remove()


def test_one_that_is_just_being_made_is_left_alone(shared: Path) -> None:
    being_made = shared.parent / "tmp" / f"{leftovers.PREFIX}x"
    being_made.mkdir()
    Scratch().remove()
    assert being_made.exists()

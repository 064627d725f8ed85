"""What happens when processes die, hang or are told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1.common_pb2 import OUTCOME_NOT_SENT
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.verbs_pb2 import GetLoadsRequest, GetModelInfoRequest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]


def seconds_until(fleet: Fleet, condition: Callable[[list[Stage]], bool], timeout_s: float = 30.0) -> float:
    """How long it takes until the fleet's stages are as wanted."""
    started = time.monotonic()
    with closing(fleet.watch()) as events:
        for _ in events:
            if condition(list(fleet.status().stages)):
                return time.monotonic() - started
            assert time.monotonic() - started < timeout_s
    raise AssertionError("the watch ended")


@pytest.fixture
def two_ranks(tmp_path: Path, tiny: tuple[Any, Path]) -> Any:
    """One torch engine with two ranks."""
    with LaunchedFleet([EngineSpec("actor-0", str(tiny[1]), tp_size=2)], directory=tmp_path / "fleet") as local:
        yield local


def test_a_killed_rank_shows_within_three_seconds_and_nothing_hangs(two_ranks: LaunchedFleet) -> None:
    with two_ranks.connect() as fleet:
        stream = fleet.generate_stream(encode("1+"), max_new_tokens=60, ignore_eos=True)
        next(stream)
        two_ranks.process("actor-0.1").kill()
        took = seconds_until(fleet, lambda stages: not stages[0].routable)
        assert took < 3
        with pytest.raises(RlctlError):
            list(stream)
        # Rank 0's engine may have missed it before its link was read.
        assert seconds_until(fleet, lambda stages: not stages[0].report.ranks[1].alive) < 3
        assert "rank" in fleet.status().stages[0].not_routable
        read = fleet.call(GetModelInfoRequest(), check=False)
        ranks = read.stage_results[0].rank_results
        assert [rank.coordinates.rank for rank in ranks] == [0, 1]
        assert (ranks[1].outcome, ranks[1].error.reason) == (OUTCOME_NOT_SENT, "LINK_LOST")
        with pytest.raises(OperationFailed) as caught:
            fleet.pause_generation(timeout_s=10)
        assert caught.value.reason is Reason.RANK_LOST
        with pytest.raises(RlctlError) as refused:
            fleet.generate("1+1=", timeout_s=1)
        assert refused.value.reason is Reason.NO_ROUTABLE_STAGE


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_fleet_that_nobody_asks_for_anything_stays(two_ranks: LaunchedFleet) -> None:
    with two_ranks.connect() as fleet, closing(fleet.watch()) as events:
        next(events)
        for sleeping in (False, True):
            fleet.pause_generation("retract")
            if sleeping:
                fleet.release_memory(["kv_cache"])
            # Longer than gRPC's ping strikes (30 s) and any default timeout between the ranks (20 s) would allow.
            time.sleep(75)
            if sleeping:
                fleet.resume_memory()
            fleet.continue_generation()
            # The watch is the one that was opened before.
            next(event for event in events if any(stage.routable for stage in event.fleet.stages))
            assert fleet.generate(encode("1+1="), max_new_tokens=2).samples[0].output_ids


def test_a_killed_rank_zero_takes_its_followers_along(two_ranks: LaunchedFleet) -> None:
    with two_ranks.connect() as fleet:
        two_ranks.process("actor-0").kill()
        assert seconds_until(fleet, lambda stages: stages[0].state == common.STAGE_STATE_UNREACHABLE) < 3
        two_ranks.process("actor-0.1").wait(10)
        assert two_ranks.process("actor-0.1").returncode == 0


def test_a_stopped_rank_costs_a_command_its_deadline(two_ranks: LaunchedFleet) -> None:
    with two_ranks.connect() as fleet:
        follower = two_ranks.process("actor-0.1")
        os.kill(follower.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            operation = fleet.pause_generation(timeout_s=3, check=False)
            assert time.monotonic() - started < 6
            assert operation.stage_results[0].outcome in (common.OUTCOME_UNKNOWN, common.OUTCOME_NOT_SENT)
            assert operation.state != 2
            assert not fleet.status().stages[0].routable
        finally:
            os.kill(follower.pid, signal.SIGCONT)


def test_a_server_ends_in_order_though_its_engine_is_inside_torch() -> None:
    """Told to end while it loads, or with threads that it leaves behind because they are stuck."""
    script = """
import asyncio, os, signal, threading, time
import click
import torch
from rlctl.cli.commands.serve import PROCESS, serve

torch.set_num_threads(1)
waiting = []

def compute():
    while True:
        torch.zeros(2000).add_(1).sum()

async def start():
    for _ in range(2):
        threading.Thread(target=compute, daemon=True).start()
    waiting.append(asyncio.create_task(asyncio.to_thread(time.sleep, 600)))
    os.kill(os.getpid(), signal.SIGTERM)
    return stop

async def stop():
    print("stopped")

@click.command()
@click.pass_context
def command(context):
    context.meta[PROCESS] = {"log_level": "INFO", "log_format": "text", "end_with_parent": False}
    serve(start)

command()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "stopped\n", "")


def test_sigterm_lets_a_request_finish(fake_fleet: LaunchedFleet) -> None:
    with fake_fleet.connect() as fleet:
        fleet.set_enabled(["b"], False)
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(fleet.generate("x", max_new_tokens=300)))
        thread.start()
        while not any(
            rank.loads.running for stage in fleet.call(GetLoadsRequest()).stage_results for rank in stage.rank_results
        ):
            pass
        process = fake_fleet.process("a")
        process.terminate()
        thread.join(30)
        assert results[0].samples[0].completion_tokens == 300
        process.wait()
        assert process.returncode == 0
        assert [stage.registration.slot for stage in fleet.status().stages] == ["b"]


def test_a_killed_coordinator_comes_back_to_the_same_fleet(tmp_path: Path, checkpoint: Callable[[str], str]) -> None:
    local = LaunchedFleet([EngineSpec("a", checkpoint("one"), engine="fake")], directory=tmp_path / "fleet")
    with local, local.connect() as fleet:
        fleet.update_weights_from_disk(checkpoint("two"), version="two")
        operation = fleet.operations()[0]
        old = local.process("coordinator")
        old.kill()
        old.wait()
        local.restart_coordinator()
        seconds_until(fleet, lambda stages: bool(stages) and stages[0].routable)
        status = fleet.status()
        assert status.header.fleet_epoch == 2
        assert status.stages[0].incarnation == 1
        assert status.models[0].latest.label == "two"
        assert fleet.operations()[0] == operation
        assert fleet.generate("x", max_new_tokens=1).samples[0].text


def test_a_coordinator_whose_journal_was_taken_away_ends(fake_fleet: LaunchedFleet) -> None:
    coordinator = fake_fleet.process("coordinator")
    journal = fake_fleet.directory / "journal.db"
    journal.rename(journal.with_name("taken.db"))
    coordinator.wait(30)
    assert coordinator.returncode not in (0, -signal.SIGKILL)
    assert "JOURNAL_FAILED" in coordinator.log.read_text().splitlines()[-1]
    assert str(coordinator.failure()).count("moved or replaced") == 1


def test_nothing_outlives_the_launcher(tmp_path: Path, checkpoint: Callable[[str], str]) -> None:
    script = f"""
import sys, time
from pathlib import Path
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
engines = [EngineSpec("a", {checkpoint("one")!r}, engine="fake")]
fleet = LaunchedFleet(engines, directory=Path({str(tmp_path)!r}) / "fleet")
fleet.start()
print(*[process.pid for process in fleet.processes], flush=True)
time.sleep(100)
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    children = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
    assert len(children) == 2
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive


def test_an_engine_that_does_not_come_up_is_named_with_its_cause(tmp_path: Path) -> None:
    local = LaunchedFleet([EngineSpec("a", "/nowhere", engine="fake")], directory=tmp_path / "fleet")
    with pytest.raises(RlctlError, match=r"a ended with 2: .*CHECKPOINT_NOT_FOUND.*nowhere"):
        local.start()
    assert not local.processes
    local = LaunchedFleet([EngineSpec("a", "/nowhere", engine="none")], directory=tmp_path / "other")
    with pytest.raises(
        RlctlError, match="no engine plug-in 'none' is installed; there are: fake, sglang, sglang-diffusion, torch"
    ):
        local.start()

"""The command line as a process: signals, watching, and fleets that it starts and takes down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from cli_helpers import LiveFleet
from up_helpers import when
from waiting import eventually

from rlctl.cli.app.settings import Settings
from rlctl.cli.render import progress
from rlctl.contract.errors import RlctlError
from rlctl.launch import coordinator_calls, fleet_controller
from rlctl.launch.deployment import Deployment
from rlctl.launch.engine_lifecycle import Limits, Phase
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.launch.local import child_processes
from rlctl.launch.supervisor import fleet_state
from rlctl.launch.supervisor.supervisor import _Supervisor
from rlctl.runtime.server_process import STOP_S
from rlctl.sdk.blocking import connect
from rlctl.v1.common_pb2 import STAGE_STATE_PAUSED

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("default_signals")]

WAIT_S = 60.0


def start(*arguments: str) -> subprocess.Popen[str]:
    """``rlctl ARGUMENTS`` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "rlctl", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def call(*arguments: str) -> tuple[int, str, str]:
    return finish(start(*arguments))


def read_until(stream: IO[str] | None, words: str) -> str:
    """The line that has these words."""
    assert stream is not None
    for line in stream:
        if words in line:
            return line
    raise AssertionError(f"the stream ended without {words!r}")


@pytest.fixture
def draining(rlctl: LiveFleet) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``rlctl pause --mode drain`` while a long request keeps the fleet from draining."""
    with connect(rlctl.endpoint) as fleet:
        parts = fleet.generate_stream("long", max_new_tokens=1_000_000)
        next(parts)

        def drain(*arguments: str) -> subprocess.Popen[str]:
            process = start("--endpoint", rlctl.endpoint, "pause", "--mode", "drain", *arguments)
            deadline = time.monotonic() + WAIT_S
            while not any(operation.state == 1 for operation in fleet.operations(verb="PauseGeneration")):
                assert time.monotonic() < deadline, "the pause never reached the coordinator"
                time.sleep(0.02)
            return process

        yield drain
        parts.close()
        fleet.abort_requests(abort_all=True)


def test_an_interrupt_stops_waiting_and_names_the_request_that_goes_on(
    rlctl: LiveFleet, draining: Callable[..., subprocess.Popen[str]]
) -> None:
    process = draining()
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130
    assert out == ""
    with connect(rlctl.endpoint) as fleet:
        (operation,) = fleet.operations()
    assert f"request_id: {operation.operation_id}" in err
    assert f"rlctl get operation {operation.operation_id}" in err
    assert f"pause --mode drain --request-id {operation.operation_id}" in err
    assert "Traceback" not in err


def test_termination_names_the_request_too(draining: Callable[..., subprocess.Popen[str]]) -> None:
    process = draining()
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 143
    assert "request_id: " in err


def test_the_same_request_attaches_to_the_one_that_runs(
    rlctl: LiveFleet, draining: Callable[..., subprocess.Popen[str]]
) -> None:
    first = draining("-o", "json")
    with connect(rlctl.endpoint) as fleet:
        (operation,) = fleet.operations()
        again = start(
            *("--endpoint", rlctl.endpoint, "pause", "--mode", "drain", "-o", "json"),
            *("--request-id", operation.operation_id),
        )
        fleet.abort_requests(abort_all=True)
    code, out, _ = finish(first)
    code_again, out_again, _ = finish(again)
    assert code == code_again == 0
    assert json.loads(out)["stage_results"] == json.loads(out_again)["stage_results"]
    assert json.loads(out_again)["replayed"] is True


@pytest.mark.parametrize(
    ("arguments", "answer", "code", "paused"),
    [([], b"n\n", 130, False), ([], b"y\n", 0, True), (["--mode", "retract"], b"", 0, True), (["--yes"], b"", 0, True)],
)
def test_a_pause_at_a_terminal_asks_before_it_aborts_requests(
    rlctl: LiveFleet, arguments: list[str], answer: bytes, code: int, paused: bool
) -> None:
    terminal, end = os.openpty()
    command = [sys.executable, "-m", "rlctl", "--endpoint", rlctl.endpoint, "pause", *arguments]
    with subprocess.Popen(command, stdin=end, stderr=end, stdout=subprocess.DEVNULL) as process:
        os.close(end)
        os.write(terminal, answer)
        assert process.wait(WAIT_S) == code
    said = b""
    with contextlib.suppress(OSError):  # EIO: no process has the terminal open, and everything is read
        while piece := os.read(terminal, 4096):
            said += piece
    os.close(terminal)
    assert (b"aborts the requests" in said) == bool(answer)
    assert (rlctl.state("a") == STAGE_STATE_PAUSED) == paused


def test_a_terminal_shows_how_an_operation_stands_while_it_is_waited_for(rlctl: LiveFleet) -> None:
    terminal, end = os.openpty()
    command = [sys.executable, "-m", "rlctl", "--endpoint", rlctl.endpoint, "pause", "--mode", "drain"]
    with (
        connect(rlctl.endpoint) as fleet,
        contextlib.closing(fleet.generate_stream("x", max_new_tokens=10**6)) as parts,
    ):
        next(parts)
        with subprocess.Popen(command, stdin=end, stderr=end, stdout=subprocess.DEVNULL) as process:
            os.close(end)
            said = b""
            while b"stages answered; " not in said:
                said += os.read(terminal, 4096)
            fleet.abort_requests(abort_all=True)
            assert process.wait(WAIT_S) == 0
    assert re.search(rb"PauseGeneration: \d+ s, 1 of 2 stages answered; [A-Z]+ 1, [A-Z]+ 1", said)
    os.close(terminal)


def test_watching_prints_a_line_for_every_change_until_it_is_interrupted(rlctl: LiveFleet) -> None:
    process = start("--endpoint", rlctl.endpoint, "status", "-w", "-o", "jsonl")
    read_until(process.stdout, '"STAGE_STATE_READY"')
    assert rlctl("pause", "-q").code == 0
    fleet = json.loads(read_until(process.stdout, '"STAGE_STATE_PAUSED"'))
    assert {stage["registration"]["slot"] for stage in fleet["stages"]} == {"a", "b"}
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130


def test_watching_what_never_answered_has_not_gone_well() -> None:
    """A coordinator that is stopped: a script would have taken nothing for all there is."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        code, out, err = call("--endpoint", address, "status", "-w", "--timeout", "1s")
    assert (code, out) == (6, "")
    assert "within 1 s" in err or "longer than 1 s" in err


def test_watching_ends_when_its_time_is_up(rlctl: LiveFleet) -> None:
    started = time.monotonic()
    assert call("--endpoint", rlctl.endpoint, "status")[0] == 0
    limit_s = max(1.0, 2 * (time.monotonic() - started))  # a busy machine answers later
    code, out, err = call("--endpoint", rlctl.endpoint, "status", "-w", "-o", "jsonl", "--timeout", f"{limit_s:.1f}s")
    assert code == 0, err
    assert len(out.splitlines()) >= 1


@pytest.mark.parametrize("words", [("status", "-w"), ("generate", "long", "--max-new-tokens", "1000000", "--stream")])
def test_termination_ends_what_waits_as_an_interrupt_does(rlctl: LiveFleet, words: tuple[str, ...]) -> None:
    process = start("--endpoint", rlctl.endpoint, *words, "-o", "jsonl")
    assert process.stdout is not None
    assert process.stdout.readline()
    process.terminate()
    code, _, err = finish(process)
    assert code == 143
    assert err.strip() == ""


SIGNALLED = """
import os, signal
from rlctl.cli.main import main
from rlctl.runtime.event_loops import LoopThread

def submit(thread, work):
    os.kill(os.getpid(), {number})
    raise AssertionError("the signal came before")

LoopThread.submit = submit
main()
"""
"""The command, to which a signal comes just before it starts a call to the coordinator."""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_what_a_signal_keeps_from_being_started_is_dropped_without_a_word(
    rlctl: LiveFleet, number: signal.Signals, code: int
) -> None:
    script = SIGNALLED.format(number=int(number))
    command = [sys.executable, "-c", script, "--endpoint", rlctl.endpoint, "status", "-w", "-o", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert (done.returncode, done.stderr.strip()) == (code, "")


def test_output_that_nobody_reads_any_more_ends_a_command_without_a_word(rlctl: LiveFleet) -> None:
    process = start("--endpoint", rlctl.endpoint, "status", "-o", "json")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    code, _, err = finish(process)
    assert (code, err) == (1, "")


@pytest.mark.parametrize(("words", "code"), [("nonsense", 2), ("status -o json", 5), ("status", 5)])
def test_an_error_that_nobody_reads_has_its_exit_code(words: str, code: int) -> None:
    process = start("--endpoint", "127.0.0.1:1", *words.split())
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None
    assert finish(process)[0] == code


@pytest.mark.parametrize(("words", "code"), [("version", 0), ("version -o json", 0), ("--help", 0), ("status", 5)])
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_leads_nowhere(words: str, code: int, closed: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m rlctl --endpoint 127.0.0.1:1 {words} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert bool(done.stdout) == (closed == "2>&-" and code == 0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["status", "status -o json", "--help", "version"])
def test_output_that_cannot_be_written_is_one_line(rlctl: LiveFleet, words: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "rlctl", "--endpoint", rlctl.endpoint, *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 1
    assert "could not write: No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# Fleets of processes.


@pytest.fixture
def up(checkpoint: Callable[[str], str]) -> Iterator[list[str]]:
    """Arguments of an ``up`` with a fake engine on any port; what is left of the fleet is taken down."""
    yield [*("up", "--hf-checkpoint", checkpoint("one"), "--engine", "fake", "--listen", "127.0.0.1:0")]
    left = fleet_state.read("default")
    if left is not None and left.alive:
        os.kill(left.pid, signal.SIGTERM)


def test_a_detached_fleet_answers_until_it_is_taken_down(up: list[str]) -> None:
    code, out, err = call(*up, "-d", "--rollout-num-gpus", "2", "-o", "json")
    assert code == 0, err
    assert "coordinator at 127.0.0.1:" in err
    assert "actor-1: ready at" in err
    fleet = json.loads(out)
    assert fleet["phase"] == "ready"
    assert set(fleet["processes"]) == {"coordinator", "actor-0", "actor-1"}
    code, names, _ = call("--endpoint", fleet["endpoint"], "get", "stages", "-o", "name")
    assert names == "actor-0\nactor-1\n"

    code, _, err = call(*up)
    assert code == 7
    assert f"fleet 'default' is up already (supervisor {fleet['pid']}, endpoint {fleet['endpoint']})" in err

    code, out, err = call("down", "-o", "json")
    assert code == 0, err
    assert json.loads(out)["processes"] == fleet["processes"]
    assert fleet_state.read("default") is None
    assert not any(fleet_state.identity(pid) for pid in [fleet["pid"], *fleet["processes"].values()])
    code, _, err = call("down")
    assert code == 2
    assert "no fleet 'default' is up" in err


def models_of(fleet: dict[str, str]) -> tuple[str, str]:
    """(label, sequence) of the only model."""
    code, models, err = call("--endpoint", fleet["endpoint"], "get", "models", "-o", "json")
    assert code == 0, err
    [model] = json.loads(models)
    return model["latest"]["label"], model["latest"]["sequence"]


def epoch_of(fleet: dict[str, str]) -> int:
    with connect(fleet["endpoint"]) as client:
        return client.status().header.fleet_epoch


def test_a_fleet_whose_supervisor_died_goes_on_from_its_journal_until_it_is_started_over(
    up: list[str], checkpoint: Callable[[str], str]
) -> None:
    code, out, err = call(*up, "-d", "-o", "json", "--rollout-num-gpus", "3")
    assert code == 0, err
    first = json.loads(out)
    update = ["weights", "update", "--model", "actor", "--model-path", checkpoint("two"), "--weight-version", "v2"]
    assert call("--endpoint", first["endpoint"], *update)[0] == 0
    assert call("--endpoint", first["endpoint"], "disable", "actor-1")[0] == 0
    os.kill(first["pid"], signal.SIGKILL)

    code, out, err = call(*up, "-d", "-o", "json", "--rollout-num-gpus", "2")
    assert code == 0, err
    assert "goes on (epoch 2): actor at v2#2" in err
    assert "actor-1: up, disabled" in err
    second = json.loads(out)
    assert models_of(second) == ("v2", "2")
    with connect(second["endpoint"]) as client:
        stages = {stage.registration.slot: stage for stage in client.status().stages}
        assert stages.keys() == {"actor-0", "actor-1"}, "actor-2 is of the topology before"
        assert [stage.report.weight_version.label for stage in stages.values()] == ["v2", "v2"]
        assert (stages["actor-0"].routable, stages["actor-1"].not_routable) == (True, "disabled")
        assert stages["actor-0"].incarnation == 2
        assert client.generate("1+2=", model="actor").samples[0].versions[0].version.label == "v2"
    assert call("down")[0] == 0

    code, out, err = call(*up, "-d", "-o", "json")
    assert code == 0, err
    assert models_of(json.loads(out)) == ("v2", "2"), "an orderly end is none of the fleet's records"
    assert call("down")[0] == 0

    code, out, err = call(*up, "-d", "-o", "json", "--new")
    assert code == 0, err
    over = json.loads(out)
    assert models_of(over) == ("initial", "3")
    assert epoch_of(over) == 4
    assert (Path(over["directory"]) / "journal.previous.db").exists()
    assert call("down")[0] == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_fleet_in_the_foreground_goes_down_on_a_signal(up: list[str], number: int, code: int) -> None:
    process = start(*up, "-o", "jsonl")
    fleet = json.loads(read_until(process.stdout, '"ready"'))
    process.send_signal(number)
    ended, _, err = finish(process)
    assert ended == code
    assert "Fleet default is down." in err
    assert "Traceback" not in err
    assert fleet_state.read("default") is None
    assert not any(fleet_state.identity(pid) for pid in fleet["processes"].values())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_fleet_goes_on_where_nobody_can_be_told_that_it_is_ready(up: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "rlctl", *up]
        process = subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, text=True)
    said = read_until(process.stderr, "Ready.")
    assert "No space left on device" in said
    fleet = fleet_state.read("default")
    assert fleet is not None
    assert call("--endpoint", fleet.endpoint, "status")[0] == 0
    process.terminate()
    assert finish(process)[0] == 143


def test_a_foreground_fleet_is_taken_down_from_another_terminal(up: list[str]) -> None:
    process = start(*up, "-o", "jsonl")
    read_until(process.stdout, '"ready"')
    dry, out, _ = call("down", "--dry-run")
    assert dry == 0
    assert "actor-0" in out
    assert process.poll() is None
    assert call("down")[0] == 0
    assert finish(process)[0] == 143


def test_a_process_that_dies_is_told_and_the_others_stay(up: list[str]) -> None:
    process = start(*up, "--rollout-num-gpus", "2", "-o", "jsonl")
    fleet = json.loads(read_until(process.stdout, '"ready"'))
    os.kill(fleet["processes"]["coordinator"], signal.SIGKILL)
    said = read_until(process.stderr, "Warning:")
    assert "coordinator was ended by SIGKILL" in said
    again = read_until(process.stderr, "coordinator at")
    assert f"coordinator at {fleet['endpoint']} again" in again
    assert process.poll() is None
    process.terminate()
    assert finish(process)[0] == 143


def test_an_engine_that_does_not_start_again_is_told_to_the_coordinator(up: list[str]) -> None:
    process = start(*up, "--rollout-num-gpus", "2", "-o", "jsonl")
    fleet = json.loads(read_until(process.stdout, '"ready"'))
    (Path(up[2]) / "weights.txt").unlink()
    os.kill(fleet["processes"]["actor-1"], signal.SIGKILL)
    with connect(fleet["endpoint"]) as client:
        told = when(client, lambda now: now["actor-1"].engine_failure.failures > 1)["actor-1"]
        assert "crash loop" in told.not_routable
        assert "weights.txt" in told.engine_failure.reason
        assert any("weights.txt" in line for line in told.engine_failure.log)
        code, described, err = call("--endpoint", fleet["endpoint"], "describe", "stage", "actor-1")
        assert code == 0, err
        assert "Last lines of the engine's log" in described
        assert "weights.txt" in described
        (Path(up[2]) / "weights.txt").write_text("one")
        again = when(client, lambda now: now["actor-1"].routable)["actor-1"]
        assert not again.HasField("engine_failure")
    process.terminate()
    assert finish(process)[0] == 143


def test_an_engine_is_drained_and_started_again_and_its_log_followed(up: list[str]) -> None:
    code, out, err = call(*up, "-d", "--rollout-num-gpus", "3", "-o", "json")
    assert code == 0, err
    before = json.loads(out)
    follows = start("logs", "supervisor", "-f")
    with connect(before["endpoint"]) as client:
        client.set_enabled(["actor-2"], False, reason="a new disk")
        code, out, err = call("restart", "actor-1", "actor-2", "--yes", "-o", "json")
        assert code == 0, err
        after = json.loads(out)
        for line in ("actor-1: draining", "actor-1: stopped", "actor-1: ready at", "actor-2: up, disabled"):
            assert line in err
        same = {name: before["processes"][name] == after["processes"][name] for name in before["processes"]}
        assert same == {"coordinator": True, "actor-0": True, "actor-1": False, "actor-2": False}
        stages = {stage.registration.slot: stage for stage in client.status().stages}
        assert (stages["actor-1"].routable, stages["actor-1"].incarnation) == (True, 2)
        assert (stages["actor-2"].not_routable, stages["actor-2"].incarnation) == ("disabled: a new disk", 2)
    read_until(follows.stdout, "actor-1: stopped")
    follows.send_signal(signal.SIGTERM)
    assert finish(follows)[0] == 143
    assert call("down")[0] == 0


def test_a_coordinator_that_dies_while_an_engine_is_started_again_is_not_waited_for(up: list[str]) -> None:
    """Who looks after the engines asks it about them, and is the one that starts it again."""
    process = start(*up, "--rollout-num-gpus", "2", "-o", "jsonl")
    fleet = json.loads(read_until(process.stdout, '"ready"'))
    os.kill(fleet["processes"]["actor-1"], signal.SIGKILL)
    assert "actor-1 was ended by SIGKILL" in read_until(process.stderr, "Warning:")
    os.kill(fleet["processes"]["coordinator"], signal.SIGKILL)
    began = time.monotonic()
    read_until(process.stderr, "the fleet goes on")
    assert time.monotonic() - began < 25, "a call to it takes 35 s to be given up"
    process.terminate()
    assert finish(process)[0] == 143


def test_what_cannot_be_started_is_told_with_the_cause_and_nothing_is_left(up: list[str]) -> None:
    (Path(up[2]) / "weights.txt").unlink()
    for arguments in ([], ["-d"]):
        code, _, err = call(*up, *arguments)
        assert code == 1
        assert "actor-0 ended with 2: CHECKPOINT_NOT_FOUND" in err
        assert "logs/actor-0.log" in err
        assert fleet_state.read("default") is None


@pytest.mark.parametrize("arguments", [(), ("-d",)])
def test_what_cannot_be_started_is_told_to_who_asked_for_errors_only_and_to_scripts(
    up: list[str], arguments: tuple[str, ...]
) -> None:
    (Path(up[2]) / "weights.txt").unlink()
    code, _, err = call("-q", *up, *arguments)
    assert code == 1
    assert err.startswith("Error: actor-0 ended with 2: CHECKPOINT_NOT_FOUND")
    code, _, err = call("-o", "json", *up, *arguments)
    assert code == 1
    assert json.loads(err.splitlines()[-1])["error"]["reason"] == "ENGINE_FAILED"


def test_a_supervisor_that_is_left_running_goes_by_the_context_of_who_started_it(up: list[str], tmp_path: Path) -> None:
    config = tmp_path / "config" / "rlctl" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("current: lab\ncontexts: {lab: {token: sesame}, other: {color: never}}")
    code, out, err = call("--context", "other", *up, "-d", "-o", "json")
    assert code == 0, err
    code, _, err = call("--context", "other", "--endpoint", json.loads(out)["endpoint"], "status")
    assert (code, err) == (0, "")
    assert call("down")[0] == 0


def test_starting_takes_no_longer_than_its_time(up: list[str]) -> None:
    for arguments in ([], ["-d"]):
        code, _, err = call(*up, "--timeout", "100ms", *arguments)
        assert code == 6, err
        assert "starting the fleet took longer than 0.1 s" in err


@pytest.mark.parametrize("arguments", [(), ("-d",)])
def test_an_interrupt_while_an_engine_loads_takes_everything_down_at_once(up: list[str], arguments: tuple[str]) -> None:
    weights = Path(up[2]) / "weights.txt"
    weights.unlink()
    os.mkfifo(weights)  # whoever reads it is stuck, and blind to SIGTERM, as while it imports torch
    process = start(*up, *arguments)
    read_until(process.stderr, "actor-0: loading")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert time.monotonic() - began < STOP_S / 2
    assert "interrupted; taking 2 processes down" in err
    assert "Fleet default is down." in err
    assert "Traceback" not in err
    assert fleet_state.read("default") is None


def test_processes_of_a_supervisor_that_dies_during_the_start_are_known(up: list[str]) -> None:
    """They may run for a minute after the supervisor, with a GPU. `down` and `up` name them and wait for them."""
    weights = Path(up[2]) / "weights.txt"
    weights.unlink()
    os.mkfifo(weights)
    process = start(*up)
    read_until(process.stderr, "actor-0: loading")

    def is_loading() -> bool:
        state = fleet_state.read("default")
        return state is not None and state.engines == {"actor-0": "loading"}

    asyncio.run(eventually(is_loading))
    state = fleet_state.read("default")
    assert state is not None
    assert (state.phase, bool(state.endpoint)) == (fleet_state.STARTING, True)
    assert set(state.survivors) == {"coordinator", "actor-0"}
    process.kill()
    finish(process)
    assert fleet_state.read("default") == state


LOST = """
import os
from rlctl.cli.commands import up
from rlctl.cli.main import main
from rlctl.launch.fleet_controller import LaunchedFleet

class Lost:
    def __del__(self):
        os.kill(os.getpid(), {number})
        for _ in range(1000):
            pass

signals = [Lost]

def lose(*_, **__):
    if signals:
        signals.pop()()

{function} = lose
main()
"""
"""The command gets a signal while Python runs a destructor. Python drops the exception of the handler there."""


@pytest.mark.parametrize("function", ["up.refuse_used", "LaunchedFleet._tell_policies"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_destructor_is_not_lost(up: list[str], function: str, number: int, code: int) -> None:
    """In the first one the fleet has yet to start, in the second it starts."""
    weights = Path(up[2]) / "weights.txt"
    weights.unlink()
    os.mkfifo(weights)
    command = [sys.executable, "-c", LOST.format(number=int(number), function=function), *up]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        ended, _, err = finish(process)
    finally:
        process.kill()
    assert ended == code, err
    assert function == "up.refuse_used" or "Fleet default is down." in err
    assert fleet_state.read("default") is None


def test_who_stops_waiting_for_a_change_is_told_that_it_goes_on(up: list[str], tmp_path: Path) -> None:
    model = "{{name: {}, engine: fake, model_path: {}, server_groups: [{{worker_type: regular, num_gpus: 1}}]}}"
    slow = tmp_path / "slow"
    slow.mkdir()
    os.mkfifo(slow / "weights.txt")
    file = tmp_path / "fleet.yaml"
    models = [model.format("actor", up[2]), model.format("late", slow)]
    for wanted in (models[:1], models):
        file.write_text(f"fleet: {{listen: '127.0.0.1:0'}}\nmodels: [{', '.join(wanted)}]")
        process = start("up", str(file), "-d")
        if wanted == models:
            read_until(process.stderr, "late-0: loading")
            process.send_signal(signal.SIGINT)
        code, _, err = finish(process)
    assert code == 130
    assert "Stopped waiting; the supervisor goes on." in err
    fleet = fleet_state.read("default")
    assert fleet is not None
    assert fleet.engines == {"actor-0": "ready", "late-0": "loading"}
    assert call("down")[0] == 0


def test_who_does_not_end_is_killed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "STOP_S", 0.3)
    said: list[str] = []
    fleet = LaunchedFleet([], directory=tmp_path, on_progress=said.append)
    fleet.start()
    (coordinator,) = fleet.processes
    os.kill(coordinator.pid, signal.SIGSTOP)
    fleet.stop()
    assert coordinator.returncode == -signal.SIGKILL
    assert said[-1].startswith(f"coordinator (pid {coordinator.pid}) did not end")


def test_a_coordinator_that_does_not_come_up_is_reported_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reads from a disk that does not answer."""
    stuck = tmp_path / "access.json"
    os.mkfifo(stuck)
    deployment = Deployment("lab", "127.0.0.1:0", (), limits=Limits(backoff_s=0.1))
    holder = _Supervisor(Settings(), deployment)
    fleet = holder._fleet
    try:
        address = fleet.start()
        before = fleet.coordinator
        assert before is not None
        before.kill()
        before.wait()
        with monkeypatch.context() as hung:
            hung.setattr(fleet_controller, "START_S", 3.0)
            hung.setenv("RLCTL_ACCESS_FILE", str(stuck))
            said = ""
            while "did not come up" not in said:
                holder._look()
                said += capsys.readouterr().err
        assert said.index("Warning: ENGINE_FAILED: coordinator was ended by SIGKILL") < said.index(
            "Warning: DEADLINE_EXCEEDED: coordinator did not come up in 3 s"
        )
        assert "again; the fleet goes on" not in said
        mute = fleet.coordinator
        assert mute is not None
        assert mute is not before
        said = ""
        while "again; the fleet goes on" not in said:
            holder._look()
            said += capsys.readouterr().err
        assert mute.returncode == -signal.SIGKILL
        assert "Warning" not in said, "the kill is not a further failure"
        assert fleet.address == address
        with fleet.connect() as client:
            assert client.status().header.fleet_epoch == 2
    finally:
        fleet.stop()


def test_an_engine_is_drained_only_after_the_coordinator_has_disabled_its_slot(
    tmp_path: Path, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that is stopped sends requests to the stage when it goes on."""
    monkeypatch.setattr(coordinator_calls, "SILENT_S", 1.0)
    engine = EngineSpec("actor-0", checkpoint("one"), engine="fake")
    with LaunchedFleet([engine], directory=tmp_path / "fleet") as fleet:
        coordinator = fleet.process("coordinator")
        os.kill(coordinator.pid, signal.SIGSTOP)
        try:
            fleet.want(())
            fleet.look(restart=True)
            assert fleet.runs["actor-0"].phase is Phase.READY
            with pytest.raises(RlctlError, match=rf"the coordinator \(pid {coordinator.pid}\) has not answered for"):
                fleet.settle()
            assert fleet.runs["actor-0"].phase is Phase.READY
        finally:
            os.kill(coordinator.pid, signal.SIGCONT)
        fleet.settle()
        assert not fleet.runs


@pytest.mark.parametrize("engines", [0, 1])
def test_a_silent_coordinator_is_reported_once_while_nothing_changes(
    checkpoint: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engines: int,
) -> None:
    monkeypatch.setattr(coordinator_calls, "CALL_S", 0.5)
    monkeypatch.setattr(coordinator_calls, "REPORT_S", 1.0)
    specs = [EngineSpec("actor-0", checkpoint("one"), engine="fake")][:engines]
    holder = _Supervisor(Settings(), Deployment("lab", "127.0.0.1:0", specs))
    fleet = holder._fleet
    said: list[str] = []

    def look() -> str:
        holder._look()
        said.extend(capsys.readouterr().err.splitlines())
        return "\n".join(said)

    try:
        fleet.start()
        assert fleet.coordinator is not None
        pid = fleet.coordinator.pid
        for _ in range(2):
            look()
            said.clear()
            os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            while "Warning" not in look():
                assert time.monotonic() - began < WAIT_S
            for _ in range(5):
                fleet._ask_at = 0.0  # the next look asks
                look()
            assert [line for line in said if line] == said[:1]
            assert re.match(rf"Warning: UNREACHABLE: the coordinator \(pid {pid}\) has not answered for \d+ s", said[0])
            os.kill(pid, signal.SIGCONT)
            while len(said) == 1:
                assert time.monotonic() - began < WAIT_S
                look()
            assert said[1:] == [f"coordinator at {fleet.address} answers again"]
    finally:
        if fleet.coordinator is not None:
            os.kill(fleet.coordinator.pid, signal.SIGCONT)
        fleet.stop()


def test_a_progress_line_does_not_wait_for_a_coordinator_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "at_terminal", lambda: True)
    with LaunchedFleet((), directory=tmp_path / "fleet") as fleet, fleet.connect() as client:
        coordinator = fleet.process("coordinator")
        with progress.progress(Settings(), client, "operation"):
            os.kill(coordinator.pid, signal.SIGSTOP)
            time.sleep(progress.SILENT_S + 1)
            ended_at = time.monotonic()
        waited_s = time.monotonic() - ended_at
        os.kill(coordinator.pid, signal.SIGCONT)
    assert waited_s < 5


def test_a_port_in_use_is_named(up: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        code, _, err = call(*up[:-1], address)
    assert code == 2
    assert f"{address} is in use by another process" in err


def test_a_socket_in_use_is_named_before_anything_is_started(up: list[str], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(str(tmp_path / "s"))
        holder.listen()
        code, _, err = call(*up[:-1], f"unix:{tmp_path}/s")
    assert code == 2
    assert f"unix:{tmp_path}/s is in use by another process" in err
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_gateway_whose_port_is_in_use_says_so(rlctl: LiveFleet, workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        code, _, err = call(*("gateway", "--coordinator", rlctl.endpoint, "--listen", address), *("--workers", workers))
    assert code == 2
    assert f"{address} is in use by another process" in err
    assert "Traceback" not in err


def test_a_stage_whose_coordinator_is_no_address_does_not_start(checkpoint: Callable[[str], str]) -> None:
    where = "http://127.0.0.1:5080"
    code, _, err = call(
        *("stage", "--slot", "a", "--engine", "fake", "--model-path", checkpoint("one"), "--coordinator", where)
    )
    assert code == 2
    assert f"'{where}' is not host:port" in err


def test_down_never_signals_a_process_that_is_not_the_supervisor(up: list[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as stranger:
        fleet_state.write(
            fleet_state.FleetState("default", stranger.pid, "another boot:1", fleet_state.READY, "127.0.0.1:1", "/x")
        )
        code, _, err = call("down")
        assert code == 1
        assert "ended without cleaning up" in err
        assert stranger.poll() is None
        assert stranger.stdin is not None
        stranger.stdin.close()
    assert fleet_state.read("default") is None


def test_two_supervisors_never_share_a_state_directory() -> None:
    entered = threading.Event()
    with fleet_state.claimed("default"), pytest.raises(BlockingIOError), fleet_state.claimed("default"):
        entered.set()
    assert not entered.is_set()
    with fleet_state.claimed("default"):
        pass


def test_a_process_is_told_from_a_later_one_with_its_pid() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        first = fleet_state.identity(process.pid)
        assert first
        assert first == fleet_state.identity(process.pid)
        assert first != fleet_state.identity(os.getpid())
    assert fleet_state.identity(process.pid) == ""

"""A week's failures of one fleet, one after the other, as its operator sees them.

Each test causes a failure, compares what `rlctl`, page, metrics and logs show with the failure's row in the operator
guide, and mends it by the step of that row.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guide_rows import Ran, Row, until
from scraping import Scrape
from trainers import half_way
from up_helpers import known, own_state, rlctl_command

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo import tiny as demo_tiny
from rlctl.launch.metrics_targets import FILE
from rlctl.sdk.blocking import Fleet
from rlctl.v1.results_pb2 import PHASE_KIND_PUBLISH
from rlctl.weights.versions.publish import publish_full

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

TOKEN = "the token of the week"
NAME = "week"
PAIR, SINGLE = "actor-0", "actor-single-0"
RANK = f"{PAIR}.1"


class Week:
    """The fleet, through its operator's eyes, and its trainer."""

    def __init__(self, fleet: Fleet, checkpoint: Path, page: str) -> None:
        self.fleet = fleet
        self.checkpoint = checkpoint
        self.page_url = page
        self.model = demo_tiny.make(seed=1)
        self.publisher = fleet.publisher("actor")
        self.updates = 0

    def update(self) -> str:
        """Publish the next version of the trainer. Returns its label."""
        self.updates += 1
        self.publisher.update(self.model, version=f"step-{self.updates}", pause="retract", deadline_s=60)
        return f"step-{self.updates}"

    def epoch(self) -> int:
        return int(Ran("status", "-o", "json").data["header"]["fleet_epoch"])

    def pid(self, process: str) -> int:
        return known(NAME).processes[process]

    def stages(self) -> dict[str, dict[str, Any]]:
        """Return the rows of `rlctl status`, by slot."""
        rows = Ran("get", "stages", "-o", "json").data
        return {row["registration"]["slot"]: row for row in rows}

    def status(self) -> str:
        """Return `rlctl status` as a terminal shows it, and compare the page and the metrics with it."""
        for _ in range(20):
            before, page, metrics, after = self.states(), self.page(), self.metrics(), self.states()
            if before == after:  # no change between the reads
                break
        assert {slot: state for slot, (state, _) in page.items()} == before
        for slot, state in before.items():
            assert metrics.value("rlctl_stage_state", slot=slot, state=state.lower()) == 1, (slot, state)
        return "\n".join([Ran("status").out, *(why for _, why in page.values())])

    def states(self) -> dict[str, str]:
        return {slot: row["state"].removeprefix("STAGE_STATE_") for slot, row in self.stages().items()}

    def page(self) -> dict[str, tuple[str, str]]:
        """Return state and reason of each stage on the page."""
        call = urllib.request.Request(f"{self.page_url}api/state", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(call, timeout=20) as answer:
            (table,) = (table for table in json.load(answer)["tables"] if table["name"] == "stages")
        rows = [dict(zip(table["headers"], row, strict=True)) for row in table["rows"]]
        return {row["SLOT"]: (row["STATE"], row.get("WHY NOT", "")) for row in rows}

    def metrics(self) -> Scrape:
        targets = json.loads((Path(known(NAME).directory) / FILE).read_text())
        (address,) = next(each["targets"] for each in targets if each["labels"]["process"] == "coordinator")
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
            return Scrape(answer.read().decode())

    def log(self, process: str) -> str:
        """Return what `rlctl logs` shows; each line of a server is JSON and has no traceback."""
        lines = Ran("logs", process, "-n", "200", "-o", "json").data["lines"]
        if process != "supervisor":
            entries = [json.loads(line) for line in lines if line.startswith("{")]
            assert not [entry for entry in entries if "exception" in entry]
            lines = [entry["message"] for entry in entries]
        return "\n".join(lines)

    def until_shown(self, slot: str, *texts: str) -> None:
        until(lambda: all(text in self.shown(slot) for text in texts), f"{slot} does not show {texts}")

    def shown(self, slot: str) -> str:
        """Return state and reason of a stage in `rlctl describe stage`."""
        ran = Ran("describe", "stage", slot)
        return ran.out + ran.err

    def sound(self) -> None:
        """Wait until every engine serves."""

        def serve() -> bool:
            stages = self.stages()
            return set(stages) == {PAIR, SINGLE} and all(stage["routable"] for stage in stages.values())

        until(serve, "the fleet is not sound again")
        until(lambda: set(known(NAME).engines.values()) == {"ready"}, "the supervisor sees no sound fleet")
        assert self.generated()

    def generated(self) -> str:
        return self.fleet.generate("1+2=", model="actor", max_new_tokens=4, timeout_s=30).slot


@pytest.fixture(scope="module")
def week(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Any, Path]) -> Iterator[Week]:
    directory = tmp_path_factory.mktemp("week")
    checkpoint = directory / "checkpoint"
    shutil.copytree(tiny[1], checkpoint)
    (directory / "token").write_text(TOKEN)
    (directory / "token").chmod(0o600)
    file = directory / "fleet.yaml"
    groups = [
        {"worker_type": "regular", "num_gpus": 2, "num_gpus_per_engine": 2},
        {"worker_type": "regular", "name": "single", "num_gpus": 1},
    ]
    options = {"allowed_roots": str(directory)}
    fleet = {
        "name": NAME,
        "hf_checkpoint": str(checkpoint),
        "listen": "127.0.0.1:0",
        "web": "127.0.0.1:0",
        "metrics": True,
        "gateways": "127.0.0.1",
        "auth": {"token_file": str(directory / "token")},
        "restart": {"backoff_s": 0.2, "limit": 2, "within_s": 1800},
    }
    file.write_text(
        json.dumps({"fleet": fleet, "models": [{"name": "actor", "overrides": options, "server_groups": groups}]})
    )
    with pytest.MonkeyPatch.context() as patch, own_state(patch, directory):
        patch.setenv("RLCTL_TOKEN_FILE", str(directory / "token"))
        patch.setenv("RLCTL_LOG_FORMAT", "json")
        patch.setenv("COLUMNS", "400")
        up = rlctl_command("up", str(file), "--detach", "-o", "json", timeout_s=200)
        assert up.returncode == 0, up.stderr
        page = re.search(r"the page of the fleet is at (\S+)", up.stderr)
        assert page is not None
        with rlctl.connect(known(NAME).endpoint, token=TOKEN) as connected:
            observer = Week(connected, checkpoint, page[1])
            observer.update()
            yield observer
            with contextlib.suppress(RlctlError):
                observer.publisher.close()
        assert rlctl_command("down", "--name", NAME, "--yes").returncode == 0
    for log in directory.rglob("logs/*.log"):
        assert "Traceback" not in log.read_text(), log


@pytest.fixture(autouse=True)
def _of_a_sound_fleet(week: Week) -> None:
    week.sound()


def test_an_update_of_another_shape_changes_nothing(week: Week) -> None:
    row = Row("an update has another shape or dtype")
    tensors = list(week.model.state_dict().items())
    name, tensor = tensors[0]
    before = Ran("get", "models", "-o", "json").data
    for wrong, texts in ((tensor[:3, :3], ["(3, 3)", str(tuple(tensor.shape))]), (tensor.long(), ["torch.int64"])):
        with pytest.raises(RlctlError) as caught:
            week.publisher.update([(name, wrong), *tensors[1:]], version="wrong", pause="retract")
        assert caught.value.reason is Reason.FIELD_INVALID
        assert all(text in str(caught.value) for text in (name, *texts)), caught.value
    row.shows()
    assert Ran("get", "models", "-o", "json").data[0]["latest"] == before[0]["latest"]
    assert all(stage["routable"] for stage in week.stages().values())
    assert week.update()


def test_a_trainer_dies_in_a_broadcast_while_another_one_wants_to_update(week: Week, tmp_path: Path) -> None:
    with half_way(known(NAME).endpoint, tmp_path, token=TOKEN, pause="retract"):
        row = Row("two trainers update a model")
        with pytest.raises(RlctlError) as caught:
            week.update()
        assert caught.value.reason is Reason.UPDATE_IN_PROGRESS
        model = Ran("get", "models", "-o", "json").data[0]
        assert model["update_owner"] in str(caught.value)
        assert model["update_id"] in str(caught.value)
        row.step("rlctl weights abort")
        assert "UPDATING" in week.status()
    row = Row("the trainer died in a broadcast")
    until(lambda: all(stage["unhealable"] for stage in week.stages().values()), "no stage is UNHEALABLE")
    row.shows(week.status(), Ran("doctor").out)
    assert set(week.states().values()) == {"DIRTY"}
    assert week.metrics().value("rlctl_stage_unhealable") == 2
    for slot in (PAIR, SINGLE):
        assert "UNHEALABLE" in week.page()[slot][1]
    update = next(each for each in Ran("operations", "-o", "json").data if each["verb"] == "WeightUpdate")
    assert (update["state"], update["error"]["reason"]) == ("OPERATION_STATE_FAILED", "LEASE_EXPIRED")
    assert Ran("heal", PAIR).code == 7, "no source"
    row.step("rlctl heal --checkpoint DIR")
    week.update()  # the trainer, started again


@pytest.mark.long
def test_a_killed_rank_does_not_take_its_slot_out_of_sight(week: Week) -> None:
    row = Row("a rank or a stage process was killed")
    os.kill(week.pid(RANK), signal.SIGKILL)
    week.until_shown(PAIR, "UNREACHABLE", f"{RANK} was ended by SIGKILL")
    row.shows(week.status(), NAME=RANK)
    assert set(week.states()) == {PAIR, SINGLE}
    assert week.metrics().value("rlctl_stage_engine_failures", slot=PAIR) == 1
    doctor = {each["subject"]: each for each in Ran("doctor", "-o", "json").data if each["check"] == "links"}
    assert doctor[f"stage {PAIR}"]["verdict"] == "failure"
    assert f"rlctl logs {PAIR}" in doctor[f"stage {PAIR}"]["mend"]
    assert week.update(), "updates go on at the other engine"
    assert week.generated() == SINGLE
    assert Ran("pause", "--yes").code == 0
    assert Ran("continue", "--yes").code == 0
    assert f"{RANK} was ended by SIGKILL" in week.log("supervisor")
    week.sound()  # by itself, at the published version


def test_a_coordinator_is_stopped_and_then_killed(week: Week) -> None:
    row = Row("the coordinator is stopped")
    epoch, pid = week.epoch(), week.pid("coordinator")
    endpoint = known(NAME).endpoint
    os.kill(pid, signal.SIGSTOP)
    try:
        # By processes of their own: this one has a connection, and gRPC shares it.
        stopped, doctor = rlctl_command("status"), rlctl_command("--timeout", "5", "doctor", "-o", "json")
        assert stopped.returncode == 5
        row.shows(stopped.stderr)
        (finding,) = [each for each in json.loads(doctor.stdout) if each["check"] == "coordinator"]
        assert (doctor.returncode, finding["verdict"]) == (1, "failure")
        for advised in ("kill -CONT PID", "kill -9 PID", "rlctl logs coordinator"):
            assert advised in finding["mend"]
            assert f"`{advised}`" in row.mend
        assert f'"pid": {pid}' in Ran("logs", "coordinator").out
    finally:
        os.kill(pid, signal.SIGKILL)
    row = Row("the coordinator was killed")
    until(lambda: week.pid("coordinator") != pid, "no new coordinator")
    until(lambda: Ran("status").code == 0, "the coordinator does not answer")
    row.shows(week.log("supervisor"))
    assert week.epoch() == epoch + 1
    assert known(NAME).endpoint == endpoint
    week.update()


def test_a_killed_gateway_is_back_at_its_address(week: Week) -> None:
    row = Row("a gateway was killed")
    url, pid = known(NAME).gateways["actor"], week.pid("gateway-actor")
    os.kill(pid, signal.SIGKILL)
    until(lambda: week.pid("gateway-actor") != pid, "no new gateway")
    row.shows(week.log("supervisor"), MODEL="actor")

    def answers() -> bool:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200  # type: ignore[no-any-return]
        return False

    until(lambda: known(NAME).gateways == {"actor": url}, "the gateway has another address")
    until(answers, "the gateway does not answer")


@contextlib.contextmanager
def full_disk(pid: int, least: int = 0) -> Iterator[None]:
    """Refuse a process further bytes in files of this size, as a quota does."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (least, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit")
def test_the_disk_of_the_journal_is_full(week: Week) -> None:
    row = Row("the disk of the journal is full")
    with full_disk(week.pid("coordinator")):
        refused = Ran("pause", "--yes", "-o", "json")
        assert json.loads(refused.err)["error"]["reason"] == "JOURNAL_FAILED", refused.err
        assert refused.code != 0
        with pytest.raises(RlctlError) as caught:
            week.update()
        assert caught.value.reason is Reason.JOURNAL_FAILED
        row.shows()
        assert all(stage["routable"] for stage in week.stages().values())
        assert week.generated()
        state = [each for each in Ran("doctor", "-o", "json").data if each["check"] == "state"]
        assert str(Path(known(NAME).directory).parent) in state[0]["subject"]
    week.update()
    week.status()


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit")
def test_a_disk_of_checkpoints_is_full(week: Week, tmp_path: Path) -> None:
    row = Row("a disk of checkpoints is full")
    versions, local = week.checkpoint.parent / "versions", week.checkpoint.parent / "local"
    publish_full(versions, week.model, version="on-disk", sequence=1000, files_from=week.checkpoint)
    pull = ["weights", "pull", "--source-dir", str(versions), "--local-checkpoint-dir", str(local)]
    pull += ["--target-version", "on-disk", "--slot", SINGLE, "--yes"]
    with full_disk(week.pid(SINGLE), 20_000):
        failed = Ran(*pull, "-o", "json")
        assert failed.code == 1
        latest = Ran("operations", "-o", "json").data[0]
        assert (latest["verb"], latest["error"]["reason"]) == ("PullWeights", "DISK_FULL"), latest
        assert str(local) in latest["error"]["message"]
        row.shows()
    assert Ran(*pull).code == 0
    assert (local / "model.safetensors").exists()


def test_a_wrong_token_is_refused_and_on_record(week: Week, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("a token is wrong or missing")
    with monkeypatch.context() as environment:
        environment.setenv("RLCTL_TOKEN", "another")
        environment.delenv("RLCTL_TOKEN_FILE")
        wrong = Ran("status", "-o", "json")
        environment.delenv("RLCTL_TOKEN")
        missing = Ran("status", "-o", "json")
    assert (wrong.code, json.loads(wrong.err)["error"]["reason"]) == (2, "TOKEN_INVALID")
    assert (missing.code, json.loads(missing.err)["error"]["reason"]) == (2, "TOKEN_MISSING")
    assert "`rlctl audit --denied`" in row.seen
    assert {each["reason"] for each in Ran("audit", "--denied", "-o", "json").data} >= {"TOKEN_INVALID"}
    credentials = base64.b64encode(b"operator:another").decode()
    call = urllib.request.Request(f"{week.page_url}api/state", headers={"Authorization": f"Basic {credentials}"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(call, timeout=20)
    with refused.value as answer:
        assert answer.code == 401


@pytest.mark.long
def test_a_stopped_stage_is_replaced(week: Week) -> None:
    row = Row("a stage is stopped (SIGSTOP, suspended host, paging)")
    pid = week.pid(SINGLE)
    os.kill(pid, signal.SIGSTOP)
    try:
        week.until_shown(SINGLE, "UNREACHABLE")
        assert "was ended by" not in week.shown(SINGLE)
        assert re.search(rf"^0 .* {pid} ", week.shown(SINGLE), re.MULTILINE), week.shown(SINGLE)
        label = week.update()
        update = next(each for each in Ran("operations", "-o", "json").data if each["verb"] == "WeightUpdate")
        timeline = week.fleet.operation(update["operation_id"]).timeline
        (phase,) = (phase for phase in timeline.phases if phase.kind == PHASE_KIND_PUBLISH)
        publish = Row("a publish takes up to 10 s")
        if phase.duration.ToSeconds():  # 0 on a machine so slow that the lease had ended
            publish.shows(week.log("coordinator"))
            assert f"serving leases: {SINGLE}" in week.log("coordinator")
        week.status()
        replaced = Ran(*row.step("rlctl restart SLOT", SLOT=SINGLE), "--yes")
        assert replaced.code == 0, replaced.err
        assert "they are ended" not in week.log("supervisor"), "no wait for requests of a stage without a lease"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert week.pid(SINGLE) != pid
    week.sound()
    assert {stage["report"]["weight_version"]["label"] for stage in week.stages().values()} == {label}


@pytest.mark.long
def test_an_engine_without_its_checkpoint_is_given_up_and_the_others_go_on(week: Week) -> None:
    row, removed = Row("an engine does not load its checkpoint"), Row("a checkpoint was removed or moved")
    weights = week.checkpoint / "model.safetensors"
    with moved(weights):
        reload = Ran("weights", "update", "--model", "actor", "--model-path", str(week.checkpoint), "-o", "json")
        assert reload.code != 0
        assert json.loads(reload.out)["error"]["reason"] == "CHECKPOINT_NOT_FOUND", reload.out
        assert str(week.checkpoint) in reload.out
        assert week.generated(), "running engines serve on"
        os.kill(week.pid(RANK), signal.SIGKILL)
        week.until_shown(PAIR, "FAILED", "crash loop, not started again")
        described = week.shown(PAIR)
        assert "CHECKPOINT_NOT_FOUND" in described
        assert str(week.checkpoint) in described
        assert "Last lines of the engine's log" in described
        row.shows(week.status(), described)
        assert f"rlctl restart {PAIR}" in described
        assert week.metrics().value("rlctl_stage_engine_failures", slot=PAIR) == 3
        (finding,) = [each for each in Ran("doctor", "-o", "json").data if each["subject"] == f"stage {PAIR}"]
        assert (finding["verdict"], f"rlctl restart {PAIR}" in finding["mend"]) == ("failure", True)
        # One engine that is given up does not end the training.
        assert week.update()
        assert Ran("pause", "--yes").code == 0
        assert Ran("continue", "--yes").code == 0
    command = row.step("rlctl restart SLOT", SLOT=PAIR)
    assert command == removed.step("rlctl restart SLOT", SLOT=PAIR)
    restarted = Ran(*command, "--yes")
    assert restarted.code == 0, restarted.err
    week.sound()


@contextlib.contextmanager
def moved(file: Path) -> Iterator[None]:
    elsewhere = file.with_suffix(".moved")
    file.rename(elsewhere)
    try:
        yield
    finally:
        elsewhere.rename(file)

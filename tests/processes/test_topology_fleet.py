"""A topology file brought up for real, changed while it serves, and kept up."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from forking import INTERPRETERS
from scraping import scrape
from up_helpers import EXAMPLE, WAIT_S, Load, known, own_state, rlctl_command, until, when

from rlctl.contract.errors import NotFound
from rlctl.integrations.slime import get_model_url, set_model_routers
from rlctl.launch.metrics_targets import FILE
from rlctl.sdk.blocking import connect

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with own_state(monkeypatch, tmp_path):
        yield


def test_three_models_and_a_group_that_grows_under_load_and_shrinks_again(
    tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    model, checkpoint = tiny
    text = EXAMPLE.read_text().replace("/tmp/tiny", str(checkpoint))
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    up = rlctl_command("up", str(file), "--detach", "--listen", "127.0.0.1:0", "-o", "json")
    assert up.returncode == 0, up.stderr
    first = json.loads(up.stdout)
    assert first["engines"] == {"actor-0": "ready", "ref-0": "ready", "reward-0": "ready"}
    frozen = {slot: pid for slot, pid in first["processes"].items() if not slot.startswith("actor")}

    file.write_text(text.replace("num_gpus: 2\n", "num_gpus: 4\n", 1).replace("num_gpus: 5", "num_gpus: 7"))
    with connect(first["endpoint"]) as fleet, Load(fleet, "actor") as load:
        publisher = fleet.publisher("actor")
        for parameter in model.parameters():
            parameter.data.mul_(0.999)
        load.least = publisher.update(model, version="step-1", pause="retract").version.sequence
        assert not load.wrong

        plan = json.loads(rlctl_command("plan", str(file), "--listen", "127.0.0.1:0", "-o", "json").stdout)
        assert {change["slot"]: change["action"] for change in plan["changes"]} == {
            "actor-0": "unchanged", "actor-1": "add", "ref-0": "unchanged", "reward-0": "unchanged",
        }  # fmt: skip
        before = load.done
        # What is not said again stays: where the coordinator listens.
        grown = rlctl_command("up", str(file), "-o", "json")
        assert grown.returncode == 0, grown.stderr
        assert load.done > before, "nothing was served meanwhile"
        stages = {stage.registration.slot: stage for stage in fleet.status("actor").stages}
        assert stages.keys() == {"actor-0", "actor-1"}
        assert all(stage.routable and stage.report.weight_version.label == "step-1" for stage in stages.values())
        assert len({stage.report.model_digest for stage in stages.values()}) == 1
        # Both take the next update.
        load.least = publisher.update(model, version="step-2", pause="retract").version.sequence

        file.write_text(text)
        shrunk = rlctl_command("up", str(file), "--listen", "127.0.0.1:0", "-o", "json", "--yes")
        assert shrunk.returncode == 0, shrunk.stderr
        assert [stage.registration.slot for stage in fleet.status("actor").stages] == ["actor-0"]
        publisher.close()
    assert not load.wrong
    last = json.loads(shrunk.stdout)
    assert {slot: pid for slot, pid in last["processes"].items() if not slot.startswith("actor")} == frozen
    assert last["processes"]["actor-0"] == first["processes"]["actor-0"]
    assert rlctl_command("down", "--name", "multi-model").returncode == 0


def test_a_model_is_added_to_a_fleet_that_serves_and_taken_out_again(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    model, checkpoint = tiny
    file = tmp_path / "fleet.yaml"

    def up(*models: dict[str, Any], flags: Sequence[str] = ()) -> dict[str, Any]:
        groups = {"server_groups": [{"worker_type": "regular", "num_gpus": 1}]}
        fleet = {"name": "adds", "hf_checkpoint": str(checkpoint), "listen": "127.0.0.1:0", "gateways": "127.0.0.1"}
        file.write_text(json.dumps({"fleet": fleet, "models": [{**groups, **each} for each in models]}))
        ran = rlctl_command("up", str(file), "-o", "json", *flags)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)  # type: ignore[no-any-return]

    actor, critic = {"name": "actor"}, {"name": "critic", "weight_version": "base"}
    first = up(actor, flags=["--detach"])
    args = argparse.Namespace()
    with connect(first["endpoint"]) as fleet, Load(fleet, "actor") as load:
        with contextlib.closing(fleet.publisher("actor")) as publisher:
            load.least = publisher.update(model, version="step-1", pause="retract").version.sequence
        (before,) = fleet.status("actor").stages
        served = load.done
        added = up(actor, critic)
        assert load.done > served, "nothing was served meanwhile"
        stages = {stage.registration.slot: stage for stage in fleet.status().stages}
        assert stages.keys() == {"actor-0", "critic-0"}
        assert stages["actor-0"].incarnation == before.incarnation
        assert stages["actor-0"].report.weight_version == before.report.weight_version
        assert stages["critic-0"].routable
        assert stages["critic-0"].report.weight_version.label == "base"
        # It is a model like the others: found by slime's code, and updated while the other serves.
        set_model_routers(args, "adds")
        assert asked(get_model_url(args, "critic", "/generate"))["meta_info"]["weight_version"] == "base"
        with contextlib.closing(fleet.publisher("critic")) as publisher:
            publisher.update(model, version="critic-1", pause="retract")
        assert asked(get_model_url(args, "critic", "/generate"))["meta_info"]["weight_version"] == "critic-1"
        assert asked(get_model_url(args, "actor", "/generate"))["meta_info"]["weight_version"] == "step-1"

        removed = up(actor, flags=["--yes"])
        assert [stage.registration.slot for stage in fleet.status().stages] == ["actor-0"]
        set_model_routers(args, "adds")
        with pytest.raises(NotFound, match=r"no model 'critic' has a gateway; there are: actor"):
            get_model_url(args, "critic")
    assert load.wrong == []
    kept = first["processes"].keys()
    assert {name: added["processes"][name] for name in kept} == first["processes"] == removed["processes"]
    gone = added["processes"].keys() - kept
    assert gone == {"critic-0", "gateway-critic"}
    assert not any(psutil.pid_exists(added["processes"][name]) for name in gone)
    assert rlctl_command("down", "--name", "adds").returncode == 0


@pytest.fixture
def fleet_of_fakes(tmp_path: Path, checkpoint: Callable[[str], str]) -> Callable[..., Path]:
    """Writes a file for two fake engines: ``fleet_of_fakes(pace=0.01)``."""

    def write(
        engines: int = 2,
        gateways: str = "",
        router: str = "",
        also: Sequence[str] = (),
        min_healthy: str = "",
        **overrides: object,
    ) -> Path:
        file = tmp_path / "fakes.yaml"
        group = {"worker_type": "regular", "num_gpus": engines, "overrides": overrides}
        model = {"name": "actor", "engine": "fake", "model_path": checkpoint("one"), "server_groups": [group]}
        if min_healthy:
            model["min_healthy"] = min_healthy
        restart = {"backoff_s": 0.1}
        fleet = {"name": "fakes", "listen": "127.0.0.1:0", "restart": restart, "hf_checkpoint": checkpoint("one")}
        fleet["metrics"] = True
        if gateways:
            fleet["gateways"] = gateways
        if router:
            fleet["router"] = {"backend": router}
        others = [{**model, "name": name, "server_groups": [{**group, "num_gpus": 1}]} for name in also]
        file.write_text(json.dumps({"fleet": fleet, "models": [model, *others]}))  # JSON is YAML
        return file

    return write


def metrics_targets() -> list[dict[str, Any]]:
    return json.loads((Path(known("fakes").directory) / FILE).read_text())


def test_what_ends_is_started_again_and_nothing_outlives_the_supervisor(
    fleet_of_fakes: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERPRETERS, "1")  # forked processes are no children of the supervisor
    up = rlctl_command("up", str(fleet_of_fakes()), "--detach", "-o", "json")
    assert up.returncode == 0, up.stderr
    first = json.loads(up.stdout)
    os.kill(first["processes"]["actor-1"], signal.SIGKILL)
    with connect(first["endpoint"]) as fleet:
        when(fleet, lambda now: "actor-1" in now and now["actor-1"].incarnation == 2 and now["actor-1"].routable)
        until(lambda: known("fakes").engines["actor-1"] == "ready", "the supervisor has not seen it")
        assert known("fakes").processes["actor-1"] != first["processes"]["actor-1"]
        assert known("fakes").processes["actor-0"] == first["processes"]["actor-0"]
    os.kill(first["processes"]["coordinator"], signal.SIGKILL)
    until(lambda: known("fakes").processes["coordinator"] != first["processes"]["coordinator"], "no new coordinator")
    with connect(first["endpoint"]) as fleet:
        when(fleet, lambda now: sum(stage.routable for stage in now.values()) == 2)
        assert fleet.status().header.fleet_epoch == 2

    supervisor = psutil.Process(known("fakes").pid)
    children = supervisor.children(recursive=True)
    assert len(children) == 3
    supervisor.kill()
    assert psutil.wait_procs(children, timeout=WAIT_S)[1] == []


def test_a_fleet_whose_supervisor_died_serves_no_checkpoint_in_place_of_the_trainers_version(
    tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    model, checkpoint = tiny
    command = ["up", "--hf-checkpoint", str(checkpoint), "--engine", "torch", "--listen", "127.0.0.1:0", "-d"]
    up = rlctl_command(*command, "-o", "json")
    assert up.returncode == 0, up.stderr
    first = json.loads(up.stdout)
    with connect(first["endpoint"]) as fleet, contextlib.closing(fleet.publisher("actor")) as publisher:
        publisher.update(model, version="a-7")
    os.kill(first["pid"], signal.SIGKILL)

    again = rlctl_command(*command, "-o", "json")
    assert again.returncode == 0, again.stderr
    second = json.loads(again.stdout)
    assert "goes on (epoch 2): actor at a-7#2" in again.stderr
    assert "up, stale, waits for the trainer's next update" in again.stderr
    with connect(second["endpoint"]) as fleet:
        [stage] = fleet.status().stages
        assert (stage.routable, stage.unhealable) == (False, True)
        assert "version 'a-7' of actor is in no checkpoint" in stage.not_routable
        with contextlib.closing(fleet.publisher("actor")) as publisher:
            assert publisher.update(model, version="a-8").version.sequence == 3
        assert fleet.generate("1+2=", model="actor").samples[0].versions[0].version.label == "a-8"


def test_a_model_that_is_healed_by_hand_has_its_stale_engine_up_and_out_until_somebody_asks(
    fleet_of_fakes: Callable[..., Path], checkpoint: Callable[[str], str]
) -> None:
    file = fleet_of_fakes()
    data = json.loads(file.read_text())
    data["models"][0]["healing"] = "by_hand"
    file.write_text(json.dumps(data))
    up = rlctl_command("up", str(file), "--detach", "-o", "json")
    assert up.returncode == 0, up.stderr
    first = json.loads(up.stdout)
    assert set(first["engines"].values()) == {"ready"}, "what holds the published version needs no heal"
    with connect(first["endpoint"]) as fleet:
        fleet.update_weights_from_disk(checkpoint("two"), version="two")
        os.kill(first["processes"]["actor-1"], signal.SIGKILL)
        until(lambda: known("fakes").engines["actor-1"] == "stale", "the supervisor has not seen that it waits")
        when(fleet, lambda now: now["actor-0"].routable and now["actor-1"].not_routable.startswith("STALE"))
        # `up` has nothing to do and says how it is, in place of waiting for what nobody does.
        again = rlctl_command("up", str(file), "-o", "json")
        assert (again.returncode, json.loads(again.stdout)["engines"]["actor-1"]) == (0, "stale"), again.stderr
        assert rlctl_command("heal", "actor-1", "--endpoint", first["endpoint"]).returncode == 0
        when(fleet, lambda now: now["actor-1"].routable)
        until(lambda: known("fakes").engines["actor-1"] == "ready", "the supervisor has not seen the heal")
        # The other way, for the fleet that runs: what waits is healed, and what was ready is not touched.
        before = known("fakes").processes
        os.kill(before["actor-1"], signal.SIGKILL)
        until(lambda: known("fakes").engines["actor-1"] == "stale", "it does not wait")
        data["models"][0]["healing"] = "automatic"
        file.write_text(json.dumps(data))
        changed = rlctl_command("up", str(file), "-o", "json")
        assert (changed.returncode, json.loads(changed.stdout)["engines"]["actor-1"]) == (0, "ready"), changed.stderr
        assert {name: known("fakes").processes[name] for name in ("coordinator", "actor-0")} == {
            name: before[name] for name in ("coordinator", "actor-0")
        }
        # And back, which a coordinator that is started again goes by too.
        data["models"][0]["healing"] = "by_hand"
        file.write_text(json.dumps(data))
        assert rlctl_command("up", str(file), "-o", "json").returncode == 0
        os.kill(before["coordinator"], signal.SIGKILL)
        until(lambda: known("fakes").processes["coordinator"] != before["coordinator"], "no new coordinator")
        when(fleet, lambda now: sum(stage.routable for stage in now.values()) == 2)
        os.kill(known("fakes").processes["actor-1"], signal.SIGKILL)
        until(lambda: known("fakes").engines["actor-1"] == "stale", "it was healed")


def test_a_change_replaces_engines_one_after_the_other(fleet_of_fakes: Callable[..., Path]) -> None:
    assert rlctl_command("up", str(fleet_of_fakes()), "--detach").returncode == 0
    first = known("fakes")
    with connect(first.endpoint) as fleet, Load(fleet, "actor") as load:
        until(lambda: load.done, "nothing was generated")
        changed = rlctl_command("up", str(fleet_of_fakes(pace=0.002)))
        assert changed.returncode == 0, changed.stderr
        assert "actor-0: restart (options)" in changed.stderr
    assert load.wrong == []
    told = changed.stderr.splitlines()
    steps = [line for line in told if line.endswith((": draining", "stopped")) or "ready at" in line]
    order = [line.split(":")[0] for line in steps]
    assert order in (["actor-0"] * 3 + ["actor-1"] * 3, ["actor-1"] * 3 + ["actor-0"] * 3)
    now = known("fakes")
    assert now.processes["actor-0"] != first.processes["actor-0"]
    again = rlctl_command("up", str(fleet_of_fakes(pace=0.002)))
    assert "0 engines changed" in again.stderr
    assert known("fakes").processes == now.processes
    added = rlctl_command("up", str(fleet_of_fakes(pace=0.002, also=["critic"])))
    assert "1 engine changed" in added.stderr, added.stderr
    after = known("fakes").processes
    assert {name: after[name] for name in now.processes} == now.processes, "another model disturbs nobody"
    with connect(first.endpoint) as fleet:
        assert fleet.generate("x", model="critic", max_new_tokens=2).slot == "critic-0"


def test_restarts_and_changes_keep_min_healthy(fleet_of_fakes: Callable[..., Path]) -> None:
    up = rlctl_command("up", str(fleet_of_fakes(min_healthy="100%")), "--detach")
    assert up.returncode == 0, up.stderr
    first = known("fakes")
    with connect(first.endpoint) as fleet:
        assert fleet.status().models[0].min_healthy_stages == 2
        for command in (["restart", "actor-0", "--name", "fakes", "--yes"], ["up", str(fleet_of_fakes(
            min_healthy="100%", pace=0.002)), "--yes"]):  # fmt: skip
            refused = rlctl_command(*command)
            assert refused.returncode == 7, refused.stderr
            assert "MIN_HEALTHY" in refused.stderr
            assert "actor has 2 engines and min_healthy 100%: actor-0 can never be replaced" in refused.stderr
        assert known("fakes").processes == first.processes
        forced = rlctl_command("restart", "actor-0", "--name", "fakes", "--yes", "--force")
        assert forced.returncode == 0, forced.stderr
        assert known("fakes").processes["actor-0"] != first.processes["actor-0"]
        # The limit of an operator is not in the topology: the coordinator refuses the drain, and no wait would help.
        assert rlctl_command("up", str(fleet_of_fakes()), "--yes").returncode == 0
        assert fleet.status().models[0].min_healthy_stages == 0
        fleet.set_min_healthy("actor", "2")
        refused = rlctl_command("restart", "actor-0", "--name", "fakes", "--yes")
        assert refused.returncode == 7, refused.stderr
        assert "would have 1 without actor-0" in refused.stderr
        # With one engine to spare, an engine is replaced only while the other one is routable.
        fleet.set_enabled(["actor-1"], False, force=True)
        waits = rlctl_command("up", str(fleet_of_fakes(min_healthy="1", pace=0.002)), "--yes", "--timeout", "8s")
        assert waits.returncode == 6, waits.stderr
        assert "actor-0: waits for its drain: actor has 1 of 2 stages routable" in waits.stderr
        assert fleet.status().models[0].min_healthy_stages == 1
        fleet.set_enabled(["actor-1"], True)
        done = rlctl_command("up", str(fleet_of_fakes(min_healthy="1", pace=0.002)), "--yes")
        assert done.returncode == 0, done.stderr
        assert sum(stage.routable for stage in fleet.status().stages) == 2
        unlimited = rlctl_command("up", str(fleet_of_fakes(pace=0.002)), "--yes")
        assert unlimited.returncode == 0, unlimited.stderr
        assert fleet.status().models[0].min_healthy_stages == 0


def test_removals_wait_for_the_limit_of_the_engines_that_are_registered(fleet_of_fakes: Callable[..., Path]) -> None:
    up = rlctl_command("up", str(fleet_of_fakes(engines=4, min_healthy="50%")), "--detach")
    assert up.returncode == 0, up.stderr
    # The third engine may leave once the first is gone: 50% of 4 engines are 2, and of 2 engines 1.
    fewer = rlctl_command("up", str(fleet_of_fakes(engines=1, min_healthy="50%")), "--yes")
    assert fewer.returncode == 0, fewer.stderr
    assert "waits for its drain: actor has 2 of 4 stages routable" in fewer.stderr
    first = known("fakes")
    assert list(first.engines) == ["actor-0"]
    # 100% of all registered engines includes an engine that is removed.
    assert rlctl_command("up", str(fleet_of_fakes(engines=2, min_healthy="100%")), "--yes").returncode == 0
    never = rlctl_command("up", str(fleet_of_fakes(engines=1, min_healthy="100%")), "--yes")
    assert never.returncode == 7, never.stderr
    assert "actor has 2 engines and min_healthy 100%: actor-1 can never be removed" in never.stderr
    assert sorted(known("fakes").engines) == ["actor-0", "actor-1"]


def test_an_engine_that_does_not_come_up_is_told_and_the_others_serve_on(
    fleet_of_fakes: Callable[..., Path], checkpoint: Callable[[str], str]
) -> None:
    file = fleet_of_fakes()
    assert rlctl_command("up", str(file), "--detach").returncode == 0
    before = known("fakes")
    grown = str(fleet_of_fakes(engines=3))
    (Path(checkpoint("one")) / "weights.txt").unlink()
    failed = rlctl_command("up", grown)
    assert failed.returncode == 1
    assert "actor-2 ended with 2: CHECKPOINT_NOT_FOUND" in failed.stderr
    assert "logs/actor-2.log" in failed.stderr
    assert known("fakes").processes["actor-0"] == before.processes["actor-0"]
    checkpoint("one")
    until(lambda: known("fakes").engines.get("actor-2") == "ready", "it was not tried again")
    refused = rlctl_command("up", str(file), "--listen", "127.0.0.1:1")
    assert refused.returncode == 2
    assert "FIELD_CONFLICT" in refused.stderr


def asked(url: str) -> dict[str, Any]:
    body = json.dumps({"text": "1+2=", "sampling_params": {"max_new_tokens": 4}}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def test_a_model_has_a_gateway_that_slimes_code_finds_and_that_is_kept_at_its_address(
    fleet_of_fakes: Callable[..., Path],
) -> None:
    up = rlctl_command("up", str(fleet_of_fakes(gateways="127.0.0.1")), "--detach")
    assert up.returncode == 0, up.stderr
    args = argparse.Namespace()
    set_model_routers(args, "fakes")
    url = get_model_url(args, "actor", "/generate")
    assert asked(url)["meta_info"]["completion_tokens"] == 4
    with pytest.raises(NotFound, match=r"no model 'critic' has a gateway; there are: actor"):
        get_model_url(args, "critic")
    seen = {target["labels"]["process"]: asyncio.run(scrape(target["targets"][0])) for target in metrics_targets()}
    assert seen["coordinator"].value("rlctl_stage_routable") == 2
    assert {seen[slot].value("rlctl_serving_version") for slot in ("actor-0", "actor-1")} == {1}
    assert seen["gateway-actor"].value("rlctl_gateway_samples_total", outcome="ok") == 1

    # The same with a router in front of it, which ends with the gateway.
    routed = rlctl_command("up", str(fleet_of_fakes(gateways="127.0.0.1", router="sglang-router")))
    assert routed.returncode == 0, routed.stderr
    set_model_routers(args, "fakes")
    url = get_model_url(args, "actor", "/generate")
    assert url.removesuffix("/generate") == known("fakes").routers["actor"] != known("fakes").gateways["actor"]
    assert asked(url)["meta_info"]["completion_tokens"] == 4
    before = known("fakes").processes["gateway-actor"]
    (router,) = psutil.Process(before).children()
    assert router.name() == "sglang::router"
    os.kill(before, signal.SIGKILL)
    until(lambda: known("fakes").processes.get("gateway-actor") not in (None, before), "it was not started again")
    assert psutil.wait_procs([router], timeout=WAIT_S)[1] == []
    until(lambda: known("fakes").gateways, "it does not answer again")
    assert asked(url)["meta_info"]["completion_tokens"] == 4

    without = rlctl_command("up", str(fleet_of_fakes()))
    assert without.returncode == 0, without.stderr
    assert "gateway-actor: stopped" in without.stderr
    assert known("fakes").gateways == known("fakes").routers == {}
    assert not psutil.pid_exists(before)

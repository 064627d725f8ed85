"""``rlctl validate`` and ``plan``, and slime's flags as slime takes them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import Cli

from rlctl.contract.errors import InvalidRequest
from rlctl.launch.deployment import Deployment
from rlctl.launch.interface.spec import EngineSpec
from rlctl.launch.supervisor import fleet_state
from rlctl.runtime.addresses import split

ADDRESSES = "--rollout-external-engine-addrs"
EXAMPLES = Path(__file__).parents[2] / "examples"

BROKEN = """\
sglang:
  - name: actor
    update_weight: true
    server_groups:
      - worker_type: regular
        num_gpus: 5
        num_gpus_per_engine: 2
"""


@pytest.fixture
def broken(tmp_path: Path) -> str:
    file = tmp_path / "broken.yaml"
    file.write_text(BROKEN)
    return str(file)


def test_validate_tells_every_problem_with_its_line_and_exits_2(cli: Cli, broken: str) -> None:
    ran = cli("validate", broken, "--hf-checkpoint", "/m")
    assert ran.code == 2
    assert ran.out.splitlines() == [
        f"{broken}:3: sglang[0].update_weight: there is no such key; did you mean 'update_weights'?",
        f"{broken}:6: sglang[0].server_groups[0].num_gpus: 5 is not divisible by num_gpus_per_engine 2: "
        "2 engines leave 1 over",
    ]
    assert ran.err == "2 errors\n"


def test_the_reason_of_several_problems_stands_above_them(cli: Cli, broken: str) -> None:
    """Below the last one it would seem to be of that one."""
    first, *problems, _ = cli("plan", broken, "--hf-checkpoint", "/m").err.splitlines()
    assert first == f"Error: 2 problems in {broken}  (TOPOLOGY_INVALID)"
    assert [problem.strip() for problem in problems] == cli(
        "validate", broken, "--hf-checkpoint", "/m"
    ).out.splitlines()


def test_problems_are_data(cli: Cli, broken: str) -> None:
    ran = cli("validate", broken, "--hf-checkpoint", "/m", "-o", "json")
    assert ran.code == 2
    assert [(problem["line"], problem["key"], problem["severity"]) for problem in ran.data] == [
        (3, "sglang[0].update_weight", "error"),
        (6, "sglang[0].server_groups[0].num_gpus", "error"),
    ]
    for command in ("plan", "up"):
        error = cli(command, broken, "--hf-checkpoint", "/m", "-o", "json").error
        assert error["reason"] == "TOPOLOGY_INVALID"
        assert len(error["metadata"]) == 2


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_every_example_is_valid(cli: Cli, name: str) -> None:
    ran = cli("validate", str(EXAMPLES / name), "--hf-checkpoint", "/m")
    assert [line for line in ran.out.splitlines() if ": warning: " not in line] == []
    assert ran.code == 0


def test_validate_without_problems_says_what_there_is(cli: Cli) -> None:
    ran = cli("validate", str(EXAMPLES / "multi-model.yaml"))
    assert (ran.code, ran.out) == (0, "")
    assert "valid: 3 models, 3 engines, 5 GPUs" in ran.err
    assert cli("validate", str(EXAMPLES / "multi-model.yaml"), "-o", "json").data == []
    one = cli("validate", "--hf-checkpoint", "/m", "--rollout-num-gpus", "1")
    assert "valid: 1 model, 1 engine, 1 GPU\n" in one.err


def test_the_schema_is_printed_for_editors(cli: Cli) -> None:
    schema = cli("validate", "--json-schema").data
    assert schema["properties"]["sglang"]["items"]["properties"]["server_groups"]


def test_a_plan_shows_engines_ranks_and_commands(cli: Cli) -> None:
    ran = cli(
        "plan", str(EXAMPLES / "slime-pd.yaml"), "--hf-checkpoint", "/m", "--rollout-num-gpus", "16", "-o", "wide"
    )
    assert ran.code == 0, ran.err
    assert "actor-decode-2" in ran.out
    assert "1:0-3" in ran.out
    assert "disaggregation_mode=decode" in ran.out
    assert "rlctl stage --engine sglang --model-path /m --tp-size 4" in ran.out
    assert cli("plan", str(EXAMPLES / "slime-pd.yaml"), "--hf-checkpoint", "/m", "--rollout-num-gpus", "15").code == 2


def test_what_cannot_be_run_is_refused_before_anything_starts(cli: Cli, tmp_path: Path) -> None:
    encoders = tmp_path / "encoders.yaml"
    text = (EXAMPLES / "slime-pd.yaml").read_text()
    encoders.write_text(text + "      - {worker_type: encoder, num_gpus: 1}\n")
    ran = cli("up", str(encoders), "--hf-checkpoint", "/m", "-o", "json")
    assert ran.error["reason"] == "UNSUPPORTED"
    ran = cli("up", "--hf-checkpoint", "/nowhere", "-o", "json")
    assert ran.error["reason"] == "TOPOLOGY_INVALID"
    assert "there is no directory /nowhere" in ran.error["message"]
    assert not (tmp_path / "state").exists()


def test_the_plan_against_a_fleet_that_is_up(cli: Cli, checkpoint: Callable[[str], str], tmp_path: Path) -> None:
    """What the supervisor wrote is compared; this process stands for it."""
    path = checkpoint("one")
    running = [EngineSpec(f"actor-{i}", path, engine="fake", gpus=(i,)) for i in (0, 1)]
    running.append(EngineSpec("old-0", path, engine="fake", gpus=(2,)))
    deployment = Deployment("lab", "127.0.0.1:0", tuple(running), insecure=True).data
    pid = os.getpid()
    present = fleet_state.FleetState(
        "lab", pid, fleet_state.identity(pid), fleet_state.READY, "127.0.0.1:9", str(tmp_path)
    )
    fleet_state.write(fleet_state.FleetState(**{**vars(present), "deployment": json.loads(json.dumps(deployment))}))
    file = tmp_path / "fleet.yaml"
    group = {"worker_type": "regular", "num_gpus": 3}
    model = {"name": "actor", "engine": "fake", "model_path": path, "server_groups": [group]}
    other = {**model, "name": "ref", "update_weights": False, "server_groups": [{**group, "num_gpus": 1}]}
    file.write_text(json.dumps({"fleet": {"name": "lab", "hf_checkpoint": path}, "models": [model, other]}))
    plan = cli("plan", str(file), "-o", "json").data
    assert {change["slot"]: change["action"] for change in plan["changes"]} == {
        "actor-0": "unchanged",
        "actor-1": "unchanged",
        "actor-2": "add",
        "ref-0": "add",
        "old-0": "remove",
    }
    flags = ("--name", "lab", "--hf-checkpoint", path, "--engine", "fake")
    (obstacle,) = cli("plan", *flags, "-o", "json").data["obstacles"]
    assert obstacle["message"] == "fleet 'lab' is up already; only `rlctl up FILE` changes it"
    assert "fleet 'lab' is up already" in cli("up", *flags).err
    assert "no fleet 'labs' is up on this machine; fleets that are up: 'lab' at" in cli("down", "--name", "labs").err
    model["overrides"] = {"pace": 0.5}
    file.write_text(json.dumps({"fleet": {"name": "lab", "hf_checkpoint": path}, "models": [model]}))
    shown = cli("plan", str(file)).out
    assert re.search(r"actor-0 +restart +options", shown)
    # What is not said stays as it is: the port that 0 became, and that everybody may reach it.
    assert plan["obstacles"] == []
    for said in ((), ("--listen", "127.0.0.1:9"), ("--listen", "127.0.0.1:0"), ("--insecure",)):
        assert cli("plan", str(file), *said, "-o", "json").data["obstacles"] == []
    (obstacle,) = cli("plan", str(file), "--listen", "127.0.0.1:8", "-o", "json").data["obstacles"]
    assert (obstacle["key"], obstacle["message"]) == (
        "fleet.listen", "it cannot change in a fleet that is up, where it is '127.0.0.1:0'"
    )  # fmt: skip
    auth = {"auth": {"insecure": False}, "launcher": "ray"}
    file.write_text(json.dumps({"fleet": {"name": "lab", "hf_checkpoint": path, **auth}, "models": [model]}))
    ended = cli("up", str(file))
    assert ended.code == 2
    refused = ended.err
    assert "FIELD_CONFLICT" in refused
    assert "fleet.auth.insecure" in refused
    assert "fleet.launcher: it cannot change in a fleet that is up, where it is 'local'" in refused
    fleet_state.remove("lab")


# slime's flags.


def options(cli: Cli, *arguments: str) -> dict[str, str]:
    ran = cli("plan", *arguments, "--hf-checkpoint", "/m", "--engine", "sglang", "-o", "json")
    assert ran.code == 0, ran.err
    return dict(ran.data["engines"][0]["options"])


def test_any_argument_of_sglang_is_a_flag(cli: Cli) -> None:
    given = options(
        cli,
        *("--sglang-mem-fraction-static", "0.8", "--sglang-enable-metrics", "--sglang-context-length=4096"),
        *("--rollout-num-gpus", "1", "--sglang-cuda-graph-bs-decode", "1", "2", "--sglang-random-seed", "-1"),
    )
    assert given == {
        "mem_fraction_static": "0.8",
        "enable_metrics": "true",
        "context_length": "4096",
        "cuda_graph_bs_decode": '["1", "2"]',
        "random_seed": "-1",
    }


def test_the_file_has_slimes_name_too_and_may_come_last(cli: Cli) -> None:
    file = str(EXAMPLES / "slime-pd.yaml")
    for arguments in (["--sglang-config", file], [f"--sglang-config={file}"], ["--sglang-enable-metrics", file]):
        ran = cli("plan", *arguments, "--hf-checkpoint", "/m", "-o", "name")
        assert ran.out.splitlines()[0] == "actor-prefill-0", arguments
    assert cli("plan", file, "--sglang-config", file).code == 2
    assert "needs a file" in cli("plan", "--sglang-config").err


def test_addresses_of_external_engines_are_a_list_of_words(cli: Cli) -> None:
    arguments = ["--rollout-external", "--rollout-external-engine-addrs", "h1:10090", "h2:10091"]
    plan = cli("plan", *arguments, "--hf-checkpoint", "/m", "-o", "json").data
    assert [engine["options"]["url"] for engine in plan["engines"]] == ["http://h1:10090", "http://h2:10091"]
    ran = cli("plan", str(EXAMPLES / "slime-pd.yaml"), *arguments, "--hf-checkpoint", "/m")
    assert ran.code == 2
    assert "--rollout-external: it cannot be given with a file" in ran.err


def test_addresses_that_are_not_given_are_not_passed_over(cli: Cli) -> None:
    """A fleet of another engine was started in their place."""
    for arguments in (["--rollout-external", ADDRESSES], [ADDRESSES, "--hf-checkpoint", "/m"]):
        ran = cli("plan", *arguments)
        assert ran.code == 2
        assert f"{ADDRESSES} needs HOST:PORT" in ran.err


def test_a_number_that_is_too_large_is_told_by_the_name_of_its_flag(cli: Cli) -> None:
    flags = ("--rollout-num-gpus", "--rollout-num-gpus-per-engine", "--num-gpus-per-node", "--prefill-num-servers")
    for flag in flags:
        ran = cli("validate", "--hf-checkpoint", "/m", flag, "9" * 30)
        assert ran.code == 2
        assert f"Invalid value for '{flag}'" in ran.err


@pytest.mark.parametrize("listen", ["127.0.0.1:²", "127.0.0.1:99999", "5080", "h:1:2"])
def test_where_the_coordinator_is_to_listen_is_checked_before_anything_is_started(cli: Cli, listen: str) -> None:
    ran = cli("validate", "--hf-checkpoint", "/m", "--listen", listen)
    assert (ran.code, ran.out.strip().partition(";")[0]) == (2, f"command line: --listen: {listen!r} is not HOST:PORT")


@pytest.mark.parametrize("address", ["h:²", "h:" + "9" * 5000, "h:-1", "h:", ":1", "h"])
def test_an_address_that_is_none_is_refused_and_no_traceback(address: str) -> None:
    with pytest.raises(InvalidRequest, match="is not host:port"):
        split(address)


@pytest.mark.parametrize("key", ["model_path", "token_file"])
def test_the_home_of_nobody_is_no_directory(
    cli: Cli, checkpoint: Callable[[str], str], tmp_path: Path, key: str
) -> None:
    given = {"model_path": checkpoint("one"), "token_file": "", key: "~nobody-is-called-so/lab"}
    auth = f"auth: {{token_file: {given['token_file']}}}" if given["token_file"] else ""
    file = tmp_path / "lab.yaml"
    file.write_text(
        f"fleet: {{engine: fake, {auth}}}\n"
        f"models: [{{name: a, model_path: {given['model_path']}, "
        "server_groups: [{worker_type: regular, num_gpus: 1}]}]"
    )
    ran = cli("up", str(file))
    assert ran.code == 2
    assert "~nobody-is-called-so/lab" in ran.err

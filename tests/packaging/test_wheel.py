"""The wheel and the source distribution: what they hold, and that the wheel runs where nothing else is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import linked_environment
import pytest
import yaml
from demo_runs import check_passed, run

from rlctl.version import __version__

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
WHEEL = f"rlctl-{__version__}-py3-none-any.whl"
PACKAGES = {"rlctl", "rlctl_servers", "rlctl_sglang", "rlctl_torch", "rlctl_vllm"}
PARTS = {
    *("cli", "client", "command_stream", "contract", "coordinator", "demo", "gateway", "integrations", "launch"),
    "metrics",
    *("rollout", "runtime", "sdk", "sglang_api", "stage", "testing", "topology", "trainer", "transport", "v1"),
    *("traces", "weights", "worker"),
}
"""Packages of rlctl: a further one is a decision. The simulator, the benchmarks and the reference pages' generator are
not in the wheel.
"""


def build(source: Path, target: str, directory: Path) -> Path:
    """Build with the backend of pyproject.toml, as pip and `python -m build` do; returns the file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(directory)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = directory.iterdir()
    return built


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, sdist: Path) -> Path:
    """Built from the unpacked source distribution, as an installation from source does it."""
    directory = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    return build(directory / f"rlctl-{__version__}", "wheel", tmp_path_factory.mktemp("wheel"))


def content(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def about(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"rlctl-{__version__}.dist-info/METADATA").decode())


def environment() -> dict[str, str]:
    """The variables of the caller without those that show Python or rlctl a checkout or a fleet."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RLCTL_", "VIRTUAL_"))}


def rlctl(commands: Path, state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = environment() | {"XDG_STATE_HOME": str(state), "XDG_CONFIG_HOME": str(state / "config")}
    command = [str(commands / "rlctl"), *arguments]
    return subprocess.run(command, cwd=state, env=variables, capture_output=True, text=True, check=False)


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    assert {name.split("/")[0] for name in content(wheel)} == PACKAGES | {f"rlctl-{__version__}.dist-info"}
    assert {name.split("/")[1] for name in content(wheel) if name.count("/") > 1 and name.startswith("rlctl/")} == PARTS
    assert {f"{package}/py.typed" for package in PACKAGES} <= content(wheel)
    assert "rlctl/v1/descriptor.binpb" in content(wheel)


def test_the_wheel_is_the_same_from_the_checkout_and_from_the_source_distribution(wheel: Path, tmp_path: Path) -> None:
    assert content(build(ROOT, "wheel", tmp_path)) == content(wheel)


def test_the_source_distribution_holds_no_file_that_git_ignores(sdist: Path) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert held - {"PKG-INFO"} <= set(tracked.splitlines())
    for needed in ("pyproject.toml", "README.md", "LICENSE", "tests/conftest.py", "protos/rlctl/v1/verbs.proto"):
        assert needed in held


def test_one_file_states_the_version_and_the_chart_repeats_it(wheel: Path) -> None:
    assert about(wheel)["Version"] == __version__
    stated = subprocess.run(
        ["git", "grep", "-lwF", __version__, "--", "*.py", "*.toml", "*.yaml", "*.sh", ".ci"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    assert stated.split() == ["kubernetes/rlctl/Chart.yaml", "rlctl/version.py"]
    chart = yaml.safe_load((ROOT / "kubernetes" / "rlctl" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)  # Helm reads it from there only


def test_rlctl_runs_with_its_own_dependencies_only(wheel: Path, tmp_path: Path) -> None:
    commands = linked_environment.install(wheel, tmp_path / "environment")
    python = [str(commands / "python"), "-c"]
    where = "import rlctl, importlib.util as u; print(rlctl.__file__, u.find_spec('torch'), u.find_spec('aiohttp'))"
    shown = subprocess.run(
        [*python, where], env=environment(), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    place, *others = shown.stdout.split()
    assert Path(place).is_relative_to(tmp_path / "environment")
    assert others == ["None", "None"]
    version = rlctl(commands, tmp_path, "version", "-o", "json")
    assert version.returncode == 0, version.stderr
    assert json.loads(version.stdout)["rlctl"] == __version__
    weights = tmp_path / "checkpoint"
    weights.mkdir()
    (weights / "weights.txt").write_text("one")
    started = rlctl(
        commands, tmp_path, "up", "--name", "wheel", "--engine", "fake", "--hf-checkpoint", str(weights),
        "--listen", "127.0.0.1:0", "--detach",
    )  # fmt: skip
    try:
        assert started.returncode == 0, started.stderr
        stages = rlctl(commands, tmp_path, "get", "stages", "-o", "name")
        assert stages.stdout.split() == ["actor-0"], stages.stderr
    finally:
        down = rlctl(commands, tmp_path, "down", "--yes")
    assert down.returncode == 0, down.stderr


def test_the_demo_passes_and_plots_from_the_wheel_with_its_extra(wheel: Path, tmp_path: Path) -> None:
    commands = linked_environment.install(wheel, tmp_path / "environment", extras=["demo"])
    command = [str(commands / "rlctl")]
    steps = ("--steps", "12")
    ran = run(*steps, "--plot", "plot.png", command=command, environment=environment(), directory=tmp_path)
    check_passed(*ran, steps=12)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

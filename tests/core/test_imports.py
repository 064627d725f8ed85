"""Imports run one way, and the cores are free of transport and storage."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

GENERATED = "rlctl/v1"
BASE = {"rlctl.v1", "rlctl.version", "rlctl.contract"}
PORTS = BASE | {"rlctl.ports", "rlctl.engine"}
SERVER = PORTS | {"rlctl.command_stream", "rlctl.metrics", "rlctl.runtime", "rlctl.traces", "rlctl.transport"}
CLIENT = BASE | {"rlctl.ports", "rlctl.client", "rlctl.runtime", "rlctl.traces", "rlctl.transport"}
ENGINE = BASE | {"rlctl.engine", "rlctl.runtime", "rlctl.weights"}
ANY = {"rlctl"}

MAY_IMPORT: dict[str, set[str]] = {
    "rlctl/contract": BASE,
    "rlctl/metrics": BASE | {"rlctl.runtime"},
    "rlctl/runtime": BASE | {"rlctl.ports"},
    "rlctl/traces": BASE,
    "rlctl/weights": BASE,
    "rlctl/command_stream": PORTS | {"rlctl.runtime"},
    "rlctl/transport": PORTS | {"rlctl.command_stream", "rlctl.runtime", "rlctl.traces"},
    "rlctl/worker": SERVER,
    "rlctl/stage": SERVER | {"rlctl.worker"},
    "rlctl/coordinator": SERVER - {"rlctl.engine"},
    "rlctl/client": BASE | {"rlctl.ports", "rlctl.traces", "rlctl.transport"},
    "rlctl/rollout": CLIENT,
    "rlctl/trainer": CLIENT | {"rlctl.weights"},
    "rlctl/sdk": CLIENT | {"rlctl.rollout", "rlctl.sglang_api", "rlctl.trainer"},
    "rlctl/sglang_api": BASE,
    "rlctl/gateway": CLIENT | {"rlctl.metrics", "rlctl.rollout", "rlctl.sdk", "rlctl.sglang_api"},
    "rlctl/launch": SERVER | {"rlctl.coordinator", "rlctl.sdk", "rlctl.weights"},
    "rlctl/topology": PORTS | {"rlctl.launch"},
    "rlctl/demo": BASE | {"rlctl.launch", "rlctl.rollout", "rlctl.sdk", "rlctl.trainer"},
    "rlctl/integrations": PORTS
    | CLIENT
    | {"rlctl.launch", "rlctl.rollout", "rlctl.sdk", "rlctl.trainer", "rlctl.weights"},
    "rlctl/testing": SERVER | {"rlctl.coordinator", "rlctl.stage", "rlctl.worker"},
    "rlctl/cli": ANY | {"rlctl_vllm.sidecar"},
    "engines/rlctl_servers": ENGINE,
    "engines/rlctl_sglang": ENGINE | {"rlctl_servers"},
    "engines/rlctl_torch": ENGINE,
    "engines/rlctl_vllm": ENGINE | {"rlctl_servers", "rlctl.sglang_api"},
    "tests/simulator": SERVER
    | {"rlctl.client", "rlctl.coordinator", "rlctl.stage", "rlctl.trainer", "rlctl.weights", "rlctl.worker"},
    "tools/benchmark": ANY | {"rlctl_servers", "rlctl_torch", "rlctl_vllm"},
    "tools/reference": ANY,
}
"""Package → packages that it may import, beside itself. Only :mod:`rlctl.cli`, the tools and the tests may import
everything: nothing that is imported knows who calls it.
"""

CORES = [
    "rlctl/command_stream",
    "rlctl/contract",
    "rlctl/coordinator/audit.py",
    "rlctl/coordinator/fleet",
    "rlctl/coordinator/healing",
    "rlctl/coordinator/journal/records.py",
    "rlctl/coordinator/operations",
    "rlctl/coordinator/pauses",
    "rlctl/coordinator/service.py",
    "rlctl/coordinator/subjects.py",
    "rlctl/coordinator/transaction",
    "rlctl/coordinator/updates",
    "rlctl/coordinator/verbs",
    "rlctl/engine.py",
    "rlctl/metrics/definitions.py",
    "rlctl/rollout/picking",
    "rlctl/sglang_api",
    "rlctl/stage/facts.py",
    "rlctl/stage/relay.py",
    "rlctl/stage/serving_state.py",
    "rlctl/stage/state_machine.py",
    "rlctl/worker/follower.py",
    "rlctl/worker/worker.py",
]
"""Free of transport, storage and clocks, so that the simulation runs them on its own."""

OUTSIDE = ("grpc", "opentelemetry", "prometheus_client", "sqlite3", "time", "torch")
"""Modules that no core imports."""

TOPS = ("rlctl", "engines", "tests/simulator", "tools/benchmark", "tools/reference")


def modules(path: str) -> Iterator[Path]:
    place = ROOT / path
    yield from sorted(place.rglob("*.py")) if place.is_dir() else [place]


def dotted(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removeprefix("engines.").removesuffix(".__init__")


@functools.cache
def imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere in it, and the names that it takes from them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = {
    dotted(path): path
    for top in TOPS
    for path in modules(top)
    if GENERATED not in path.as_posix() and "/cpu/" not in path.as_posix()
}


def within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def imported_modules(path: Path) -> set[str]:
    """Modules of the project that a file imports: for ``from package import name`` the name, where it is a module."""
    names = set()
    for name in imported(path):
        if within(name, {"rlctl.v1"}):
            continue
        while name and name not in FILES:
            name = name.rpartition(".")[0]
        names.add(name)
    return names - {"", dotted(path)}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_package_imports_only_the_packages_below_it(folder: str) -> None:
    own = folder.replace("engines/", "").replace("/", ".")
    roots = {name.split(".")[0] for name in FILES} | {"tests", "tools"}
    for path in modules(folder):
        for name in imported(path):
            if name.split(".")[0] in roots and not within(name, {own}):
                allowed = MAY_IMPORT[folder] | ({"rlctl"} & {name})  # the names that rlctl offers to its users
                assert within(name, allowed), f"{path.relative_to(ROOT)} imports {name}"


def test_every_package_has_its_row() -> None:
    packages = {path.parent.relative_to(ROOT) for path in (ROOT / "rlctl").glob("*/__init__.py")}
    packages |= {path.parent.relative_to(ROOT) for path in (ROOT / "engines").glob("*/__init__.py")}
    assert {package.as_posix() for package in packages} - MAY_IMPORT.keys() == {GENERATED}


def test_no_files_import_each_other_in_a_circle_not_even_for_their_types() -> None:
    files = {name: path for name, path in FILES.items() if path.stem != "__init__"}  # the face of its folder
    below = {name: imported_modules(path) & files.keys() for name, path in files.items()}
    assert below["tests.simulator.processes.fleet"] >= {"tests.simulator.processes.stage"}
    graphlib.TopologicalSorter(below).prepare()  # it raises CycleError, which names them


def test_no_packages_import_each_other_in_a_circle() -> None:
    """A file beside sub-packages stands for itself: it is above some of them and below others."""
    parents = {name.rpartition(".")[0] for name, path in FILES.items() if path.stem == "__init__"}

    def room(name: str) -> str:
        package = name if FILES[name].stem == "__init__" else name.rpartition(".")[0]
        return name if package in parents else package

    below = defaultdict[str, set[str]](set)
    for name, path in FILES.items():
        below[room(name)] |= {room(other) for other in imported_modules(path)} - {room(name)}
    assert below["rlctl.coordinator.healing"] >= {"rlctl.coordinator.transaction"}
    graphlib.TopologicalSorter(below).prepare()


def test_no_top_level_packages_import_each_other_in_a_circle() -> None:
    def room(name: str) -> str:
        return ".".join(name.split(".")[: 1 if name.startswith("rlctl_") else 2])

    below = defaultdict[str, set[str]](set)
    for name, path in FILES.items():
        if name != "rlctl":  # it offers the names of packages below, when they are first used
            below[room(name)] |= {room(other) for other in imported_modules(path)} - {room(name), "rlctl"}
    graphlib.TopologicalSorter(below).prepare()


@pytest.mark.parametrize("core", CORES)
def test_the_cores_know_neither_transport_nor_storage(core: str) -> None:
    for path in modules(core):
        for name in imported(path):
            assert name.split(".")[0] not in OUTSIDE, f"{path} imports {name}"
            assert not name.startswith("rlctl.transport"), f"{path} imports {name}"


def test_grpc_comes_in_by_one_door() -> None:
    inside = ("rlctl/transport/", "rlctl/v1/")  # behind it, and the generated stubs
    for path in modules("rlctl"):
        place = path.relative_to(ROOT).as_posix()
        taken = {name for name in imported(path) if name.split(".")[0] == "grpc"}
        assert not taken or place.startswith(inside), f"{place} imports {taken}: from rlctl.transport import grpc"


def test_a_server_without_metrics_and_traces_does_not_load_their_libraries() -> None:
    servers = "rlctl.coordinator.server, rlctl.stage.server, rlctl.gateway.server"
    code = f"import {servers}, sys; print({{'prometheus_client', 'opentelemetry'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_importing_rlctl_loads_neither_grpc_nor_torch() -> None:
    code = "import rlctl, rlctl.cli.main, sys; print([m for m in ('grpc', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""Imports run one way, and the cores are free of transport and storage."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_SHARED = [
    *("v1", "errors", "verbs", "checks", "merging", "outcomes", "sampling", "sglang_api", "times", "version"),
    *("adapters", "addresses", "fingerprints", "memory", "vllm_transfer", "http_callers", "json_values", "private"),
]
BASE = {f"rlctl.{name}" for name in _SHARED}
PORTS = BASE | {"rlctl.calls", "rlctl.engine", "rlctl.ports"}

MAY_IMPORT: dict[str, set[str]] = {
    "rlctl/weights": BASE,
    "rlctl/control": PORTS,
    "rlctl/worker": PORTS | {"rlctl.control", "rlctl.transport", "rlctl.loops"},
    "rlctl/stage": PORTS | {"rlctl.control", "rlctl.worker", "rlctl.transport", "rlctl.loops"},
    "rlctl/coordinator": PORTS | {"rlctl.control", "rlctl.transport"},
    "rlctl/transport": PORTS | {"rlctl.control"},
    "rlctl/simulation": PORTS | {"rlctl.control", "rlctl.worker", "rlctl.stage", "rlctl.coordinator"},
    "rlctl/rollout": BASE,
    "rlctl/client": BASE | {"rlctl.ports", "rlctl.transport", "rlctl.weights", "rlctl.rollout", "rlctl.loops"},
    "rlctl/gateway": BASE | {"rlctl.client", "rlctl.ports", "rlctl.process", "rlctl.rollout", "rlctl.transport"},
    "engines/rlctl_servers": BASE | {"rlctl.engine", "rlctl.process", "rlctl.weights"},
    "engines/rlctl_sglang": BASE | {"rlctl.engine", "rlctl.weights"},
    "engines/rlctl_torch": BASE | {"rlctl.engine", "rlctl.weights"},
    "engines/rlctl_vllm": BASE | {"rlctl.engine", "rlctl.weights"},
}
"""Folder → what it may import of the project, beside itself."""

CORES = [
    "rlctl/adapters.py",
    "rlctl/control",
    "rlctl/worker/core.py",
    "rlctl/worker/follower.py",
    "rlctl/stage/core.py",
    "rlctl/stage/facts.py",
    "rlctl/stage/relay.py",
    "rlctl/stage/serving.py",
    "rlctl/coordinator/adapters.py",
    "rlctl/coordinator/attempts.py",
    "rlctl/coordinator/core.py",
    "rlctl/coordinator/fanout.py",
    "rlctl/coordinator/finish.py",
    "rlctl/coordinator/followers.py",
    "rlctl/coordinator/groups.py",
    "rlctl/coordinator/healing.py",
    "rlctl/coordinator/keys.py",
    "rlctl/coordinator/operations.py",
    "rlctl/coordinator/orphans.py",
    "rlctl/coordinator/peers.py",
    "rlctl/coordinator/planning.py",
    "rlctl/coordinator/roster.py",
    "rlctl/coordinator/session.py",
    "rlctl/coordinator/updates.py",
    "rlctl/coordinator/verification.py",
    "rlctl/coordinator/verifying.py",
    "rlctl/coordinator/versions.py",
    "rlctl/rollout",
    "rlctl/sglang_api",
    "rlctl/calls.py",
    "rlctl/checks.py",
    "rlctl/merging.py",
    "rlctl/outcomes.py",
    "rlctl/engine.py",
    "rlctl/verbs.py",
    "rlctl/errors.py",
    "rlctl/fingerprints.py",
    "rlctl/memory.py",
]


def modules(path: str) -> Iterator[Path]:
    place = ROOT / path
    yield from sorted(place.rglob("*.py")) if place.is_dir() else [place]


def imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere in it, and the names that it takes from them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_what_stands_below_it(folder: str) -> None:
    own = folder.replace("engines/", "").replace("/", ".")
    for path in modules(folder):
        for name in imported(path):
            if not name.startswith("rlctl.") or name.startswith(own):
                continue
            allowed = any(name == a or name.startswith(a + ".") or a.startswith(name + ".") for a in MAY_IMPORT[folder])
            assert allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_no_files_import_each_other_in_a_circle_not_even_for_their_types() -> None:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("engines."): path
        for top in ("rlctl", "engines")
        for path in modules(top)
        if path.stem != "__init__"  # the face of its folder
    }
    below = {name: imported(path) & files.keys() - {name} for name, path in files.items()}
    assert below["rlctl.simulation.fleet"] >= {"rlctl.simulation.slots", "rlctl.simulation.stage_host"}
    graphlib.TopologicalSorter(below).prepare()  # it raises CycleError, which names them


@pytest.mark.parametrize("core", CORES)
def test_the_cores_know_neither_transport_nor_storage(core: str) -> None:
    for path in modules(core):
        for name in imported(path):
            assert name.split(".")[0] not in ("grpc", "sqlite3", "time", "torch"), f"{path} imports {name}"
            assert not name.startswith("rlctl.transport"), f"{path} imports {name}"


def test_grpc_comes_in_by_one_door() -> None:
    within = ("rlctl/transport/", "rlctl/v1/", "rlctl/bench/fanout/")  # behind it; what is generated; who stay outside
    for path in modules("rlctl"):
        place = path.relative_to(ROOT).as_posix()
        taken = {name for name in imported(path) if name.split(".")[0] == "grpc"}
        assert not taken or place.startswith(within), f"{place} imports {taken}: from rlctl.transport import grpc"


def test_importing_rlctl_loads_neither_grpc_nor_torch() -> None:
    code = "import rlctl, rlctl.cli.main, sys; print([m for m in ('grpc', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    import rlctl

    for name in rlctl.__all__:
        assert getattr(rlctl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = rlctl.conect

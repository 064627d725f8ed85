"""checkpoint-engine's parameter servers in front of torch engines of two ranks and of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rlctl_sglang.options import Options, interpreter
from safetensors.torch import load_file
from sglang_suite import Server
from trainer_scripts import ended

from rlctl.contract.errors import RlctlError
from rlctl.weights.tensor.digest import combine, tensor_digest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SERVERS = Path(__file__).parents[1] / "support" / "parameter_server.py"


async def update(
    server: Server, output: Path, seed: int, places: Sequence[str] = (), *, python: str = "", **environ: str
) -> dict[str, Any]:
    """What parameter servers say of an update; ``places``: addresses with ranks, instead of all."""
    places = places or [f"{url}={ranks}" for url, ranks in zip(server.engines, server.ranks, strict=True)]
    done = await ended(
        SERVERS, str(server.tiny[1]), str(output), str(seed), *places, python=python, PYTHONPATH="", **environ
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


async def digests(server: Server) -> set[str]:
    """The digests that the ranks of every engine have."""
    checked = [body["model_digest"] for _, body in await server.every("POST", "/weights_checker", {})]
    return {digest for each in checked for digest in each.values()}


def expected(path: Path) -> str:
    return combine({name: tensor_digest(name, tensor) for name, tensor in load_file(path).items()})


@pytest.mark.parametrize("library", ["", "pyzmq"])
async def test_every_engine_has_the_parameter_servers_weights(server: Server, tmp_path: Path, library: str) -> None:
    python = ""
    if library:
        try:
            python = interpreter(Options())
        except RlctlError as error:
            pytest.skip(f"SGLang is not installed: {error.next_step}")
    for seed in (1, 2):
        report = await update(server, tmp_path, seed, python=python, VERSION=f"v{seed}")
        assert report["buckets"] > 2
        assert report["errors"] == ["", "", ""]
        assert [status for status, _ in report["answers"].values()] == [200, 200], report
        assert report["left"] == []
        assert await digests(server) == {expected(tmp_path / f"{seed}.safetensors")}
        assert await server.version() == {f"v{seed}"}
    assert [status for status, _ in await server.every("GET", "/ready")] == [200, 200]


async def test_at_the_root_the_fleet_is_one_server_and_a_pause_stays(server: Server, tmp_path: Path) -> None:
    await server.every("POST", "/pause_generation", {"mode": "retract"})
    report = await update(server, tmp_path, 3, [f"{server.root}=3"])
    assert [status for status, _ in report["answers"].values()] == [200], report
    assert await digests(server) == {expected(tmp_path / "3.safetensors")}
    assert [status for status, _ in await server.every("GET", "/ready")] == [503, 503]
    assert [status for status, _ in await server.every("POST", "/continue_generation", {})] == [200, 200]


@pytest.mark.parametrize(("fault", "reason"), [("tensor", "FIELD_INVALID"), ("pickle", "FIELD_INVALID")])
async def test_parameter_servers_learn_of_a_failure_and_nothing_is_published(
    server: Server, tmp_path: Path, fault: str, reason: str
) -> None:
    before = await server.version()
    report = await update(server, tmp_path, 4, FAULT=fault)
    assert all(reason in error for error in report["errors"]), report
    assert {(status, body["success"]) for status, body in report["answers"].values()} == {(400, False)}
    reasons = {body["error"]["reason"] for _, body in report["answers"].values()}
    assert reason in reasons
    assert reasons <= {reason, "CANCELLED"}
    assert await server.version() <= {*before, ""}
    if fault == "pickle":
        assert await server.version() == before, "nothing was written"


async def ipc(server: Server, handles: Any) -> dict[str, Any]:
    status, told = await server.ask("POST", "/update_weights_from_ipc", {"zmq_handles": handles}, engine=1)
    assert (status, told["success"]) == (400, False)
    error: dict[str, Any] = told["error"]
    return error


@pytest.mark.parametrize(
    "address", ["ipc:///tmp/socket", "tcp://127.0.0.1:1", "ipc://@checkpoint-engine-x/../y.sock", "ipc://@dbus", 7]
)
async def test_addresses_that_are_no_sockets_of_checkpoint_engines(server: Server, address: object) -> None:
    error = await ipc(server, {"GPU-0": address})
    assert (error["reason"], error["field"]) == ("FIELD_INVALID", "zmq_handles.GPU-0")


async def test_another_number_of_handles_than_ranks(server: Server) -> None:
    error = await ipc(server, {f"GPU-{i}": f"ipc://@checkpoint-engine-GPU-{i}-0.sock" for i in range(2)})
    assert (error["reason"], error["field"]) == ("LENGTH_MISMATCH", "zmq_handles")

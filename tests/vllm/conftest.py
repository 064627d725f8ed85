"""Real servers that the modules share; without vLLM's environment the tier is skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sglang_models
import vllm_file
from native_stand_in import native_server, plug_in
from rlctl_servers.options import Options
from rlctl_sglang import SGLangEngine
from rlctl_sglang.options import Options as SGLangOptions
from rlctl_sglang.options import interpreter as sglang_interpreter
from rlctl_vllm.engine import VLLMEngine
from rlctl_vllm.options import interpreter
from rlctl_vllm.sidecar.server import SidecarConfig
from server_stage import Driver
from sidecar_process import Served

from rlctl.contract.errors import RlctlError
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet


@pytest.fixture(scope="session")
def spawning() -> dict[str, str]:
    """The environment of a server that starts its processes with interpreters, as vLLM does on a CPU.

    vLLM does not end when a forked worker is killed.
    """
    return {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}


@pytest.fixture(scope="session", autouse=True)
def vllm(spawning: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The Python that vLLM is installed for. By default its servers fork their processes."""
    try:
        python = interpreter(Options())
    except RlctlError as error:
        pytest.skip(f"vLLM is not installed: {error.next_step}")
    with pytest.MonkeyPatch.context() as patch:
        place = plug_in(tmp_path_factory.mktemp("forking") / "plug-in", "forking_in_vllm")
        patch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        yield python


@pytest.fixture(scope="session")
def server(vllm: str, tiny: tuple[Any, Path]) -> Iterator[Driver]:
    """A server of one rank: it takes half a minute to start, so there is one for all modules."""
    driver = Driver(VLLMEngine, tiny[1], options={"allowed_roots": str(tiny[1].parent.parent)})
    try:
        driver.start()
        yield driver
    finally:
        driver.stop()


@pytest.fixture
def driver(server: Driver) -> Iterator[Driver]:
    """The server, which every test leaves generating, without requests, and alive."""
    yield server
    assert not server.failures
    assert not server.engine._updates.open
    assert not server.engine._state.stopped
    assert not server.engine._requests.active


@pytest.fixture(scope="session")
def sglang(tiny: tuple[Any, Path]) -> Iterator[Driver]:
    """A real SGLang server at the checkpoint, to be compared with."""
    try:
        python = sglang_interpreter(SGLangOptions())
    except RlctlError as error:
        pytest.skip(f"SGLang is not installed: {error.next_step}")
    driver = Driver(SGLangEngine, tiny[1])
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(sglang_models.VARIABLE, sglang_models.all_but(python, "llama"))
            driver.start()
        yield driver
    finally:
        driver.stop()


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the servers that take weights in by vLLM's own NCCL engine."""
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="session")
def elsewhere(vllm: str, tiny: tuple[Any, Path], place: Path) -> Iterator[str]:
    """The URL of a server of somebody else, of one rank, without rlctl's extension."""
    with native_server(tiny[1], place, 1) as url:
        yield url


@pytest.fixture(scope="session")
def solo(
    vllm: str, tiny: tuple[Any, Path], spawning: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchedFleet]:
    """A fleet of one server of one rank, ``actor-0``, with room for one adapter; for all modules."""
    # With room for one, vLLM reads an adapter again whenever another one was asked for.
    options = vllm_file.options(allowed_roots=str(tmp_path_factory.getbasetemp()))
    environment = vllm_file.ENVIRONMENT | spawning
    spec = EngineSpec("actor-0", str(tiny[1]), engine="vllm", options=options, environment=environment)
    with LaunchedFleet([spec], directory=tmp_path_factory.mktemp("fleet")) as up:
        yield up


@pytest.fixture(scope="session")
def launched(vllm: str, tiny: tuple[Any, Path]) -> Iterator[Served]:
    """A sidecar that has launched its vLLM."""
    served = Served(SidecarConfig(launch=str(tiny[1]), arguments={"max_num_seqs": "64"}))
    try:
        yield served
    finally:
        served.stop()

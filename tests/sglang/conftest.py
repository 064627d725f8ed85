"""Real SGLang servers that modules share; without SGLang's environment the tier is skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forking_plugin
import pytest
import sabotage_plugin
import sglang_models
from client_runs import TEMPLATE
from rlctl_sglang.options import Options, interpreter
from server_stage import Driver
from sglang_server import LOADER, LORA, serving

from rlctl.contract.errors import RlctlError
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet


@pytest.fixture(scope="session")
def spawning() -> dict[str, str]:
    """The environment of a server that starts its processes with interpreters, as SGLang does by itself.

    A process that has used CUDA cannot be forked.
    """
    return {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}


@pytest.fixture(scope="session", autouse=True)
def sglang(spawning: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The Python that SGLang is installed for. Its servers know one model's architecture. By default they fork their
    processes.
    """
    try:
        python = interpreter(Options())
    except RlctlError as error:
        pytest.skip(f"SGLang is not installed: {error.next_step}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(sglang_models.VARIABLE, sglang_models.all_but(python, "llama"))
        for name, value in forking_plugin.environment(tmp_path_factory.mktemp("forking")).items():
            patch.setenv(name, value)
        yield python


@pytest.fixture(scope="session")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's own weight loader is, and its notes are."""
    place = tmp_path_factory.mktemp("loader")
    (place / "their_loader.py").write_text(LOADER)
    return place


@pytest.fixture(scope="session")
def one(sglang: str, tiny: tuple[Any, Path], loader: Path) -> Iterator[Driver]:
    """A server for all modules that reach it by the plug-in alone: starting one takes half a minute of a core."""
    with serving(tiny, loader) as driver:
        yield driver


@pytest.fixture
def driver(one: Driver) -> Iterator[Driver]:
    """The server, which every test leaves generating and alive."""
    yield one
    assert not one.failures
    assert not one.engine._state.stopped


@pytest.fixture(scope="session")
def sabotage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with orders for a rank of :mod:`tests.sglang.sabotage_plugin`."""
    return tmp_path_factory.mktemp("sabotage") / "now"


@pytest.fixture
def ordered(sabotage: Path) -> Iterator[Path]:
    """The file with orders, which is removed after the test."""
    yield sabotage
    sabotage.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def sabotaged(sabotage: Path) -> dict[str, str]:
    """The environment of servers whose ranks carry the orders out."""
    return sabotage_plugin.environment(sabotage.parent)


@pytest.fixture(scope="session")
def two_ranks(
    sglang: str, tiny: tuple[Any, Path], sabotaged: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchedFleet]:
    """One server of two ranks with room for adapters, and with its memory saver, ``pair``, and its coordinator."""
    options = {**LORA, "enable_memory_saver": "true", "allowed_roots": str(tmp_path_factory.getbasetemp())}
    spec = EngineSpec("pair", str(tiny[1]), engine="sglang", tp_size=2, environment=sabotaged, options=options)
    with LaunchedFleet([spec], directory=tmp_path_factory.mktemp("fleet")) as up:
        yield up


@pytest.fixture(scope="module")
def pair(two_ranks: LaunchedFleet, tiny: tuple[Any, Path]) -> Iterator[Fleet]:
    """What a trainer has of the server of two ranks, at the checkpoint."""
    with two_ranks.connect() as fleet:
        fleet.update_weights_from_disk(str(tiny[1]), version="reset")
        yield fleet


@pytest.fixture(scope="session")
def chat_template(tmp_path_factory: pytest.TempPathFactory) -> str:
    """File of a chat template, which the tiny model's tokenizer lacks."""
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@pytest.fixture(scope="session")
def two(
    sglang: str, tiny: tuple[Any, Path], chat_template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchedFleet]:
    """Two servers of one rank and their coordinator, for all modules: actor-0 and actor-1."""
    options = {"allowed_roots": str(tmp_path_factory.getbasetemp()), "chat_template": chat_template}
    engines = [EngineSpec(f"actor-{i}", str(tiny[1]), engine="sglang", options=options) for i in range(2)]
    with LaunchedFleet(engines, directory=tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def fleet(two: LaunchedFleet) -> Iterator[Fleet]:
    """What a trainer has of the two servers."""
    with two.connect() as fleet:
        yield fleet

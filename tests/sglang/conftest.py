"""A real SGLang server for each module that asks for one; without SGLang's environment the tier is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlctl_sglang import SGLangEngine
from rlctl_sglang.options import Options, interpreter
from server_stage import Driver

from rlctl.errors import RlctlError


@pytest.fixture(scope="session", autouse=True)
def sglang() -> str:
    """The Python that SGLang is installed for."""
    try:
        return interpreter(Options())
    except RlctlError as error:
        pytest.skip(f"SGLang is not installed: {error.next_step}")


LOADER = """
from pathlib import Path

def load(model, named_tensors):
    model.load_weights(named_tensors)
    with (Path(__file__).parent / "loaded").open("a") as loaded:
        loaded.writelines(f"{name}\\n" for name, _ in named_tensors)
"""
"""A weight loader of whoever runs the server: it notes what it was given."""


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's own weight loader is, and its notes are."""
    place = tmp_path_factory.mktemp("loader")
    (place / "their_loader.py").write_text(LOADER)
    return place


@pytest.fixture(scope="module")
def driver(sglang: str, tiny: tuple[Any, Path], loader: Path) -> Iterator[Driver]:
    """A server of one rank."""
    options = {"allowed_roots": str(tiny[1].parent.parent), "custom_weight_loader": "their_loader.load"}
    driver = Driver(SGLangEngine, tiny[1], options=options)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(loader))
            driver.start()
        yield driver
    finally:
        driver.stop()

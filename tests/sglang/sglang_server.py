"""A real SGLang server of one rank, with the plug-in, in the test's own process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlctl_sglang import SGLangEngine
from server_stage import Driver

from rlctl.v1 import verbs_pb2 as v

LOADER = """
import gc
from pathlib import Path

def load(model, named_tensors):
    model.load_weights(named_tensors)
    (Path(__file__).parent / "heap").write_text(f"{gc.get_freeze_count()} {len(gc.get_objects())}")
    with (Path(__file__).parent / "loaded").open("a") as loaded:
        loaded.writelines(f"{name}\\n" for name, _ in named_tensors)
"""
"""A weight loader of the server's owner. It writes down the names of the tensors, and how many objects of the heap the
garbage collector ignores and visits.
"""


def at_the_checkpoint(driver: Driver, tiny: tuple[Any, Path]) -> None:
    """Update a server. After others have driven it, this must come first: their versions are not known here."""
    driver.prepare("back")
    driver.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), update_id="back")
    driver.commit("back", "back", 10)
    driver.tell(v.FlushCacheRequest())
    driver.tell(v.ContinueGenerationRequest())


def keys(driver: Driver, directory: Path) -> dict[str, str]:
    """The options with which another stage server reaches the server; ``directory``: for files of its keys."""
    options = {}
    for name, admin in (("api", False), ("admin", True)):
        (directory / name).write_text(driver.engine._server.http._keys[admin])
        options[f"{name}_key_file"] = str(directory / name)
    return options


LORA = {
    "enable_lora": "true",
    "lora_backend": "torch_native",
    "max_lora_rank": "4",
    "lora_target_modules": '["q_proj", "k_proj", "v_proj", "down_proj"]',
    "max_loras_per_batch": "4",
    "max_loaded_loras": "4",
}


@contextlib.contextmanager
def serving(tiny: tuple[Any, Path], loader: Path) -> Iterator[Driver]:
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

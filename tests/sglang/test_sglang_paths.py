"""Real SGLang servers of one rank and of two, launched and attached to: updates by every path.

The attached server of two ranks is that of test_sglang_left_adapters.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from path_suite import *  # noqa: F403
from path_suite import Served
from server_stage import Driver
from sglang_server import at_the_checkpoint, keys

import rlctl
from rlctl.sdk.blocking import Fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", params=["launched, 1 rank", "launched, 2 ranks", "attached, 1 rank"])
def served(
    request: pytest.FixtureRequest, sglang: str, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    how, ranks = request.param.split(", ")
    ranks = int(ranks[0])
    if how == "launched":
        fleet: Fleet = request.getfixturevalue("fleet" if ranks == 1 else "pair")
        yield Served(fleet, tiny[0], ranks)
        return
    lent: Driver = request.getfixturevalue("one")
    at_the_checkpoint(lent, tiny)
    options = keys(lent, tmp_path_factory.mktemp("keys")) | {"allowed_roots": str(tmp_path_factory.getbasetemp())}
    with rlctl.embedded([lent.engine._server.http.url], options=options) as fleet:
        yield Served(fleet, tiny[0], ranks)
    at_the_checkpoint(lent, tiny)

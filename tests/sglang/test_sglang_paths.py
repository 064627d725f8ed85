"""Real SGLang servers of one rank and of two, launched and attached to: updates by every path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from own_sglang import own_sglang
from path_suite import *  # noqa: F403
from path_suite import Served

import rlctl
from rlctl.sdk.blocking import Fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(
    scope="module", params=["launched, 1 rank", "launched, 2 ranks", "attached, 1 rank", "attached, 2 ranks"]
)
def served(
    request: pytest.FixtureRequest, sglang: str, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    how, ranks = request.param.split(", ")
    ranks = int(ranks[0])
    if how == "launched":
        fleet: Fleet = request.getfixturevalue("fleet" if ranks == 1 else "pair")
        yield Served(fleet, tiny[0], ranks)
        return
    roots = {"allowed_roots": str(tmp_path_factory.getbasetemp())}
    with (
        own_sglang(tiny[1], tmp_path_factory.mktemp("keys"), ranks) as (url, keys),
        rlctl.embedded([url], options=keys | roots) as fleet,
    ):
        yield Served(fleet, tiny[0], ranks)

"""Co-located trainers in front of a real SGLang server."""

from __future__ import annotations

import pytest
from colocated_suite import *  # noqa: F403 - the tests

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def engine(sglang: str) -> str:
    """Which server it is."""
    return "sglang"

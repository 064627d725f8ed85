"""The demo with two vLLM servers: every update is verified at level expected by every rank."""

from __future__ import annotations

import pytest
from demo_runs import check_passed, run

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(600)]


def test_the_demo_passes_with_vllm() -> None:
    check_passed(*run("--engine", "vllm"))

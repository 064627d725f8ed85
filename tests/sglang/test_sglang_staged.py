"""Staged updates of a real SGLang of one rank."""

from __future__ import annotations

import pytest
from server_stage import Driver
from staged_suite import *  # noqa: F403

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def staging(driver: Driver) -> Driver:
    return driver

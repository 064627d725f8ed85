"""The decode check on a real SGLang whose decode steps compute with a stale weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import changed
from rlctl_servers.ranks.sabotage import VARIABLE
from rlctl_sglang.engine import SGLangEngine
from server_stage import Driver, check_stale_decode_shows

pytestmark = pytest.mark.timeout(300)


def test_stale_decode_shows_in_the_decode_check_only(
    sglang: str, tiny: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "stale-decode")
    driver = Driver(SGLangEngine, tiny[1])
    try:
        driver.start()
        check_stale_decode_shows(driver, changed(tiny[0], 1))
    finally:
        driver.stop()

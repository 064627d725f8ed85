"""The log of a launched server, as the stage server passes it on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rlctl_sglang.options import Options
from rlctl_sglang.server.process import SGLangProcess

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import EngineConfig

TELLS_ITS_KEYS = """#!/bin/sh
# Stands in for SGLang's Python: says what the file of keys says, as SGLang does of all of its arguments, and ends.
while [ "$1" != --config ]; do shift; done
echo "server_args=$(cat "$2")"
echo "Error: $(cat "$2")"
exit 3
"""


def test_keys_are_not_passed_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    python = tmp_path / "python"
    python.write_text(TELLS_ITS_KEYS)
    python.chmod(0o755)
    process = SGLangProcess(EngineConfig(str(tmp_path)), Options(python=str(python)))

    async def start() -> None:
        try:
            await process.start(lambda _: None)
        finally:
            await process.stop()

    with pytest.raises(RlctlError) as failed:
        asyncio.run(start())
    assert failed.value.reason is Reason.ENGINE_FAILED
    log = capfd.readouterr().err
    assert "sglang: server_args=" in log
    for text in (log, failed.value.message):
        assert "<api-key>" in text
        assert "<admin-api-key>" in text
        assert not any(key in text for key in process._keys.values())

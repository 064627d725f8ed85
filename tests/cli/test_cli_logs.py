"""Servers log JSON lines that name process, operation, update and epoch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import LiveFleet

from rlctl.coordinator.operations import operations
from rlctl.runtime.logs import JsonFormatter


def test_a_server_logs_json_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlctl", "coordinator", "--journal", str(tmp_path / "j.db"), "--end-with-parent"]
    environment = {**os.environ, "RLCTL_LOG_FORMAT": "json"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it serves
        _, log = process.communicate(timeout=60)
    lines = [json.loads(line) for line in log.splitlines()]
    [line] = [line for line in lines if line["message"].startswith("epoch 1:")]
    assert (line["process"], line["level"], line["logger"]) == ("coordinator", "INFO", "rlctl.coordinator.service")


def test_the_line_of_an_operation_names_it(
    rlctl: LiveFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []
    formatter = JsonFormatter({})
    caplog.set_level("INFO", operations.log.name)
    monkeypatch.setattr(caplog.handler, "emit", lambda record: lines.append(formatter.format(record)))
    operation = rlctl("pause", "-o", "json").data
    [line] = [json.loads(line) for line in lines if operation["operation_id"] in line]
    assert (line["operation"], line["verb"]) == (operation["operation_id"], "PauseGeneration")
    assert (line["epoch"], line["principal"]) == (1, "anonymous")

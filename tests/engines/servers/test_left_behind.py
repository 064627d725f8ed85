"""What a stage server that was killed leaves of a server that was just starting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

STAGE = """
import asyncio, sys
from rlctl_servers.server.http import Http
from rlctl_servers.server.process import ServerProcess

class Starting(ServerProcess):
    def command(self):
        return ["-c", sys.argv[1]]

    def environment(self):
        return {}

    async def ready(self):
        return False

asyncio.run(Starting(Http("Test", "http://127.0.0.1:1"), sys.executable, 600).start(print))
"""

SERVER = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
keeps = subprocess.Popen(["sleep", "600"], stdin=worker.stdin)
print(worker.pid, flush=True)
worker.wait()
"""
"""A server whose worker does not notice that it has ended: another process keeps the pipe open."""


def test_every_process_of_the_server_ends_with_the_stage_server() -> None:
    environment = {"PYTHONPATH": str(Path(__file__).parents[3] / "engines")}
    command = [sys.executable, "-c", STAGE, SERVER]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as stage:
        assert stage.stderr is not None
        try:
            server = psutil.Process(int(stage.stderr.readline().removeprefix("test: ")))
            everything = psutil.Process(stage.pid).children(recursive=True)
        finally:
            stage.kill()
        assert server in everything
        assert len(everything) >= 4, "server, worker, what keeps its pipe, and the watcher"
        assert psutil.wait_procs(everything, timeout=30)[1] == []

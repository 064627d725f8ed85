"""A vLLM on a port, without rlctl's extension, as somebody else would start it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlctl_servers.options import Options
from rlctl_servers.server.http import Http
from rlctl_vllm.server.process import VLLMProcess

from rlctl.engine import EngineConfig
from rlctl.runtime.event_loops import LoopThread


class Plain(VLLMProcess):
    """A server on a port, and without the extension."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, Options())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.http = Http("vLLM", f"http://127.0.0.1:{self._port}")

    def command(self) -> Sequence[str]:
        """Its command line, with a port in place of the socket."""
        words = list(super().command())
        for name in ("--uds", "--worker-extension-cls"):
            at = words.index(name)
            del words[at : at + 2]
        return [*words, "--port", str(self._port), "--host", "127.0.0.1"]


@contextlib.contextmanager
def plain_server(checkpoint: Path) -> Iterator[str]:
    """The URL of one that runs."""
    loop = LoopThread("plain")
    process = Plain(EngineConfig(str(checkpoint), dtype="float32"))
    try:
        loop.submit(process.start(lambda error: None)).result(300)
        yield process.http.url
    finally:
        loop.submit(process.stop()).result(60)
        loop.stop()

"""A vLLM on a port, as its user would start it: with rlctl's extension, or without."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlctl_servers.options import Options
from rlctl_servers.server.http import Http
from rlctl_vllm.server.process import VLLMProcess

from rlctl.engine import EngineConfig
from rlctl.runtime.event_loops import LoopThread


class OnPort(VLLMProcess):
    """A server on a port, with the extension."""

    def __init__(self, config: EngineConfig, arguments: Mapping[str, str] | None = None) -> None:
        super().__init__(config, Options(arguments=dict(arguments or {})))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.http = Http("vLLM", f"http://127.0.0.1:{self._port}")

    def command(self) -> Sequence[str]:
        """Its command line, with a port in place of the socket."""
        words = _without(super().command(), "--uds")
        return [*words, "--port", str(self._port), "--host", "127.0.0.1"]


class Plain(OnPort):
    """A server on a port, and without the extension."""

    def command(self) -> Sequence[str]:
        """Its command line."""
        return _without(super().command(), "--worker-extension-cls")


def _without(words: Sequence[str], name: str) -> list[str]:
    at = words.index(name)
    return [*words[:at], *words[at + 2 :]]


def plain_server(checkpoint: Path) -> contextlib.AbstractContextManager[str]:
    """The URL of a server without the extension."""
    return serving(Plain(EngineConfig(str(checkpoint), dtype="float32")))


@contextlib.contextmanager
def serving(process: OnPort) -> Iterator[str]:
    """The URL of one that runs."""
    loop = LoopThread("on a port")
    try:
        loop.submit(process.start(lambda error: None)).result(400)
        yield process.http.url
    finally:
        loop.submit(process.stop()).result(60)
        loop.stop()

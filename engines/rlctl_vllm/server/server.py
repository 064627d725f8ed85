"""The vLLM server behind an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from rlctl_servers.options import Options
from rlctl_servers.server import server
from rlctl_servers.server.http import Http

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import EngineConfig
from rlctl_vllm.options import PRODUCT, parse_options
from rlctl_vllm.server.process import VLLMProcess


async def checkpoint_at(url: str, options: Mapping[str, str]) -> str:
    """Return the checkpoint of a vLLM server, or ""; see :func:`rlctl.engine.recognise`."""
    if "version" not in await server.read_json(PRODUCT, url, "/version", ""):
        return ""
    models = await server.read_json(PRODUCT, url, "/v1/models", parse_options({**options, "url": url}).api_key)
    return str(next((model.get("root", "") for model in models.get("data", ())), ""))


class Server(server.Server):
    """A vLLM server, launched or attached. Any caller that reaches an attached server can drive it.

    Attributes:
        place: directory of a launched server, removed when the server has ended; or None.
    """

    probe: ClassVar[str] = "/health"

    def __init__(self, config: EngineConfig, options: Options, on_end: Callable[[RlctlError], None]) -> None:
        """``on_end`` is called, from any thread, when the server is gone. Raises FIELD_INVALID."""
        process = None if options.url else VLLMProcess(config, options)
        self.place = process.scratch.path if process else None
        http = process.http if process else Http(PRODUCT, options.url, options.api_key)
        super().__init__(process, http, on_end)

    async def refuse_unready(self) -> None:
        """Raise if the plug-in cannot attach to a running server."""
        health = await self.http.call("/health", timeout_s=server.PROBE_S)
        if health.status != 200:
            raise Reason.ILLEGAL_STATE.error(f"vLLM at {self.http.url} is not ready", field="options.url")
        if (await self.http.call("/v1/models", timeout_s=server.PROBE_S, admin=False)).status == 401:
            raise Reason.FIELD_INVALID.error(
                f"vLLM at {self.http.url} does not take the key", field="options.api_key_file"
            )
        paused = await self.http.call("/is_paused", timeout_s=server.PROBE_S)
        if paused.status == 404:
            raise Reason.UNSUPPORTED.error(
                f"vLLM at {self.http.url} has no admin calls",
                field="options.url",
                next_step="Start vLLM with VLLM_SERVER_DEV_MODE=1 where only rlctl reaches it: the calls need no key.",
            )
        if not paused.ok or paused.body.get("is_paused"):
            raise Reason.ILLEGAL_STATE.error(
                f"vLLM at {self.http.url} is paused",
                field="options.url",
                next_step="Attach to a server that generates: earlier pauses of the server are unknown.",
            )

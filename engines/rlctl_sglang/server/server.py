"""The SGLang server behind an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import ClassVar

from rlctl_servers.options import key
from rlctl_servers.server import server
from rlctl_servers.server.http import Answer, Http

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import EngineConfig
from rlctl_sglang.options import Options
from rlctl_sglang.server.process import PRODUCT, Meeting, SGLangProcess

DIFFUSION = "diffusion"
"""The model type that SGLang-Diffusion reports for every model (``multimodal_gen/.../http_server.py``)."""


async def checkpoint_at(url: str, options: Mapping[str, str]) -> str:
    """Return the checkpoint of an SGLang server at a URL; see :func:`rlctl.engine.recognise`."""
    info = await server.read_json(PRODUCT, url, "/model_info", key(options, "api_key_file"))
    return "" if info.get("model_type") == DIFFUSION else str(info.get("model_path", ""))


class Server(server.Server):
    """One SGLang server.

    Attributes:
        fenced: no other client can drive the server.
    """

    probe: ClassVar[str] = "/ready"

    def __init__(
        self,
        config: EngineConfig,
        options: Options,
        on_end: Callable[[RlctlError], None],
        meeting: Meeting | None = None,
    ) -> None:
        """``meeting``: for a server over several nodes. ``on_end`` is called, from any thread, when the server is gone.

        Raises FIELD_INVALID.
        """
        process = None if options.url else SGLangProcess(config, options, meeting)
        http = process.http if process else Http(PRODUCT, options.url, options.api_key, options.admin_key)
        super().__init__(process, http, on_end)
        self.fenced = self.launched or bool(options.admin_key)

    def refuse_ill(self, answer: Answer) -> None:
        """Raise UNREACHABLE for the answer of a proxy. SGLang itself answers 200 or, while paused, 503."""
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR and answer.status != HTTPStatus.SERVICE_UNAVAILABLE:
            raise Reason.UNREACHABLE.error(f"{PRODUCT} at {self.http.url}: status {answer.status}")

    async def refuse_unready(self) -> None:
        """Raise if a running server cannot be attached to."""
        answer = await self.http.call("/ready", timeout_s=server.PROBE_S)
        info = await self.http.call("/model_info", timeout_s=server.PROBE_S, admin=False)
        if isinstance(info.body, dict) and info.body.get("model_type") == DIFFUSION:
            raise Reason.UNSUPPORTED.error(
                f"at {self.http.url} is SGLang-Diffusion, which makes pictures and not tokens",
                field="options.url",
                next_step="Attach to it with --engine sglang-diffusion.",
            )
        if answer.status != 200:
            raise Reason.ILLEGAL_STATE.error(
                f"SGLang at {self.http.url} is not ready: paused, or starting",
                field="options.url",
                next_step="Attach to a server that generates: earlier pauses of the server are unknown.",
            )
        if info.status != 200:
            raise Reason.FIELD_INVALID.error(
                f"SGLang at {self.http.url} does not take the key: {info.message}", field="options.api_key_file"
            )

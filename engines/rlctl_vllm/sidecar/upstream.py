"""The vLLM server behind the sidecar: its properties, and calls other than requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl_servers.server.http import Answer, Http

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.verbs_pb2 import Loads
from rlctl_vllm.requests.bodies import Limits
from rlctl_vllm.server import facts
from rlctl_vllm.sidecar.responses import COMPLETIONS, TOKENS

CALL_S = 10.0
_NEXT = "See whether it runs; its log says more."
ANY_TOKEN = 1 << 31
ROUTES = {"tokens": TOKENS, "completions": COMPLETIONS}


@dataclass(frozen=True)
class About:
    """Properties of the server, requested once.

    Attributes:
        model: name under which the server serves its model.
        path: checkpoint of the server's start.
        route: route of requests, :data:`TOKENS` or :data:`COMPLETIONS`.
        admin: the server has admin calls (VLLM_SERVER_DEV_MODE=1).
    """

    model: str
    path: str
    version: str
    limits: Limits
    route: str
    admin: bool


class Upstream:
    """A vLLM server."""

    def __init__(self, http: Http) -> None:
        self.http = http

    async def ask(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = CALL_S) -> Answer:
        """Call the server. Raises STAGE_NOT_SERVING without an answer."""
        try:
            return await self.http.call(path, body, timeout_s=timeout_s, admin=False)
        except TimeoutError:
            cause = f"vLLM did not answer {path} in {timeout_s:g} s"
            raise Reason.STAGE_NOT_SERVING.error(cause, next_step=_NEXT) from None
        except RlctlError as error:
            raise Reason.STAGE_NOT_SERVING.error(error.message, next_step=_NEXT) from error

    async def about(self, wanted: str = "auto") -> About:
        """Determine the properties of the server. ``wanted``: a name in :data:`ROUTES`, or "auto".

        Raises STAGE_NOT_SERVING, TOKEN_INVALID, UNSUPPORTED if the server does not have the wanted route.
        """
        models = await self.ask("/v1/models")
        if models.status == 401:
            raise Reason.TOKEN_INVALID.error(
                "vLLM does not take the key", field="api_key_file", next_step="Use the key that vLLM was started with."
            )
        paths = (await self.ask("/openapi.json")).body["paths"]
        # Adapters are listed beside their model.
        card: Mapping[str, Any] = next(entry for entry in models.body["data"] if not entry.get("parent"))
        route = TOKENS if TOKENS in paths else COMPLETIONS
        if wanted != "auto":
            route = ROUTES[wanted]
            if route not in paths:
                raise Reason.UNSUPPORTED.error(
                    f"this vLLM has no {route}", field="route", next_step="Start it with --enable-scale-out."
                )
        admin = "/abort_requests" in paths
        path = str(card.get("root") or card["id"])
        version = str((await self.ask("/version")).body["version"])
        return About(str(card["id"]), path, version, await self._limits(card, path, admin=admin), route, admin)

    async def _limits(self, card: Mapping[str, Any], path: str, *, admin: bool) -> Limits:
        config = await asyncio.to_thread(_config, path)
        if admin:
            vllm_config = (await self.ask("/server_info?config_format=json", timeout_s=60)).body["vllm_config"]
            limits = facts.Facts("", vllm_config, "", (), {}).limits(config)
        else:
            context = int(card.get("max_model_len") or 0)
            limits = Limits(int(config.get("vocab_size") or 0), context, context - 1)
        return Limits(
            vocab_size=limits.vocab_size or ANY_TOKEN,  # vLLM refuses unknown ids
            context_length=limits.context_length,
            longest_prompt=limits.longest_prompt,
            tokenizer=limits.tokenizer,
            most_logprobs=limits.most_logprobs,
            logprobs_mode=limits.logprobs_mode if admin else "",
            any_logprobs=True,
            no_prompt_logprobs=limits.no_prompt_logprobs,
        )

    async def label(self) -> str:
        """Return the label of the weight version; without such a call, the label with which vLLM starts."""
        answer = await self.ask("/weight_info")
        return str(answer.body["weight_version"]) if answer.ok else "default"

    async def paused(self) -> bool:
        """Whether the server is paused; False for a server without this call, which cannot be paused."""
        answer = await self.ask("/is_paused")
        return answer.ok and bool(answer.body.get("is_paused"))

    async def loads(self) -> Loads:
        """Return the running and waiting requests of the server."""
        return facts.loads(str((await self.ask("/metrics")).body))

    async def abort(self, rids: Sequence[str] | None, route: str) -> None:
        """End requests by their ids, or all requests. Raises ENGINE_FAILED, STAGE_NOT_SERVING."""
        body: dict[str, Any] = {}
        if rids is not None:
            # An empty list would end all requests.
            if not rids:
                return
            body["request_ids"] = [f"generate-tokens-{rid}" if route == TOKENS else f"cmpl-{rid}-0" for rid in rids]
        answer = await self.ask("/abort_requests", body)
        if answer.status != 200:
            raise Reason.ENGINE_FAILED.error(f"vLLM refused the abort: {answer.message}")


def _config(path: str) -> dict[str, Any]:
    """Return the checkpoint's config, if the checkpoint is on this machine."""
    try:
        config = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    text = config.get("text_config")
    return text if isinstance(text, dict) else config

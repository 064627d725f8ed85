"""The SGLang-Diffusion server behind an engine: the conditions of an attach, its statistics and its checksums."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from rlctl_servers.server import server
from rlctl_servers.server.admin_calls import Control
from rlctl_servers.server.http import Answer
from rlctl_servers.server.server_info import without_code

from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl_sglang.server.server import DIFFUSION

PRODUCT = "SGLang-Diffusion"
CHECKSUM = "/get_weights_checksum"
CHECKER = "/update_weights_from_tensor_checker"
_NEEDED = ("/server_info", "/models", "/stats", CHECKSUM, CHECKER)
"""Routes without which a server cannot be attached to."""


class Server(server.Server):
    """A server that rlctl has not started."""

    probe: ClassVar[str] = "/health"

    async def refuse_unready(self) -> None:
        """Raise if the server cannot be attached to."""
        info = await self.http.call("/model_info", timeout_s=server.PROBE_S)
        if not info.ok or not isinstance(info.body, dict) or info.body.get("model_type") != DIFFUSION:
            raise Reason.FIELD_INVALID.error(f"the server at {self.http.url} is no {PRODUCT}", field="options.url")
        answer = await self.http.call(self.probe, timeout_s=server.PROBE_S)
        if not answer.ok:
            raise Reason.ILLEGAL_STATE.error(
                f"{PRODUCT} at {self.http.url} is not ready: {answer.message}", field="options.url"
            )

    def refuse_ill(self, answer: Answer) -> None:
        """Raise UNREACHABLE for an ill server. The front still answers after the end of the working process."""
        if not answer.ok:
            raise Reason.UNREACHABLE.error(f"{PRODUCT} at {self.http.url}: {answer.message}")


def refuse_release(version: str, routes: Collection[str]) -> None:
    """Raise UNSUPPORTED for a release without the routes of an attach. ``version``: product and version."""
    for cause in without_code(version, {"attach": _NEEDED}, routes).values():
        raise Reason.UNSUPPORTED.error(cause, field="options.url", next_step=f"Attach to {PRODUCT} 0.5.23.")


def refuse_kind(facts: Mapping[str, Any], stats: Mapping[str, Any], checkpoint: str, url: str, version: str) -> None:
    """Raise for a different checkpoint, several GPUs, a role, or a pipeline that splits requests.

    ``facts``: the answers of the routes about the server. ``version``: product and version.
    """
    loaded = str(facts.get("model_path", ""))
    if os.path.realpath(loaded) != os.path.realpath(checkpoint):
        raise Reason.CHECKPOINT_MISMATCH.error(
            f"the server was started with {loaded}, not {checkpoint}", field="model_path"
        )
    role = stats.get("role")
    for fact, value in (("num_gpus at /models", facts.get("num_gpus")), ("disagg.role at /stats", role)):
        if value is None:
            raise Reason.UNSUPPORTED.error(f"{version} does not report {fact}", field="options.url")
    if facts.get("num_gpus") != 1 or role != "monolithic":
        raise Reason.UNSUPPORTED.error(
            f"the server at {url} has {facts.get('num_gpus')} GPUs and role {role}: the "
            "answer of its first rank proves nothing about the others",
            field="options.url",
            next_step="Attach to servers of one GPU each.",
        )
    if "Pi05" in "".join(facts.get("architectures") or ()):
        raise Reason.UNSUPPORTED.error(
            "its scheduler cuts requests of this pipeline into parts, and an update could come between them",
            field="options.url",
        )


async def stats_of(control: Control, call: Call) -> Mapping[str, Any]:
    """Return the scheduler's statistics, after the end of all earlier work.

    Raises as :meth:`Control.ask`, and ENGINE_FAILED if the front answers alone, with success.
    """
    stats = (await control.ask("/stats", call=call)).get("disagg") or {}
    if "error" in stats:
        raise Reason.ENGINE_FAILED.error(f"{PRODUCT}: {stats['error']}")
    return dict(stats)


async def checksums_of(control: Control, call: Call) -> dict[str, str]:
    """Return the server's checksums of all modules. Raises as :meth:`Control.ask`, and ANSWER_INVALID."""
    checksums = await control.ask(CHECKSUM, {}, call=call)
    if not isinstance(checksums, dict) or not all(isinstance(checksum, str) for checksum in checksums.values()):
        raise Reason.ANSWER_INVALID.error(f"{PRODUCT} answered {CHECKSUM} with {type(checksums).__name__}")
    return checksums

"""rlctl as a plug-in of SGLang: entry point group ``sglang.srt.plugins``, loaded by every scheduler process.

The hooks run on the scheduler's thread, between two steps. An exception would end the server, so rlctl's calls raise
nothing, and the wait of a paused scheduler is SGLang's own. The route of rlctl's calls asks for SGLang's admin key.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from rlctl_sglang.ranks.channel import ACTION, NEW_LABEL, PAUSED_ROUND, RETRACTED, TARGET

log = logging.getLogger(__name__)


def register() -> None:
    """Hook SGLang's weights checker, the loop of a paused scheduler, the change of the label, and retractions.

    SGLang logs a missing target. Without the checker, the ranks do not answer. Without the loop, a paused scheduler
    polls its sockets without a wait. Without the label and retractions, a token can have the name of another version.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, Hook(), HookType.AROUND)
    HookRegistry.register(PAUSED_ROUND, sleep_until_message, HookType.AFTER)
    HookRegistry.register(NEW_LABEL, count_in_flight, HookType.AROUND)
    HookRegistry.register(RETRACTED, forget_in_flight, HookType.AFTER)


def sleep_until_message(_: None, scheduler: Any) -> None:
    """Let a paused scheduler sleep until its next message, as ``--sleep-on-idle`` lets an idle scheduler sleep.

    A paused scheduler computes nothing. But SGLang polls in a loop without a wait, so each paused server takes a whole
    core from all other processes of the update.
    """
    sleeper = getattr(scheduler, "idle_sleeper", None)
    if sleeper is not None:
        sleeper.maybe_sleep()


def count_in_flight(record: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Let SGLang end the old version's span at the tokens that the old weights have computed.

    After a pause in place, the last token of a request still waits among the scheduler's results. SGLang counts only
    the tokens before it, and would give it the new label.
    """
    counted = []
    try:
        for request in _in_flight(scheduler):
            request.output_ids.append(0)
            counted.append(request)
    except Exception:
        log.exception("rlctl: tokens in flight are not counted")
    try:
        record(scheduler, *args, **kwargs)
    finally:
        for request in counted:
            request.output_ids.pop()


def _in_flight(scheduler: Any) -> list[Any]:
    """Return the requests with one computed token that is not processed yet.

    With speculative decoding the number of such tokens is unknown, so no request is returned.
    """
    if not scheduler.spec_algorithm.is_none():
        return []
    # On MLX the results have another form, and are not counted.
    batches = [result[0] for result in getattr(scheduler, "result_queue", ()) if isinstance(result, tuple)]
    # The rest of a prompt's chunks come after the pause.
    return [request for batch in batches for request in batch.reqs if request is not scheduler.chunked_req]


def forget_in_flight(_: None, request: Any) -> None:
    """Let the old version's span of a retracted request end at the tokens that the request has.

    SGLang drops the token in flight of a request that it retracts for want of memory, and computes the token again.
    """
    try:
        if request.input_embeds is not None:
            return  # SGLang itself cuts the spans, at the tokens that it has sent
        count = len(request.output_ids)
        events = request.weight_version_events if count else ()
        request.weight_version_events = [
            dataclasses.replace(event, num_output_tokens=min(event.num_output_tokens, count)) for event in events
        ]
    except Exception:
        log.exception("rlctl: a token in flight is not forgotten")


class Hook:
    """The hook of one scheduler process."""

    __name__ = "rlctl"

    def __init__(self) -> None:
        self._endpoint: Any = None

    def __call__(self, check_weights: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
        """Answer rlctl's calls, and leave other calls to SGLang."""
        if recv_req.action != ACTION:
            return check_weights(manager, recv_req)
        from sglang.srt.managers.io_struct import CheckWeightsReqOutput

        try:
            return CheckWeightsReqOutput(success=True, message=self._answers(manager, recv_req))
        except Exception as error:
            log.exception("rlctl: a call to the ranks")
            return CheckWeightsReqOutput(success=False, message=f"rlctl: {type(error).__name__}: {error}")

    def _answers(self, manager: Any, recv_req: Any) -> str:
        """Return the answers of all tensor-parallel ranks, in JSON: only rank 0's message leaves the server."""
        import torch.distributed as dist

        answer = self._answer(manager, recv_req)
        size = dist.get_world_size(group=manager.tp_cpu_group)
        answers: list[Any] = [answer] * size
        if size > 1:
            dist.all_gather_object(answers, answer, group=manager.tp_cpu_group)
        return json.dumps(answers)

    def _answer(self, manager: Any, recv_req: Any) -> dict[str, Any]:
        """Return this rank's answer. The other ranks wait for the answer, so nothing is raised."""
        try:
            if self._endpoint is None:
                from rlctl_servers.ranks.endpoint import Endpoint

                from rlctl_sglang.ranks.model import SGLangModel

                self._endpoint = Endpoint(partial(SGLangModel, manager))
            answer: dict[str, Any] = self._endpoint.call(**json.loads(recv_req.skip_tensor_list[0]))
        except Exception as error:  # a failed import, or a call of a different form
            log.exception("rlctl: a call to this rank")
            return {"failed": f"{type(error).__name__}: {error}"}
        return answer

"""Commands to vLLM, with a check after a refusal that its ranks are in step: each answers its latest call.

If a call of vLLM's own fails at a rank, vLLM raises at once and leaves the answers of later ranks unread. From then on
vLLM takes each unread answer for the answer to the next call, and may report a failed load as done (``collective_rpc``
in ``v1/executor/multiproc_executor.py`` of 0.32.0).
"""

from __future__ import annotations

import secrets
from typing import Any

from rlctl_servers.server.admin_calls import Control
from rlctl_servers.server.http import Answer
from rlctl_servers.updates.rank_calls import out_of_step

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN

_WORD = "_rlctl_word"


class InStepControl(Control):
    """Sends questions and commands to a vLLM server.

    Attributes:
        ranks: number of the server's ranks.
    """

    ranks = 1

    async def must(self, path: str, body: dict[str, Any], *, call: Call, **options: Any) -> Answer:
        """Do as :meth:`Control.must`, and as :meth:`give_up_out_of_step` after a refusal."""
        try:
            return await super().must(path, body, call=call, **options)
        except RlctlError as error:
            await self.give_up_out_of_step(error, call)
            raise

    async def give_up_out_of_step(self, error: RlctlError, call: Call) -> None:
        """Ask the ranks after the error of a command. A server with ranks out of step counts as lost.

        Raises ENGINE_FAILED (UNKNOWN) for such a server.
        """
        arrived = error.outcome != OUTCOME_UNKNOWN and error.reason is not Reason.UNREACHABLE
        if self.ranks > 1 and arrived and not await self._in_step(call):
            raise out_of_step(self, error.message) from error

    async def _in_step(self, call: Call) -> bool:
        """Return False also if the ranks cannot be asked: this error must not replace that of the command."""
        try:
            return await in_step(self, self.ranks, call)
        except RlctlError:
            return False


async def in_step(control: Control, ranks: int, call: Call) -> bool:
    """Return whether every rank answers its latest call: each rank stores a word and returns it."""
    word = secrets.token_hex(8)
    await control.tell("/collective_rpc", {"method": "__setattr__", "args": [_WORD, word]}, call=call)
    answer = await control.tell("/collective_rpc", {"method": "__getattribute__", "args": [_WORD]}, call=call)
    return answer.ok and answer.body["results"] == [word] * ranks

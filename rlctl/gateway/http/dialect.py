"""The parts of a dialect: routes, scopes, replies, error format."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlctl.contract import access, scopes
from rlctl.contract.errors import RlctlError
from rlctl.runtime.http_errors import body_of, headers_of

if TYPE_CHECKING:
    from rlctl.gateway.http.call import Call

BODY_BYTES = 64 << 20
"""Most of a body, unless the dialect says otherwise: a batch of long prompts as token ids."""


class Scope(enum.Enum):
    """What a caller must be allowed. Who is allowed what the coordinator and the stages decide, by the token."""

    OPEN = "open"  # health: nothing is asked
    VIEWER = "viewer"
    ROLLOUT = "rollout"
    ADMIN = "admin"  # changes something: is not cancelled when the caller leaves

    @property
    def needs(self) -> tuple[scopes.Scope, ...]:
        """Scopes of which a caller needs one to come to the coordinator, which decides by verb, model and adapter."""
        if self is Scope.ADMIN:
            return access.CHANGES
        return (scopes.Scope.ROLLOUT if self is Scope.ROLLOUT else scopes.Scope.VIEWER,)


@dataclass(frozen=True)
class Reply:
    """An answer as a whole.

    Attributes:
        body: bytes go as they are, a str as text, None as nothing, anything else as JSON.
        content_type: in place of the type of the body. The headers may have it instead.
    """

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = ""


@dataclass(frozen=True)
class Stream:
    """An answer as server-sent events, or whatever ``content_type`` says.

    Attributes:
        chunks: bytes to be written as they come. What the first one raises is answered as an error; what a later one
            raises is given to ``fail``. Closed when the caller leaves.
        fail: the last chunk after a failure; None: the connection breaks.
        content_type: "": the headers have it, if any.
    """

    chunks: AsyncIterator[bytes]
    fail: Callable[[RlctlError], bytes] | None
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "text/event-stream"
    status: int = 200


Answer = Reply | Stream
Handler = Callable[["Call"], Awaitable[Answer]]


@dataclass(frozen=True)
class Route:
    """One row of a dialect's table.

    Attributes:
        methods: "POST", or several with spaces between them.
        path: as the original has it; ``{name}`` is one segment, ``{name:.*}`` any rest (``call.path["name"]``).
        handler: what it does.
        doc: one line, for the table in the documentation; the handler's own first line by default.
        lasting: it goes on when the caller leaves; not for what the coordinator sees to the end by itself.
        fail: says what is wrong with a call that the handler does not come to; None: as the dialect does.
    """

    methods: str
    path: str
    handler: Handler
    scope: Scope = Scope.ADMIN
    doc: str = ""
    lasting: bool = True
    fail: Callable[[RlctlError], Reply] | None = None

    @property
    def about(self) -> str:
        """One line about it."""
        return self.doc or (self.handler.__doc__ or "").strip().partition("\n")[0]


def plain_error(error: RlctlError) -> Reply:
    """``{"error": {...}}`` with message, reason, field, cause, next step and code; OpenAI's names beside them."""
    return Reply(body_of(error), error.http_status, headers_of(error))


@dataclass(frozen=True)
class Dialect:
    """A table of routes, and how it says no.

    Attributes:
        routes: the first that fits a request answers it.
        fail: an error as the original would answer it.
        admit: asked before every request that is not OPEN; raises what refuses the caller. For dialects with keys of
            their own; the caller's bearer token goes to the coordinator and the stages in any case.
        body_bytes: most of a body.
        any_model: OpenAI's ``model`` is not checked by the original.
    """

    name: str
    routes: Sequence[Route]
    fail: Callable[[RlctlError], Reply] = plain_error
    admit: Callable[[Call], None] | None = None
    body_bytes: int = BODY_BYTES
    any_model: bool = False

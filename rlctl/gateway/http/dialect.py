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
"""Default limit of a body, in bytes: enough for a batch of long prompts as token ids."""


class Scope(enum.Enum):
    """Access that a route needs. Coordinator and stages decide by the token."""

    OPEN = "open"  # health: no access needed
    VIEWER = "viewer"
    ROLLOUT = "rollout"
    ADMIN = "admin"  # may change something: not cancelled when the caller disconnects

    @property
    def needs(self) -> tuple[scopes.Scope, ...]:
        """Scopes of which a caller needs at least one. The coordinator also decides by verb, model and adapter."""
        if self is Scope.ADMIN:
            return access.CHANGES
        return (scopes.Scope.ROLLOUT if self is Scope.ROLLOUT else scopes.Scope.VIEWER,)


@dataclass(frozen=True)
class Reply:
    """A complete response.

    Attributes:
        body: bytes are sent unchanged, a str as text, None as an empty body, any other value as JSON.
        content_type: replaces the type of the body. The headers may have the type instead.
    """

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = ""


@dataclass(frozen=True)
class Stream:
    """A response of server-sent events, or of another ``content_type``.

    Attributes:
        chunks: bytes to write as they arrive. An error before the first chunk becomes an error response; a later error
            goes to ``fail``. Closed when the caller disconnects.
        fail: makes the last chunk after an error; None breaks the connection.
        content_type: "" if the headers have the type, or there is no type.
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
    """A row of a dialect's table.

    Attributes:
        methods: "POST", or several methods separated by spaces.
        path: the original's path; ``{name}`` is one segment, ``{name:.*}`` any rest (``call.path["name"]``).
        doc: line for the documentation; by default the first line of the handler's docstring.
        lasting: continues when the caller disconnects; not needed for operations that the coordinator completes by
            itself.
        fail: forms errors of calls that do not reach the handler; None: the dialect's ``fail``.
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
        """Line for the documentation."""
        return self.doc or (self.handler.__doc__ or "").strip().partition("\n")[0]


def plain_error(error: RlctlError) -> Reply:
    """Form ``{"error": {...}}`` with message, reason, field, cause, next step and code, and OpenAI's names."""
    return Reply(body_of(error), error.http_status, headers_of(error))


@dataclass(frozen=True)
class Dialect:
    """A table of routes, with its error format.

    Attributes:
        routes: the first matching route answers a request.
        fail: forms an error as the original does.
        admit: called before every request that is not OPEN; raises to refuse the caller. For dialects with their own
            keys; coordinator and stages check the caller's bearer token in any case.
        body_bytes: limit of a body.
        any_model: the original does not check OpenAI's ``model``.
    """

    name: str
    routes: Sequence[Route]
    fail: Callable[[RlctlError], Reply] = plain_error
    admit: Callable[[Call], None] | None = None
    body_bytes: int = BODY_BYTES
    any_model: bool = False

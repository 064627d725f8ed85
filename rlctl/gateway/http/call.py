"""A request to a dialect, as handlers see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from aiohttp import web

from rlctl.contract.enums import short_name
from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.gateway.backend.service import Generation
from rlctl.gateway.http import identity
from rlctl.gateway.http.bodies import Fields, dump
from rlctl.ports import new_uuid7
from rlctl.runtime.http_bodies import LARGE, Bodies, Body
from rlctl.sdk.aio import AsyncFleet
from rlctl.transport.channel import Credentials, OnBehalf
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_SKIPPED, StageState
from rlctl.v1.results_pb2 import Operation, RankResult, StageResult

T = TypeVar("T")

_UNREAD: Any = object()

UNKNOWN_FIELDS = "X-RLCTL-Unknown-Fields"
"""Response header with the fields of the body that were not read."""

EXCLUDED = "X-RLCTL-Excluded"
"""Response header with the excluded engines of an operation, each with its state."""


class Call:
    """A request to a dialect.

    Attributes:
        url: path and query as received.
        path: values of the route's placeholders.
        query: parameters of the query; the first value of a repeated parameter.
        headers: headers of the request; names ignore case.
        token: the caller's bearer token.
        credentials: the caller's own token, or the gateway's on behalf of the caller.
        fleet: the fleet, with the caller's credentials.
        generation: generates samples for the routes.
        size: bytes of the body, once read.
    """

    def __init__(
        self,
        request: web.Request,
        fleet: AsyncFleet,
        generation: Generation,
        *,
        dialect: str,
        changes: bool,
        accepted: Bodies,
    ) -> None:
        """``changes``: the route may change something; ``accepted``: the bodies of this server.

        Raises FIELD_INVALID, TOKEN_MISSING for unreadable headers.
        """
        identity.readable(request.headers)
        self.method = request.method
        self.url = str(request.rel_url)
        self.path: Mapping[str, str] = request.match_info
        self.query: Mapping[str, str] = request.query
        self.headers: Mapping[str, str] = request.headers
        self.token = identity.token(request.headers)
        self.credentials: Credentials = self.token
        self.fleet = fleet.on_behalf_of(self.token)
        self.generation = generation
        self._request = request
        self._dialect = dialect
        self._changes = changes
        self._accepted = accepted
        self._body = Body(request, accepted)
        self._id = ""
        self._data: bytes | None = None
        self.size = 0
        self._value: Any = _UNREAD
        self._replaced = False
        self._parsed: Fields | None = None
        self._fields: list[Fields] = []
        self._unknown: list[str] = []
        self._excluded: dict[str, str] = {}

    def act_for(self, credentials: OnBehalf) -> None:
        """Call the fleet on behalf of a caller that the gateway knows without a token."""
        self.credentials = credentials
        self.fleet = self.fleet.on_behalf_of(credentials)

    def query_all(self, name: str) -> list[str]:
        return list(self._request.query.getall(name, []))

    async def body(self) -> bytes:
        """Return the body as received. Raises MESSAGE_TOO_LARGE, DEADLINE_EXCEEDED, TOO_MANY_REQUESTS."""
        if self._data is None:
            if self.size:
                raise RuntimeError("the body has been dropped; read it before the handler")
            self._data = await self._body.read()
            self.size = len(self._data)
        return self._data

    async def json(self) -> Any:
        """Return the parsed body; None without a body. Raises as :meth:`body`, and FIELD_INVALID.

        Token id prompts of a huge body are ``TokenIds`` messages, not lists (:meth:`Bodies.parse`).
        """
        if self._value is _UNREAD:
            data = await self.body()
            self._value = await self._accepted.parse(data) if data and not data.isspace() else None
        return self._value

    def replace_json(self, value: Any) -> None:
        """Replace the parsed body for handlers; for middleware."""
        self._value, self._parsed, self._replaced = value, None, True

    async def take_body(self) -> bytes:
        """Return the body to forward: as received, or the replacing JSON. A large body cannot be read again.

        Raises as :meth:`body`, and FIELD_INVALID for a value that JSON cannot represent.
        """
        data = await self.body()
        if self._replaced:
            value = self._value
            data = await self.beside(lambda: dump(value))
        self.forget()
        return data

    async def fields(self) -> Fields:
        """Return the fields of the body, an object; {} without a body. Raises as :meth:`json`.

        The response lists the fields that are not taken.
        """
        if self._parsed is None:
            value = await self.json()
            self._parsed = self.watch(Fields({} if value is None else value))
        return self._parsed

    async def beside(self, work: Callable[[], T]) -> T:
        """Return the result of work on the whole body; see :meth:`Bodies.beside`."""
        await self.body()
        return await self._accepted.beside(self.size, work)

    def forget(self) -> None:
        """Drop a large body while its samples run; the samples do not need the body. It cannot be read again."""
        if self.size >= LARGE:
            self._value, self._parsed = _UNREAD, None
            for fields in self._fields:
                fields.forget()
            self.close()

    def close(self) -> None:
        """Drop the received body, and return its room."""
        self._data = None
        self._body.close()

    def watch(self, fields: Fields) -> Fields:
        """List the untaken fields in the response, too. Return ``fields``."""
        self._fields.append(fields)
        return fields

    def note_unknown(self, names: Sequence[str]) -> None:
        """List names of unknown fields in the response."""
        self._unknown += names

    async def operate(self, request: Any, *, partly: bool = False, **options: Any) -> Operation:
        """Carry out a verb as :meth:`rlctl.sdk.aio.AsyncFleet.call`. The response lists the excluded engines.

        Raises as that method. Raises OperationFailed for UNSUPPORTED if an engine skipped the verb, unless ``check`` is
        false. With ``partly``, only if every engine did.
        """
        operation: Operation = await self.fleet.call(request, **options)
        self.note_excluded(operation)
        if options.get("check", True):
            refuse_skipped(operation, partly=partly)
        return operation

    def note_excluded(self, operation: Operation) -> None:
        """List the operation's excluded engines in the response."""
        self._excluded |= {each.slot: short_name(StageState.DESCRIPTOR, each.state) for each in operation.excluded}

    @property
    def notes(self) -> dict[str, str]:
        """Headers of a response that is no error."""
        headers = {
            UNKNOWN_FIELDS: self.unknown,
            EXCLUDED: [f"{slot}={state}" for slot, state in self._excluded.items()],
        }
        return {
            name: ", ".join(_printable(each[:1000]) for each in names)[:1000]
            for name, names in headers.items()
            if names
        }

    @property
    def unknown(self) -> list[str]:
        """Unknown fields of the body, each once."""
        return list(dict.fromkeys([*self._unknown, *(name for fields in self._fields for name in fields.unknown)]))

    @property
    def keyed(self) -> bool:
        return any(name in self.headers for name in identity.KEYS)

    async def request_id(self, step: str = "") -> str:
        """Return the id for the header of an operation. Repeats with an equal ``Idempotency-Key`` or ``X-Request-Id``
        have an equal id.

        ``step`` distinguishes several operations of one request. Raises FIELD_INVALID, and REQUEST_ID_REUSED if the key
        came with a different body.
        """
        header, key = identity.key(self.headers)
        if not self._id and not (key and self._changes):
            self._id = new_uuid7()
        if not self._id:
            self._id = identity.as_uuid7(key) or await self._reserved(header, key)
        return identity.derived(self._id, step) if step else self._id

    @property
    def _who(self) -> str:
        return self.credentials.principal if isinstance(self.credentials, OnBehalf) else self.credentials or ""

    async def _reserved(self, header: str, key: str) -> str:
        data = await self.body()
        path, _, query = self.url.partition("?")
        scope = (self._dialect, self.generation.settings.model, self._who, self.method, path, key)
        try:
            digest = await self.beside(lambda: identity.body_digest(query, data))
            return await identity.reserved(self.fleet, scope, digest)
        except RlctlError as error:
            if error.reason is Reason.REQUEST_ID_REUSED:
                error.field = header
            raise


def confirmed(result: StageResult | RankResult, *, update: bool = False) -> bool:
    """Return whether an engine or a rank has carried out the step, or will. A continue that waits for memory is
    SKIPPED.

    Any other SKIPPED result means an engine without support for the step. ``update``: a weight update, never deferred.
    """
    deferred = result.outcome == OUTCOME_SKIPPED and result.error.reason == Reason.MEMORY_RELEASED.name
    return result.outcome == OUTCOME_APPLIED or (deferred and not update)


def refuse_skipped(operation: Operation, *, partly: bool = False) -> None:
    """Raise OperationFailed if an engine does not support the operation; with ``partly``, if no engine does."""
    skipped = [
        result for result in operation.stage_results if result.outcome == OUTCOME_SKIPPED and not confirmed(result)
    ]
    if not skipped or (partly and len(skipped) < len(operation.stage_results)):
        return
    failed = Operation()
    failed.CopyFrom(operation)
    failed.error.CopyFrom(skipped[0].error)
    names = ", ".join(result.slot for result in skipped)
    failed.error.message = f"not supported by {names}: {skipped[0].error.message}"
    raise OperationFailed(failed)


def _printable(name: str) -> str:
    """Escape the characters that a header cannot hold."""
    return "".join(sign if " " <= sign <= "~" else sign.encode("unicode_escape").decode() for sign in name)

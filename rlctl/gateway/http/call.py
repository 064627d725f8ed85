"""One request, as handlers see it."""

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
"""Header of the answer that lists what of the body nobody looked at."""

EXCLUDED = "X-RLCTL-Excluded"
"""Header of the answer that lists the engines that an operation left out, each with its state."""


class Call:
    """A request to a dialect.

    Attributes:
        method: "POST".
        url: path and query as they came.
        path: what the route's placeholders stand for.
        query: the parameters of the query, of several of one name the first.
        headers: of the request, whatever their case.
        token: the caller's bearer token.
        credentials: by which the fleet knows the caller: its own token, or the gateway's, which speaks for it.
        fleet: the fleet, with the caller's credentials.
        generation: what generates.
        size: bytes of the body, once it has been read.
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
        """``dialect``: whose route it is; ``changes``: it may change something; ``accepted``: bodies at this server.

        Raises FIELD_INVALID, TOKEN_MISSING for headers that nobody can read.
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
        """Call the fleet in the name of a caller that the gateway knows without a token."""
        self.credentials = credentials
        self.fleet = self.fleet.on_behalf_of(credentials)

    def query_all(self, name: str) -> list[str]:
        """Every value of a parameter of the query."""
        return list(self._request.query.getall(name, []))

    async def body(self) -> bytes:
        """The body as it came. Raises MESSAGE_TOO_LARGE, DEADLINE_EXCEEDED, TOO_MANY_REQUESTS."""
        if self._data is None:
            if self.size:
                raise RuntimeError("the body has been dropped; read it before the handler")
            self._data = await self._body.read()
            self.size = len(self._data)
        return self._data

    async def json(self) -> Any:
        """The body; None if there is none. Raises as :meth:`body`, and FIELD_INVALID.

        Prompts of token ids of a large body are :class:`rlctl.runtime.large_json.TokenIds`, not lists
        (:meth:`Bodies.parse`).
        """
        if self._value is _UNREAD:
            data = await self.body()
            self._value = await self._accepted.parse(data) if data and not data.isspace() else None
        return self._value

    def replace_json(self, value: Any) -> None:
        """Give handlers another parsed body from now on; for middleware."""
        self._value, self._parsed, self._replaced = value, None, True

    async def take_body(self) -> bytes:
        """The body to pass on: as it came, or the JSON that has replaced it. A large body cannot be read again.

        Raises as :meth:`body`, and FIELD_INVALID for a value that JSON cannot have.
        """
        data = await self.body()
        if self._replaced:
            value = self._value
            data = await self.beside(lambda: dump(value))
        self.forget()
        return data

    async def fields(self) -> Fields:
        """The fields of the body, an object; {} if there is none. Raises as :meth:`json`.

        What is not taken of them is listed in the answer.
        """
        if self._parsed is None:
            value = await self.json()
            self._parsed = self.watch(Fields({} if value is None else value))
        return self._parsed

    async def beside(self, work: Callable[[], T]) -> T:
        """The result of work with all of the body; see :meth:`Bodies.beside`."""
        await self.body()
        return await self._accepted.beside(self.size, work)

    def forget(self) -> None:
        """Drop a large body, which its samples do not need, for the time that they take. It cannot be read again."""
        if self.size >= LARGE:
            self._value, self._parsed = _UNREAD, None
            for fields in self._fields:
                fields.forget()
            self.close()

    def close(self) -> None:
        """Drop the body as it came, and return its room."""
        self._data = None
        self._body.close()

    def watch(self, fields: Fields) -> Fields:
        """List what is not taken of these in the answer, too."""
        self._fields.append(fields)
        return fields

    def note_unknown(self, names: Sequence[str]) -> None:
        """List these in the answer."""
        self._unknown += names

    async def operate(self, request: Any, *, partly: bool = False, **options: Any) -> Operation:
        """Carry out a verb as :meth:`rlctl.sdk.aio.AsyncFleet.call` does. The answer lists the engines left out.

        Raises as that, and OperationFailed for UNSUPPORTED where an engine skipped it, unless ``check`` is false.
        ``partly``: only where every engine did.
        """
        operation: Operation = await self.fleet.call(request, **options)
        self.note_excluded(operation)
        if options.get("check", True):
            refuse_skipped(operation, partly=partly)
        return operation

    def note_excluded(self, operation: Operation) -> None:
        """List the engines that it left out in the answer."""
        self._excluded |= {each.slot: short_name(StageState.DESCRIPTOR, each.state) for each in operation.excluded}

    @property
    def notes(self) -> dict[str, str]:
        """Headers of an answer that is no error."""
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
        """Fields of the body that no parser accepted, if any parser read it; each once."""
        return list(dict.fromkeys([*self._unknown, *(name for fields in self._fields for name in fields.unknown)]))

    @property
    def keyed(self) -> bool:
        """Whether the caller gave the request an id of its own."""
        return any(name in self.headers for name in identity.KEYS)

    async def request_id(self, step: str = "") -> str:
        """For the header of an operation. A repeat under the same ``Idempotency-Key`` or ``X-Request-Id`` has the same.

        ``step`` tells several operations of one request apart. Raises FIELD_INVALID, and REQUEST_ID_REUSED where the
        key came with another body.
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
    """Whether an engine, or a rank, has carried out the step, or will. A continue that waits for memory is SKIPPED.

    Any other SKIPPED result is of an engine without support for the step. ``update``: of weights, which nothing defers.
    """
    deferred = result.outcome == OUTCOME_SKIPPED and result.error.reason == Reason.MEMORY_RELEASED.name
    return result.outcome == OUTCOME_APPLIED or (deferred and not update)


def refuse_skipped(operation: Operation, *, partly: bool = False) -> None:
    """Raise OperationFailed for an operation that an engine does not support; ``partly``: that no engine supports."""
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
    """The text, with the characters escaped that a header cannot hold."""
    return "".join(sign if " " <= sign <= "~" else sign.encode("unicode_escape").decode() for sign in name)

"""Routes with a table of fields. The table reads the body, and describes the route in OpenAPI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError
from rlctl.gateway.http.bodies import Fields
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Reply, Route, Scope
from rlctl.gateway.http.placeholders import SLOT
from rlctl.v1.common_pb2 import RequestHeader, Target
from rlctl.v1.results_pb2 import Operation

REQUIRED: Any = object()

ENGINE = f"/engines/{{{SLOT}}}"
"""Path prefix of an engine URL."""


@dataclass(frozen=True)
class Field:
    """A field of a body.

    Attributes:
        kind: type of the value; a list contains the type of the elements, also for nested lists.
        default: value of an absent field; REQUIRED if the field is required.
        choices: accepted values.
        own: an addition of rlctl.
    """

    name: str
    kind: Any
    default: Any = REQUIRED
    choices: Sequence[str] = ()
    doc: str = ""
    own: bool = False

    def read(self, fields: Fields) -> Any:
        """Read the value from a body. Raises FIELD_REQUIRED, FIELD_INVALID."""
        default = () if self.default is REQUIRED else (self.default,)
        if not isinstance(self.kind, list):
            value = fields.take(self.name, self.kind, *default)
        else:
            [inner] = self.kind
            value = fields.take_list(self.name, list if isinstance(inner, list) else inner, *default)
            if value is not None and isinstance(inner, list):
                parts = [Fields({str(index): part}, f"{self.name}.") for index, part in enumerate(value)]
                value = [part.take_list(str(index), inner[0]) for index, part in enumerate(parts)]
        if self.choices and value is not None and value not in self.choices:
            choices = ", ".join(self.choices)
            raise Reason.FIELD_INVALID.error(f"{value!r} must be one of {choices}", field=self.name)
        return value


@dataclass(frozen=True)
class RowCall:
    """A call of a row.

    Attributes:
        slot: slot of the addressed engine; "" for the fleet.
        values: values of the fields by name.
    """

    call: Call
    slot: str
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    async def header(self, step: str = "", *, model: str = "") -> RequestHeader:
        """Return the header of a group or weight verb. Calls for single engines join the same operation."""
        return RequestHeader(
            request_id=await self.call.request_id(step),
            target=Target(model=model),
            for_slot=self.slot,
            unkeyed=not self.call.keyed,
        )

    def model(self) -> str:
        """Return the gateway's model. For "" the coordinator finds the engine's model, or the only updated model."""
        return "" if self.slot else self.call.generation.settings.model

    async def operate(
        self, request: Message, step: str = "", *, partly: bool = False, slots: Sequence[str] = ()
    ) -> Operation:
        """Carry out a verb at the engine, at ``slots``, or at all engines of the gateway. Raises as
        :meth:`Call.operate`.
        """
        slots = list(slots) or ([self.slot] if self.slot else [])
        request_id = await self.call.request_id(step)
        return await self.call.operate(request, partly=partly, slots=slots, model=self.model(), request_id=request_id)


@dataclass(frozen=True)
class Row:
    """A row that maps methods, path and fields to a handler.

    Attributes:
        verbs: verbs of the contract, for the documentation.
        fields: fields of the body.
        query: fields of the query; numbers and texts.
        answers: descriptions by status, in addition to the common responses.
    """

    methods: str
    path: str
    handler: Callable[[RowCall], Awaitable[Reply]]
    verbs: str
    fields: Sequence[Field] = ()
    query: Sequence[Field] = ()
    scope: Scope = Scope.ADMIN
    answers: Mapping[int, str] = field(default_factory=lambda: {200: "done", 400: "not done, and why"})
    note: str = ""

    @property
    def about(self) -> str:
        """Line for the documentation."""
        return (self.handler.__doc__ or "").strip().partition("\n")[0]

    def routes(self, fail: Callable[[RlctlError], Reply]) -> list[Route]:
        """Return the routes at engine URLs and at the root. ``fail`` forms errors as the dialect does."""
        return [
            Route(self.methods, prefix + self.path, self._answer, self.scope, self.about, lasting=False, fail=fail)
            for prefix in (ENGINE, "")
        ]

    async def _answer(self, call: Call) -> Reply:
        values: dict[str, Any] = {}
        if self.fields or self.scope is Scope.ADMIN:
            fields = await call.fields()
            values = await call.beside(lambda: {each.name: each.read(fields) for each in self.fields})
        for each in self.query:
            values[each.name] = _of_query(each, call.query.get(each.name))
        return await self.handler(RowCall(call, call.path.get(SLOT, ""), values))


def _of_query(each: Field, text: str | None) -> Any:
    if text is None or text == "":
        return each.default
    try:
        value = each.kind(text)
    except ValueError:
        value = None
    if value is None or (isinstance(value, int | float) and not 0 <= value < 1e6):
        raise Reason.FIELD_INVALID.error(f"{text!r} is no {each.kind.__name__} of 0 or more", field=each.name)
    return value

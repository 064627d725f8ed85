"""The plan of a step, from rank 0 to the followers, and its wire format: packed int64, never pickled.

A plan is an array ``[length, kind, step, ...]``. A batch follows as integers, commands and moves as UTF-8 JSON. The
plan travels in a uint8 tensor of :data:`HEAD_BYTES`; a longer plan has a second tensor with the rest.
"""

from __future__ import annotations

import array
import base64
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from google.protobuf.json_format import MessageToDict, ParseDict

from rlctl.contract.errors import RlctlError, from_detail
from rlctl.v1 import common_pb2

HEAD_BYTES = 16384
"""Bytes broadcast by every step. A decode step of 340 sequences without adapters fits."""

_NOTHING, _COMMANDS, _BATCH, _STOP, _MOVE = range(5)


@dataclass(frozen=True)
class Batch:
    """One forward pass over tokens of several sequences.

    Attributes:
        rows: row of the slot table, per sequence.
        starts: position of the first token in this pass, per sequence.
        lengths: number of tokens in this pass, per sequence, at least 1.
        tokens: token ids, sequence by sequence.
        slots: KV slot of every token.
        outputs: indices into ``tokens`` with requested logits, ascending, never empty.
        adapters: number of the adapter, per sequence; 0: no adapter. Empty: no sequence has an adapter.
    """

    rows: list[int]
    starts: list[int]
    lengths: list[int]
    tokens: list[int]
    slots: list[int]
    outputs: list[int]
    adapters: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Order:
    """Registered command that the ranks carry out at this step, or refuse with rank 0's error."""

    command_id: str
    refusal: RlctlError | None = None


@dataclass(frozen=True)
class Move:
    """A move of a sample's KV entries between a prefill and a decode engine.

    See :mod:`rlctl_torch.disaggregation.kv_handover`.

    Attributes:
        kind: "give" writes entries into shared memory, "take" reads a prefill engine's entries, "let_go" frees the
            memory.
        room: number of the room of the entries ("give" and "let_go").
        slots: KV slots to read or to write, in the order of the tokens.
        row: "take": row of the slot table.
        handover: "take": the ``KvHandover``, as bytes.
    """

    kind: Literal["give", "take", "let_go"]
    room: int
    slots: list[int] = field(default_factory=list)
    row: int = 0
    handover: bytes = b""


@dataclass(frozen=True)
class Plan:
    """One step. A plan without batch, orders, move and stop only shows that rank 0 lives."""

    step: int
    batch: Batch | None = None
    orders: tuple[Order, ...] = ()
    stop: bool = False
    move: Move | None = None


def encode(plan: Plan) -> bytes:
    """Return the plan's bytes, with the total length first."""
    if plan.batch is not None:
        b = plan.batch
        counts = [len(b.rows), len(b.tokens), len(b.outputs), len(b.adapters)]
        parts = (counts, b.rows, b.starts, b.lengths, b.tokens, b.slots, b.outputs, b.adapters)
        body = array.array("q", [value for part in parts for value in part]).tobytes()
        kind = _BATCH
    elif plan.orders:
        body = json.dumps([_order_to_json(order) for order in plan.orders]).encode()
        kind = _COMMANDS
    elif plan.move is not None:
        handover = base64.b64encode(plan.move.handover).decode()
        body, kind = json.dumps({**asdict(plan.move), "handover": handover}).encode(), _MOVE
    else:
        body, kind = b"", _STOP if plan.stop else _NOTHING
    return array.array("q", [24 + len(body), kind, plan.step]).tobytes() + body


def length_of(head: bytes) -> int:
    """Return the total length in bytes of the plan that starts with ``head`` (at least 8 bytes)."""
    return array.array("q", head[:8])[0]


def decode(data: bytes) -> Plan:
    """Return the plan from the bytes of :func:`encode`. Bytes past its end are ignored."""
    length, kind, step = array.array("q", data[:24])
    body = data[24:length]
    if kind == _BATCH:
        values = array.array("q", body).tolist()
        sequences, tokens, outputs, adapters = values[:4]
        lists, at = [], 4
        for size in (sequences, sequences, sequences, tokens, tokens, outputs, adapters):
            lists.append(values[at : at + size])
            at += size
        return Plan(step, batch=Batch(*lists))
    if kind == _COMMANDS:
        return Plan(step, orders=tuple(_order_from_json(entry) for entry in json.loads(body)))
    if kind == _MOVE:
        fields = json.loads(body)
        return Plan(step, move=Move(**{**fields, "handover": base64.b64decode(fields["handover"])}))
    return Plan(step, stop=kind == _STOP)


def _order_to_json(order: Order) -> dict[str, Any]:
    if order.refusal is None:
        return {"id": order.command_id}
    return {"id": order.command_id, "refusal": MessageToDict(order.refusal.detail())}


def _order_from_json(entry: dict[str, Any]) -> Order:
    refusal = None
    if "refusal" in entry:
        refusal = from_detail(ParseDict(entry["refusal"], common_pb2.ErrorDetail()))
    return Order(entry["id"], refusal)

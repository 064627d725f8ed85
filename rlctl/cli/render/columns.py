"""The columns of each verb's answer. An answer without an entry here shows all fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.message import Message

from rlctl.cli.render import values
from rlctl.v1.results_pb2 import RankResult


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        field: field of the data message.
        over: value of a stage: the first rank's value, or the sum over the ranks.
        optional: omitted if the column is empty in all rows.
    """

    header: str
    field: str
    over: Literal["first", "sum"] = "first"
    optional: bool = False


_COLUMNS: dict[str, tuple[Column, ...]] = {
    "model_info": (
        Column("TYPE", "model_type"),
        Column("DTYPE", "dtype"),
        Column("PARAMETERS", "local_parameters", "sum"),
        Column("CONTEXT", "context_length"),
        Column("VOCABULARY", "vocab_size"),
        Column("PATH", "model_path"),
    ),
    "server_info": (
        Column("ENGINE", "engine"),
        Column("ENGINE VERSION", "engine_version"),
        Column("RLCTL", "rlctl_version"),
        Column("NODE", "node"),
        Column("PID", "pid"),
        Column("UPTIME", "uptime"),
    ),
    "loads": (
        Column("RUNNING", "running", "sum"),
        Column("WAITING", "waiting", "sum"),
        Column("USED TOKENS", "used_tokens", "sum"),
        Column("MAX TOKENS", "max_tokens", "sum"),
        Column("GENERATED", "generated_tokens", "sum"),
        Column("STEP", "step"),
    ),
    "memory": (Column("RELEASED", "released"), Column("BYTES", "bytes", "sum")),
    "weights": (
        Column("TENSORS", "tensors"),
        Column("BYTES", "bytes_received", "sum"),
        Column("MISSING", "missing", optional=True),
    ),
    "group": (Column("GROUP", "group_name"), Column("GROUP RANK", "group_rank"), Column("WORLD SIZE", "world_size")),
    "check": (
        Column("TENSORS", "tensor_count"),
        Column("MODEL DIGEST", "model_digest"),
        Column("RANK DIGEST", "rank_digest"),
        Column("MATCHED", "matched", optional=True),
        Column("CHANGED", "changed", optional=True),
        Column("MISSING", "missing", optional=True),
        Column("UNEXPECTED", "unexpected", optional=True),
        Column("INCONSISTENT", "inconsistent", optional=True),
    ),
}

PER_RANK = frozenset({"check"})
"""Answers that differ from rank to rank: every table has a line for each rank."""


def columns(name: str) -> Sequence[Column]:
    """Return the columns of an answer, by the answer's field in RankResult."""
    if not name:
        return ()
    if name in _COLUMNS:
        return _COLUMNS[name]
    message: Any = RankResult.DESCRIPTOR.fields_by_name[name].message_type
    return [Column(field.name.replace("_", " ").upper(), field.name) for field in message.fields]


def cells(name: str, ranks: Sequence[RankResult]) -> list[str]:
    """Return a cell for each column, over the ranks that answered."""
    answers = [getattr(rank, name) for rank in ranks if name and rank.HasField(name)]  # type: ignore[arg-type]
    return [_cell(column, answers) if answers else "" for column in columns(name)]


def _cell(column: Column, answers: Sequence[Message]) -> str:
    if column.over == "sum":
        return str(sum(getattr(answer, column.field) for answer in answers))
    descriptor: Any = answers[0].DESCRIPTOR
    text = values.field(answers[0], descriptor.fields_by_name[column.field])
    return "" if column.optional and text == "0" else text

"""Bodies of requests that are passed on as they came: what is read of them, and what is put into them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from rlctl.contract.errors import Reason
from rlctl.contract.sampling import MOST_SAMPLES
from rlctl.v1.rollout_pb2 import TokenIds


@dataclass(frozen=True)
class Reading:
    """What a body says that has to be known before the request is sent.

    Attributes:
        rids: the caller's ids for the request; each is free until it ends.
        engine_rids: ids by which the server can be asked to end it; empty: closing its connection does.
        adapter: rlctl's name of its adapter, or "".
        model: name of the base model where the server checks it, or "".
        prepared: the server may have it without having begun, where a pause leaves it stuck.
        fields: of the body, in place of what it says of them.
        headers: beside those that came.
        names: names in the answer, by the server's.
    """

    rids: Sequence[str] = ()
    engine_rids: Sequence[str] = ()
    adapter: str = ""
    model: str = ""
    prepared: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


def overridden(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """A JSON object in which these fields have these values. The rest stays byte for byte.

    They are put at the end: of two fields with one name JSON parsers take the last.
    """
    if not fields:
        return body
    start = body.rstrip()[:-1]
    comma = b"" if start.rstrip().endswith(b"{") else b","
    return start + comma + orjson.dumps(fields)[1:]


def text_field(document: Mapping[str, Any], name: str) -> str:
    """A field's text; "" where there is none. Raises FIELD_INVALID."""
    value = document.get(name)
    if value is not None and not isinstance(value, str):
        raise Reason.FIELD_INVALID.error(f"{name} must be a text", field=name)
    return value or ""


def check_count(value: object, name: str) -> None:
    """Raise FIELD_INVALID for more samples of a prompt than may be."""
    if isinstance(value, bool) or not isinstance(value, int | None) or (value or 0) > MOST_SAMPLES:
        raise Reason.FIELD_INVALID.error(f"{name} is {value}; it must be a number up to {MOST_SAMPLES}", field=name)


def check_token_ids(value: object, vocab_size: int, name: str) -> None:
    """Raise FIELD_INVALID for token ids, in a list or in lists of lists, that are not numbers of the vocabulary.

    Texts, and lists of texts or of objects, pass. A number that is written as a text does not, among numbers: servers
    would take it for one.
    """
    if isinstance(value, TokenIds):
        _check_range(value.ids, vocab_size, name)
    elif isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            _check_range(value, vocab_size, name)
        elif kinds <= {list, TokenIds, type(None)} or kinds == {list, str}:
            for each in value:
                check_token_ids(each, vocab_size, name)
        elif kinds not in ({str}, {dict}, {str, dict}):
            raise Reason.FIELD_INVALID.error(f"{name} must be a text or a list of token ids", field=name)
    elif not isinstance(value, str | list | dict | None):
        raise Reason.FIELD_INVALID.error(f"{name} must be a text or a list of token ids", field=name)


def _check_range(ids: Sequence[int], vocab_size: int, name: str) -> None:
    if not ids:
        return
    highest, lowest = max(ids), min(ids)
    if highest >= vocab_size or lowest < 0:
        wrong = highest if highest >= vocab_size else lowest
        raise Reason.FIELD_INVALID.error(f"token {wrong} is not in the vocabulary of {vocab_size}", field=name)

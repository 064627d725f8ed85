"""Bodies of forwarded requests: the checks of their fields, and fields that are added. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from rlctl.contract.errors import Reason
from rlctl.contract.sampling import MOST_SAMPLES
from rlctl.v1.rollout_pb2 import TokenIds
from rlctl_servers.requests.cache_salts import with_own

MOST_BIAS = 1000.0
"""Largest logit bias. Beyond the range of float32 a probability is NaN, which ends SGLang."""


@dataclass(slots=True)
class Reading:
    """Content of a body that decides how its request is sent.

    Attributes:
        rids: the caller's ids for the request. No other request may use these ids until its end.
        engine_rids: ids for an abort at the server; empty: the connection is closed instead.
        adapter: rlctl's name of its adapter, or "".
        model: name of the base model if the server checks it, or "".
        prepared: the server prepares the request before it begins, and a pause meanwhile would leave it stuck.
        samples: number of samples that the server computes.
        fields: values that replace fields of the body.
        headers: headers that replace the caller's.
        names: the caller's names and ids, by the server's, for the answer.
    """

    rids: Sequence[str] = ()
    engine_rids: Sequence[str] = ()
    adapter: str = ""
    model: str = ""
    prepared: bool = False
    samples: int = 1
    fields: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


def overridden(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a JSON object in which ``fields`` replace values. The rest stays byte for byte.

    The fields are appended: of two fields with the same name JSON parsers take the last.
    """
    if not fields:
        return body
    start = body.rstrip()[:-1]
    comma = b"" if start.rstrip().endswith(b"{") else b","
    return start + comma + orjson.dumps(fields)[1:]


def put_salt(document: object, reading: Reading, name: str, salt: str, most: int | None = None) -> None:
    """Put a cache salt into the field ``name``. ``most``: see :func:`~.cache_salts.with_own`."""
    if isinstance(document, dict):
        reading.fields[name] = with_own(salt, document.get(name), most)


def text_field(document: Mapping[str, Any], name: str) -> str:
    """Return the text of a field, or "" if absent. Raises FIELD_INVALID."""
    value = document.get(name)
    if value is not None and not isinstance(value, str):
        raise Reason.FIELD_INVALID.error(f"{name} must be a text", field=name)
    return value or ""


def check_count(value: object, name: str) -> int:
    """Return the number of samples of a prompt, 1 by default. Raises FIELD_INVALID for other types and for too many."""
    if value is None:
        return 1
    if type(value) is not int or not 0 <= value <= MOST_SAMPLES:
        raise Reason.FIELD_INVALID.error(f"{name} is {value!r}; it must be a number up to {MOST_SAMPLES}", field=name)
    return max(value, 1)


def check_number(value: object, name: str, least: float, most: float) -> None:
    """Raise FIELD_INVALID for a number outside of a range, and for other types, such as a text of digits."""
    if value is not None and (type(value) not in (int, float) or not least <= value <= most):  # type: ignore[operator]
        raise Reason.FIELD_INVALID.error(f"{name} is {value!r}; it must be from {least:g} to {most:g}", field=name)


def check_bias(value: object, vocab_size: int, name: str) -> None:
    """Raise FIELD_INVALID for a logit bias of a token outside the vocabulary, or a bias that is too large."""
    if value is None:
        return
    if not isinstance(value, dict) or not all(token.isascii() and token.isdigit() for token in value):
        raise Reason.FIELD_INVALID.error(f"{name} must be an object by token ids", field=name)
    _check_range([int(token) for token in value], vocab_size, name)
    for bias in value.values():
        check_number(bias, name, -MOST_BIAS, MOST_BIAS)


def check_token_ids(value: object, vocab_size: int, name: str, *, texts: bool = False) -> None:
    """Raise FIELD_INVALID for token ids, in a list or in lists of lists, that are not numbers of the vocabulary.

    ``texts``: also accept a text, and lists of texts or objects. Otherwise refuse texts: servers take "7" for a number.
    """
    if isinstance(value, TokenIds):
        _check_range(value.ids, vocab_size, name)
    elif isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            _check_range(value, vocab_size, name)
        elif kinds <= {list, TokenIds, type(None)} or (texts and kinds == {list, str}):
            for item in value:
                check_token_ids(item, vocab_size, name, texts=texts)
        elif not texts or kinds not in ({str}, {dict}, {str, dict}):
            raise _no_ids(name, texts=texts)
    elif not (value is None or value == [] or (texts and isinstance(value, str | dict))):
        raise _no_ids(name, texts=texts)


def _no_ids(name: str, *, texts: bool) -> Exception:
    expected = "a text or a list of token ids" if texts else "a list of token ids"
    return Reason.FIELD_INVALID.error(f"{name} must be {expected}", field=name)


def _check_range(ids: Sequence[int], vocab_size: int, name: str) -> None:
    if not ids:
        return
    highest, lowest = max(ids), min(ids)
    if highest >= vocab_size or lowest < 0:
        outlier = highest if highest >= vocab_size else lowest
        raise Reason.FIELD_INVALID.error(f"token {outlier} is not in the vocabulary of {vocab_size}", field=name)

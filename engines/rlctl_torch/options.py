"""The engine's own settings, read from ``EngineConfig.options`` once: a typo is refused before anything loads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeAlias

from rlctl.contract.errors import Reason
from rlctl.engine import KnownOptions

if TYPE_CHECKING:
    import torch

    Value: TypeAlias = int | str | torch.dtype | tuple[str, ...]

MODES = ("null", "prefill", "decode")
"""SGLang's names for what an engine does of a request."""

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""Names of the dtypes that weights and KV entries may be held in."""


@dataclass(frozen=True)
class Options:
    """Settings of one engine.

    Attributes:
        max_running: most sequences (samples) that run at the same time.
        max_total_tokens: tokens that the KV cache has room for, over all sequences.
        context_length: longest sequence (prompt and output) in tokens; 0: what the model's config says.
        kv_dtype: dtype of KV entries; None: the weights'.
        threads: threads that torch computes with.
        seed: makes requests that carry no seed of their own repeatable, in order of arrival; None: random.
        allowed_roots: directories below which checkpoints may be read and pulled, separated as in PATH; empty: the
            one that the checkpoint lies in which the engine was started with.
        disaggregation_mode: "prefill" or "decode", of a pair's engines; "null": it does both.
    """

    max_running: int = 64
    max_total_tokens: int = 16384
    context_length: int = 0
    kv_dtype: torch.dtype | None = None
    threads: int = 1
    seed: int | None = None
    allowed_roots: tuple[str, ...] = ()
    disaggregation_mode: str = "null"


def parse_options(given: Mapping[str, str]) -> Options:
    """The settings; raises FIELD_INVALID, naming ``options.NAME``, for an unknown name or a bad value."""
    known = {field.name for field in fields(Options)}
    values: dict[str, Value] = {}
    for name, text in given.items():
        if name not in known:
            raise Reason.FIELD_INVALID.error(
                f"the torch engine has no option {name!r}; there are: {', '.join(sorted(known))}",
                field=f"options.{name}",
            )
        parse = _PARSERS.get(name, _integer)
        values[name] = parse(text, f"options.{name}")
    for name in ("max_running", "max_total_tokens", "threads"):
        if values.get(name) == 0:
            raise Reason.FIELD_INVALID.error(f"{name} must be at least 1", field=f"options.{name}")
    return Options(**values)  # type: ignore[arg-type]


def known_options(given: Mapping[str, str]) -> KnownOptions:
    """The settings by name. torch is not loaded."""
    del given
    return KnownOptions(frozenset(field.name for field in fields(Options)), origin="the torch engine")


def float_dtypes() -> list[torch.dtype]:
    """Those dtypes."""
    return [float_dtype(name, "") for name in FLOAT_DTYPES]


def float_dtype(text: str, field: str) -> torch.dtype:
    """The dtype of this name, with or without "torch."; raises FIELD_INVALID."""
    import torch

    name = text.removeprefix("torch.")
    if name not in FLOAT_DTYPES:
        raise Reason.FIELD_INVALID.error(
            f"{field} is {text!r}; the torch engine computes in {', '.join(FLOAT_DTYPES)}", field=field
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _integer(text: str, field: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise Reason.FIELD_INVALID.error(f"{field} is {text!r}; it must be a whole number, not negative", field=field)
    return int(text)


def _directories(text: str, field: str) -> tuple[str, ...]:
    directories = tuple(filter(None, text.split(os.pathsep)))
    for directory in directories:
        if not os.path.isabs(directory):
            raise Reason.FIELD_INVALID.error(f"{field} holds {directory!r}, which is no absolute path", field=field)
    return directories


def _mode(text: str, field: str) -> str:
    if text not in MODES:
        raise Reason.FIELD_INVALID.error(f"{field} is {text!r}; it must be one of {', '.join(MODES)}", field=field)
    return text


_PARSERS: dict[str, Callable[[str, str], Value]] = {
    "kv_dtype": float_dtype,
    "allowed_roots": _directories,
    "disaggregation_mode": _mode,
}
"""How the options that are no whole numbers are read."""

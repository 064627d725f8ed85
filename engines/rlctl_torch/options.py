"""Settings of the torch engine, from ``EngineConfig.options``. An unknown name is refused before anything loads."""

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
"""Disaggregation modes, with SGLang's names."""

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""Names of the dtypes of weights and KV entries."""


@dataclass(frozen=True)
class Options:
    """Settings of an engine.

    Attributes:
        max_running: most sequences (samples) that run at the same time.
        max_total_tokens: capacity of the KV cache in tokens, over all sequences.
        context_length: longest sequence (prompt and output) in tokens; 0: the limit of the model's config.
        kv_dtype: dtype of KV entries; None: the dtype of the weights.
        threads: threads of torch's computation.
        seed: makes requests without a seed repeatable, in order of arrival; None: random.
        allowed_roots: directories below which checkpoints may be read and pulled, separated as in PATH; empty: the
            directory that contains the checkpoint of the engine's start.
        disaggregation_mode: "prefill" or "decode": the engine's half of a pair; "null": both halves.
    """

    max_running: int = 64
    max_total_tokens: int = 16384
    context_length: int = 0
    kv_dtype: torch.dtype | None = None
    threads: int = 1
    seed: int | None = None
    allowed_roots: tuple[str, ...] = ()
    disaggregation_mode: str = "null"


def parse_options(settings: Mapping[str, str]) -> Options:
    """Return the settings. Raises FIELD_INVALID, naming ``options.NAME``, for an unknown name or a bad value."""
    option_names = {field.name for field in fields(Options)}
    values: dict[str, Value] = {}
    for name, text in settings.items():
        if name not in option_names:
            raise Reason.FIELD_INVALID.error(
                f"the torch engine has no option {name!r}; there are: {', '.join(sorted(option_names))}",
                field=f"options.{name}",
            )
        parse = _PARSERS.get(name, _integer)
        values[name] = parse(text, f"options.{name}")
    for name in ("max_running", "max_total_tokens", "threads"):
        if values.get(name) == 0:
            raise Reason.FIELD_INVALID.error(f"{name} must be at least 1", field=f"options.{name}")
    return Options(**values)  # type: ignore[arg-type]


def known_options(settings: Mapping[str, str]) -> KnownOptions:
    """Return the names of the settings, without loading torch."""
    del settings
    return KnownOptions(frozenset(field.name for field in fields(Options)), origin="the torch engine")


def float_dtypes() -> list[torch.dtype]:
    return [float_dtype(name, "") for name in FLOAT_DTYPES]


def float_dtype(text: str, field: str) -> torch.dtype:
    """Return the dtype of this name, with or without "torch."; raises FIELD_INVALID."""
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
"""Parsers of the options that are not whole numbers."""

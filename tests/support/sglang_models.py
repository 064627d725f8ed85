"""Excludes models of a real SGLang: importing all model modules takes a fifth of its start."""

from __future__ import annotations

from pathlib import Path

VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"

_MODULES = "lib/python*/site-packages/sglang/srt/models/*.py"


def all_but(python: str, *models: str) -> str:
    """Return the value of :data:`VARIABLE` for a server of these models only. ``python``: SGLang's interpreter."""
    files = Path(python).parent.parent.glob(_MODULES)
    return ",".join(sorted({file.stem for file in files} - {"__init__", "registry", *models}))

"""Which models a real SGLang knows: it imports the modules of all of them, a fifth of what its start costs."""

from __future__ import annotations

from pathlib import Path

VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"

_MODULES = "lib/python*/site-packages/sglang/srt/models/*.py"


def all_but(python: str, *models: str) -> str:
    """The value of :data:`VARIABLE` for a server that serves these only. ``python``: what SGLang is installed for."""
    files = Path(python).parent.parent.glob(_MODULES)
    return ",".join(sorted({file.stem for file in files} - {"__init__", "registry", *models}))

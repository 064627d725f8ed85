"""The dialects: one package for each HTTP API that clients of other projects use.

The function ``dialect(generation)`` in a package's module ``dialect`` returns its
:class:`rlctl.gateway.http.dialect.Dialect`: routes, error format, settings. A new package here is a new ``--dialect``.

Imports: gateway.generation, gateway.backend, gateway.http, sglang_api, contract.

Start with ``slime/dialect.py``.
"""

from __future__ import annotations

import importlib
import pkgutil

from rlctl.contract.errors import Reason
from rlctl.gateway.backend.service import Generation
from rlctl.gateway.http.dialect import Dialect


def names() -> list[str]:
    """Return the dialects' names, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str, generation: Generation) -> Dialect:
    """Return a dialect by name. Raises FIELD_INVALID."""
    if name not in names():
        raise Reason.FIELD_INVALID.error(f"{name!r} must be one of {', '.join(names())}", field="dialect")
    dialect: Dialect = importlib.import_module(f"{__name__}.{name}.dialect").dialect(generation)
    return dialect

"""The dialects, a file each. A module's ``dialect(generation)`` makes its :class:`rlctl.gateway.dialect.Dialect`."""

from __future__ import annotations

import importlib
import pkgutil

from rlctl.errors import Reason
from rlctl.gateway.dialect import Dialect
from rlctl.gateway.generation.service import Generation


def names() -> list[str]:
    """What there is: the modules here that have no underscore in their names."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if "_" not in module.name)


def load(name: str, generation: Generation) -> Dialect:
    """A dialect by its name. Raises FIELD_INVALID."""
    if name not in names():
        raise Reason.FIELD_INVALID.error(f"{name!r} must be one of {', '.join(names())}", field="dialect")
    made: Dialect = importlib.import_module(f"{__name__}.{name}").dialect(generation)
    return made

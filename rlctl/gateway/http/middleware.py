"""Middlewares of users around the routes, named by dotted path.

A middleware is made once, ``Class(generation)``, and called for every request that is not OPEN::

    class Counting:
        def __init__(self, generation: Generation) -> None: ...
        async def __call__(self, call: Call, handler: Handler) -> Answer:
            return await handler(call)

A middleware may answer by itself, change the answer, or call the handler again. It runs in the gateway's own process:
the right to name a middleware is the right to run code there.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlctl.contract.errors import Reason
from rlctl.gateway.http.dialect import Answer, Handler

if TYPE_CHECKING:
    from rlctl.gateway.http.call import Call

_RADIX = "rlctl.gateway.radix.middleware:RadixMiddleware"
_ALIASES = {
    f"{package}.router.{folder}.radix_tree_middleware.RadixTreeMiddleware": _RADIX
    for package in ("slime", "miles")
    for folder in ("middleware", "middleware_hub")
}
"""Class names in trainers' command lines, and their replacement: the named classes are for a different server."""

Middleware = Callable[["Call", Handler], Awaitable[Answer]]


def load(path: str) -> Callable[..., Middleware]:
    """Return the class named ``package.module:Class`` or ``package.module.Class``. Raises FIELD_INVALID."""
    module, colon, name = _ALIASES.get(path, path).partition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    try:
        middleware_class: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise Reason.FIELD_INVALID.error(
            f"{path!r} cannot be loaded: {error}",
            field="middleware_path",
            next_step="Give package.module:Class, importable where the gateway runs.",
        ) from error
    if not callable(middleware_class):
        raise Reason.FIELD_INVALID.error(f"{path!r} is no class", field="middleware_path")
    return middleware_class  # type: ignore[no-any-return]


def around(handler: Handler, middlewares: Sequence[Middleware]) -> Handler:
    """Wrap the handler in the middlewares, with the first outermost."""
    for middleware in reversed(middlewares):
        handler = _inside(middleware, handler)
    return handler


def _inside(middleware: Middleware, handler: Handler) -> Handler:
    return lambda call: middleware(call, handler)

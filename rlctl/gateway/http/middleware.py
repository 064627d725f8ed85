"""Middlewares of users around the routes, named by dotted path.

A middleware is made once, ``Class(generation)``, and called for every request that is not OPEN::

    class Counting:
        def __init__(self, generation: Generation) -> None: ...
        async def __call__(self, call: Call, handler: Handler) -> Answer:
            return await handler(call)

It may answer by itself, change the answer, or call the handler again. It runs in the gateway's own process: whoever may
name one may run code there.
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
"""What trainers' command lines name, and what is meant here: their own classes are of another server."""

Middleware = Callable[["Call", Handler], Awaitable[Answer]]


def load(path: str) -> Callable[..., Middleware]:
    """The class that ``package.module:Class`` or ``package.module.Class`` names. Raises FIELD_INVALID."""
    module, colon, name = _ALIASES.get(path, path).partition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    try:
        found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise Reason.FIELD_INVALID.error(
            f"{path!r} cannot be loaded: {error}",
            field="middleware_path",
            next_step="Give package.module:Class, importable where the gateway runs.",
        ) from error
    if not callable(found):
        raise Reason.FIELD_INVALID.error(f"{path!r} is no class", field="middleware_path")
    return found  # type: ignore[no-any-return]


def around(handler: Handler, middlewares: Sequence[Middleware]) -> Handler:
    """The handler inside of the middlewares, the first outermost."""
    for middleware in reversed(middlewares):
        handler = _inside(middleware, handler)
    return handler


def _inside(middleware: Middleware, handler: Handler) -> Handler:
    return lambda call: middleware(call, handler)

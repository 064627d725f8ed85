"""Settings that all engine servers have."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from rlctl.contract.errors import Reason
from rlctl.engine import HttpRoute

OURS = ("url", "api_key_file", "python", "allowed_roots", "start_s", "data_routes")
"""Settings of a plug-in itself. All others are arguments of its server."""

_ROUTE = re.compile(r"(POST|PUT|GET) (/(?!health|ready)[\w./-]+)", re.ASCII)


@dataclass(frozen=True)
class Options:
    """Settings of one engine.

    Attributes:
        url: a running server to attach to; empty: launch a server.
        api_key: key of an attached server for requests.
        python: the interpreter of the product's environment.
        allowed_roots: directories below which checkpoints may be read; empty: the directory of the first checkpoint.
        start_s: longest time until a launched server is ready, seconds.
        data_routes: further routes of the data port.
        arguments: further arguments of the server by name ("max_model_len"); "true" stands for a flag.
    """

    url: str = ""
    api_key: str = field(default="", repr=False)
    python: str = ""
    allowed_roots: tuple[str, ...] = ()
    start_s: float = 900.0
    data_routes: tuple[HttpRoute, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)


def parse(settings: Mapping[str, str], arguments: Mapping[str, str]) -> Options:
    """Parse the settings that all plug-ins have. Raises FIELD_INVALID or FIELD_CONFLICT naming ``options.NAME``."""
    return Options(
        url=address(settings, arguments),
        api_key=key(settings, "api_key_file"),
        python=settings.get("python", ""),
        allowed_roots=directories(settings.get("allowed_roots", "")),
        start_s=start_seconds(settings.get("start_s", "900")),
        data_routes=data_routes(settings.get("data_routes", "")),
        arguments=arguments,
    )


def interpreter(product: str, python: str, variable: str) -> str:
    """Return the Python interpreter of a product: ``python``, or the interpreter of the product's environment.

    ``variable``: environment variable with the path of the environment; by default the environment lies beside this
    process's. Raises FIELD_INVALID with the install command if the interpreter cannot be run.
    """
    name = product.lower()
    if python:
        path = Path(python)
    else:
        path = Path(os.environ.get(variable) or Path(sys.prefix).parent / f".venv-{name}") / "bin" / "python"
    if not os.access(path, os.X_OK):
        raise Reason.FIELD_INVALID.error(
            f"{product}'s environment is not there: {path} cannot be run",
            field="options.python",
            next_step=f"Run `tools/engines install {name}`, or set {variable} or --option python=PATH.",
        )
    return str(path)


def check_arguments(product: str, arguments: Collection[str], reserved: Collection[str]) -> None:
    """Raise FIELD_CONFLICT for an argument that rlctl sets itself, FIELD_INVALID for an invalid name."""
    for name in arguments:
        if name.removeprefix("no_") in reserved:
            raise Reason.FIELD_CONFLICT.error(f"rlctl sets {product}'s {name} itself", field=f"options.{name}")
        if not name.replace("_", "").isalnum() or not name.islower():
            raise Reason.FIELD_INVALID.error(f"{name!r} is no argument's name", field=f"options.{name}")


def address(settings: Mapping[str, str], arguments: Collection[str]) -> str:
    """Return option ``url``, a running server, or "". Raises FIELD_INVALID, and FIELD_CONFLICT beside settings."""
    url = settings.get("url", "").rstrip("/")
    if url:
        check_url(url, "options.url")
    if url and (extra := [*arguments, *({"python", "start_s"} & settings.keys())]):
        raise Reason.FIELD_CONFLICT.error(
            f"a server that runs already takes no settings: {', '.join(sorted(extra))}", field=f"options.{extra[0]}"
        )
    return url


def check_url(url: str, field: str) -> None:
    """Raise FIELD_INVALID for text that is no address of an HTTP server, and for an address with a password."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port or the brackets of an IPv6 address
        valid = False
    if not valid:
        raise Reason.FIELD_INVALID.error(f"{url.rpartition('@')[2]!r} is no http address", field=field)
    if parts.username is not None:
        raise Reason.FIELD_INVALID.error(
            f"the address of {parts.hostname} contains a name or password, and addresses appear in logs",
            field=field,
            next_step="Give the server a key, and rlctl the file with the key.",
        )


def key(settings: Mapping[str, str], name: str) -> str:
    """Return the key from the file of option ``name``, or "". Raises FIELD_INVALID."""
    path = settings.get(name, "")
    if not path:
        return ""
    try:
        key = Path(path).read_text().strip()
    except OSError as error:
        raise Reason.FIELD_INVALID.error(f"{path} cannot be read: {error.strerror}", field=f"options.{name}") from None
    if not key:
        raise Reason.FIELD_INVALID.error(f"{path} is empty", field=f"options.{name}")
    return key


def directories(text: str) -> tuple[str, ...]:
    """Split a text like PATH into absolute paths. Raises FIELD_INVALID."""
    paths = tuple(filter(None, text.split(os.pathsep)))
    for directory in paths:
        if not os.path.isabs(directory):
            raise Reason.FIELD_INVALID.error(f"{directory!r} is no absolute path", field="options.allowed_roots")
    return paths


def data_routes(text: str) -> tuple[HttpRoute, ...]:
    """Parse option ``data_routes``: further gated routes of the data port, "POST /mine, PUT /theirs".

    Raises FIELD_INVALID.
    """
    routes: list[HttpRoute] = []
    for entry in filter(None, map(str.strip, text.split(","))):
        match = _ROUTE.fullmatch(entry)
        if match is None:
            raise Reason.FIELD_INVALID.error(
                f"{entry!r} is no route: write METHOD /path, with POST, PUT or GET", field="options.data_routes"
            )
        routes.append(HttpRoute(match[1], match[2]))
    return tuple(routes)


def start_seconds(text: str) -> float:
    """Parse option ``start_s``, in seconds. Raises FIELD_INVALID."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise Reason.FIELD_INVALID.error(f"{text!r} is no time in seconds above zero", field="options.start_s")
    return value

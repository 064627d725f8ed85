"""The TLS files of a server command: options, else environment variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_META = "rlctl.tls"


def _keep(ctx: click.Context, param: click.Parameter, value: str) -> None:
    assert param.name is not None
    ctx.meta.setdefault(_META, {})[param.name.removeprefix("tls_")] = value


def _option(name: str, meaning: str) -> Any:
    return click.option(
        f"--tls-{name}", envvar=f"RLCTL_TLS_{name.upper()}", show_envvar=True, default="", metavar="FILE",
        help=meaning, expose_value=False, callback=_keep,
    )  # fmt: skip


TLS_OPTIONS = (
    _option("ca", "Certificates of the authorities that peers are checked against."),
    _option("cert", "Certificate of this process; its identity is the role of the process in its fleet."),
    _option("key", "Private key of the certificate."),
)


def tls_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(TLS_OPTIONS):
        command = option(command)
    return command


def tls_flags() -> dict[str, str]:
    """Return the running command's files for :func:`rlctl.transport.tls.credentials.load_tls`; "" if not set."""
    files: dict[str, str] = click.get_current_context().meta.get(_META, {})
    return files

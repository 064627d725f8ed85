"""``rlctl certs``: a private CA for a fleet, and the certificates of processes and users."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import facts

_DIRECTORY = click.argument("directory", type=click.Path(path_type=Path, file_okay=False))


@click.command(cls=Command)
@_DIRECTORY
@click.option("--fleet", default="default", show_default=True, help="Name in every identity, rlctl://FLEET/...")
@click.option("--days", default=3650, show_default=True, type=click.IntRange(1), help="Validity of the CA.")
@pass_settings
def certs_init(settings: Settings, /, directory: Path, fleet: str, days: int) -> None:
    """Make a private CA in DIRECTORY: ca.crt, which every process reads, and ca.key.

    The holder of ca.key can be any process of the fleet: keep it on the host that runs `rlctl certs issue`.
    `rlctl up --tls DIRECTORY` issues the certificates of all processes that it starts.
    """
    from rlctl.transport.tls.authority import Authority

    authority = Authority.init(directory, fleet, days)
    show(settings, _view({"ca": str(authority.certificate), "key": str(authority.key), "fleet": fleet}))


@click.command(cls=Command)
@_DIRECTORY
@click.argument("identity")
@click.option("--host", "hosts", multiple=True, help="Host name or IP address of the server.  [repeatable]")
@click.option("--days", default=90, show_default=True, type=click.IntRange(1), help="Validity of the certificate.")
@pass_settings
def certs_issue(settings: Settings, /, directory: Path, identity: str, hosts: tuple[str, ...], days: int) -> None:
    """Issue the certificate of IDENTITY with the CA in DIRECTORY, or renew it.

    IDENTITY: coordinator, stage/SLOT, worker/SLOT, gateway/NAME, trainer/NAME or client/NAME. The files are
    DIRECTORY/IDENTITY.crt and .key. Processes that use them read the new ones without a restart.
    """
    from rlctl.transport.tls.authority import Authority
    from rlctl.transport.tls.files import read

    files = Authority(directory).issue(identity, hosts=hosts, days=days)
    material = read(files)
    paths = {name: str(path) for name, path in asdict(files).items()}
    show(settings, _view({**paths, "identity": str(material.identity), "expires": f"{material.expires:%F %TZ}"}))


def _view(data: dict[str, str]) -> View:
    rows = [("CA" if name == "ca" else name.capitalize(), value) for name, value in data.items()]
    return View(data, lambda _: [facts(rows)], list)

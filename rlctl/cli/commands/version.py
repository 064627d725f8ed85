"""``rlctl version``."""

from __future__ import annotations

import platform

import click

from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import facts
from rlctl.version import CONTRACT_VERSION, __version__


@click.command(cls=Command)
@pass_settings
def version(settings: Settings) -> None:
    """Print the versions of rlctl and of its contract."""
    data = {"rlctl": __version__, "contract": CONTRACT_VERSION, "python": platform.python_version()}
    show(
        settings,
        View(data, lambda _: [facts([(name, str(value)) for name, value in data.items()])], lambda: [__version__]),
    )

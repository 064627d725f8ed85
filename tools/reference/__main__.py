"""``python -m tools.reference``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tools.reference import COMMAND, out_of_date, write


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when a file is out of date.")
def reference(directory: Path, check: bool) -> None:
    """Write the reference docs."""
    if not check:
        write(directory)
        return
    stale = out_of_date(directory)
    for path in stale:
        click.echo(f"{path} is out of date: run {COMMAND}", err=True)
    sys.exit(1 if stale else 0)


reference()

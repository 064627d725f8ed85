"""``rlctl completion``: scripts for shells."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from rlctl.cli.app.global_options import Command

SHELLS = ("bash", "zsh", "fish")


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
      bash:  eval "$(rlctl completion bash)"
      zsh:   eval "$(rlctl completion zsh)"
      fish:  rlctl completion fish | source
    """
    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(click.get_current_context().find_root().command, {}, "rlctl", "_RLCTL_COMPLETE").source())

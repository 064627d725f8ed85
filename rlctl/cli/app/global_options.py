"""Options of every command, before or after the command's own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from rlctl.cli.app.local_fleets import DEFAULT_ENDPOINT
from rlctl.cli.app.settings import COLORS, FORMATS, Settings
from rlctl.cli.app.types import DURATION

pass_settings = click.make_pass_decorator(Settings, ensure=True)


class GlobalOption(click.Option):
    """An option that sets a value of the Settings; the last value on the command line counts."""

    def __init__(self, declarations: Sequence[str], **attributes: Any) -> None:
        super().__init__(declarations, expose_value=False, callback=_keep, show_envvar=True, **attributes)

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the hint, with the environment variable only if the value is from the environment."""
        hint = super().get_error_hint(ctx)
        from_environment = (
            ctx is None or self.name is None or ctx.get_parameter_source(self.name) is ParameterSource.ENVIRONMENT
        )
        return hint if from_environment else hint.removesuffix(f" (env var: '{self.envvar}')")


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    assert param.name is not None
    if ctx.get_parameter_source(param.name) is not ParameterSource.DEFAULT:
        ctx.ensure_object(Settings).flags[param.name] = value


def global_options(*, root: bool = False) -> list[click.Option]:
    """Return new options. The root's options also read the environment."""

    def env(name: str) -> str | None:
        return name if root else None

    return [
        GlobalOption(
            ["--context"],
            metavar="NAME",
            envvar=env("RLCTL_CONTEXT"),
            help="Entry of the context file, XDG_CONFIG_HOME/rlctl/config.yaml.",
        ),
        GlobalOption(
            ["--endpoint"],
            metavar="ADDRESS",
            envvar=env("RLCTL_ENDPOINT"),
            help="Coordinator: HOST:PORT or unix:PATH.  [default: the only fleet of this machine that is up, else "
            f"{DEFAULT_ENDPOINT}]",
        ),
        GlobalOption(
            ["-o", "--output"],
            type=click.Choice(FORMATS),
            envvar=env("RLCTL_OUTPUT"),
            help="How data is printed.  [default: table]",
        ),
        GlobalOption(
            ["--timeout"],
            type=DURATION,
            envvar=env("RLCTL_TIMEOUT"),
            help="Time for the whole command, 30s or 500ms say.  [default: the verb's]",
        ),
        GlobalOption(
            ["--color"],
            type=click.Choice(COLORS),
            envvar=env("RLCTL_COLOR"),
            help="Colours; auto: on a terminal unless NO_COLOR is set.  [default: auto]",
        ),
        GlobalOption(["-q", "--quiet"], is_flag=True, help="Errors only on stderr."),
        GlobalOption(["-v", "--verbose"], is_flag=True, help="Request ids and gRPC's own log on stderr."),
        GlobalOption(["-y", "--yes"], is_flag=True, help="Ask for no confirmation."),
        GlobalOption(["--dry-run"], is_flag=True, help="Check everything, change nothing, say what would be done."),
    ]


class Command(click.Command):
    """A command with the global options, except names that the command uses itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own_flags = {name for param in self.params for name in param.opts}
        self.params.extend(option for option in global_options() if not own_flags & set(option.opts))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_options(self, ctx, formatter)


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write options in full, the global options by name. Arguments are in the usage and in the command's help text."""
    options = [param for param in command.get_params(ctx) if not isinstance(param, GlobalOption | click.Argument)]
    with formatter.section("Options"):
        formatter.write_dl([record for param in options if (record := param.get_help_record(ctx))])
    shared = [param for param in command.get_params(ctx) if isinstance(param, GlobalOption)]
    if shared:
        with formatter.section("Global options (see rlctl --help)"):
            formatter.write_text("  ".join("/".join(param.opts) for param in shared))

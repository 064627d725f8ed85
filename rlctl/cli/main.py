"""The root command: finds subcommands by words and imports a module only for its command.

Commands are the entries of ``COMMANDS`` and the rows of the verb table.
"""

from __future__ import annotations

import difflib
import errno
import gc
import importlib
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import click

from rlctl.cli.app.global_options import Command, global_options, write_options
from rlctl.cli.app.settings import FORMATS, Settings
from rlctl.version import __version__

SECTIONS = FLEET, VERBS, GENERATION, TOOLS, SERVERS = (
    "The fleet",
    "Verbs",
    "Generation",
    "Tools",
    "Servers (`up` starts them)",
)

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("rlctl.cli.commands.up", "Start a fleet on this machine, or change one that is up."),
    "plan": ("rlctl.cli.commands.plan", "Show what `up` would start and change."),
    "validate": ("rlctl.cli.commands.validate", "Check a topology file."),
    "down": ("rlctl.cli.commands.down", "Take down a fleet that `up` started."),
    "status": ("rlctl.cli.commands.status", "Show models and stages; -w follows them."),
    "doctor": ("rlctl.cli.commands.doctor", "Check this host and a fleet, and print a mend for each fault."),
    "top": ("rlctl.cli.commands.top", "Show rates and queues of the stages, live."),
    "events": ("rlctl.cli.commands.events", "List what has happened; -f follows it."),
    "get stages": ("rlctl.cli.commands.get", "List the stages."),
    "get models": ("rlctl.cli.commands.get", "List the models."),
    "get operations": ("rlctl.cli.commands.get", "List operations, newest first."),
    "get operation": ("rlctl.cli.commands.get", "Show one operation."),
    "operations": ("rlctl.cli.commands.get", "List operations, newest first (as `get operations`)."),
    "describe stage": ("rlctl.cli.commands.describe", "Show everything about a stage."),
    "describe model": ("rlctl.cli.commands.describe", "Show everything about a model."),
    "describe operation": ("rlctl.cli.commands.describe", "Show everything about an operation."),
    "enable": ("rlctl.cli.commands.enable", "Route requests to disabled stages again."),
    "disable": ("rlctl.cli.commands.enable", "Route no requests to stages."),
    "admit": ("rlctl.cli.commands.admit", "Admit slots that are not in the topology."),
    "take-over": ("rlctl.cli.commands.take_over", "Take charge of stages that obey another coordinator."),
    "min-healthy": ("rlctl.cli.commands.min_healthy", "Show or set how many stages of a model must stay routable."),
    "drain": ("rlctl.cli.commands.drain", "Disable stages, and wait until they are idle."),
    "restart": ("rlctl.cli.commands.restart", "Drain engines that `up` started, and start them again."),
    "logs": ("rlctl.cli.commands.logs", "Show the log of a process that `up` started; -f follows it."),
    "versions": ("rlctl.cli.commands.versions", "List the published versions of models."),
    "rollback": ("rlctl.cli.commands.versions", "Publish an earlier version again, from its checkpoint."),
    "heal": ("rlctl.cli.commands.heal", "Bring stages to the published version without the trainer."),
    "wait": ("rlctl.cli.commands.wait", "Wait until stages are routable, or at a version."),
    "cancel": ("rlctl.cli.commands.cancel", "Drop the commands of an operation that have not started."),
    "journal verify": ("rlctl.cli.commands.journal", "Check the coordinator's journal, or a backup of it."),
    "journal backup": ("rlctl.cli.commands.journal", "Copy the coordinator's journal, in use or not."),
    "journal restore": ("rlctl.cli.commands.journal", "Put a backup in the place of a journal."),
    "journal compact": ("rlctl.cli.commands.journal", "Make the file of a journal as small as its records."),
    "weights abort": ("rlctl.cli.commands.weights", "Abort the open weight update of a model."),
    "audit": ("rlctl.cli.commands.audit", "List changes and denied calls with their callers."),
    "tokens new": ("rlctl.cli.commands.tokens", "Make a token with scopes."),
    "tokens list": ("rlctl.cli.commands.tokens", "List principals and the ids of their tokens."),
    "tokens limit": ("rlctl.cli.commands.tokens", "Set the quota of a principal."),
    "tokens revoke": ("rlctl.cli.commands.tokens", "Revoke tokens."),
    "generate": ("rlctl.cli.commands.generate", "Generate from prompts."),
    "demo": ("rlctl.cli.commands.demo", "Train a tiny model by GRPO through a fleet on this machine."),
    "explain": ("rlctl.cli.commands.explain", "Explain a message, field, enum or RPC of the contract."),
    "certs init": ("rlctl.cli.commands.certs", "Make a private CA for the certificates of a fleet."),
    "certs issue": ("rlctl.cli.commands.certs", "Issue or renew a certificate of a fleet."),
    "completion": ("rlctl.cli.commands.completion", "Print the completion script of a shell."),
    "version": ("rlctl.cli.commands.version", "Print the versions of rlctl and of its contract."),
    "coordinator": ("rlctl.cli.commands.serve", "Run a coordinator."),
    "stage": ("rlctl.cli.commands.serve", "Run a stage server: rank 0 of one engine."),
    "worker": ("rlctl.cli.commands.serve", "Run a follower rank."),
    "gateway": ("rlctl.cli.commands.gateway", "Run an HTTP gateway in front of a fleet."),
    "sidecar vllm": ("rlctl.cli.commands.sidecar", "Run SGLang's HTTP interface in front of a vLLM."),
}
"""Words of a command → (its module, line of help). The command is an attribute of the module, named by the words with
underscores: ``get stages`` is ``get_stages``.
"""

_SECTIONS = {
    **dict.fromkeys(("generate", "demo"), GENERATION),
    **dict.fromkeys(("explain", "certs", "completion", "version"), TOOLS),
    **dict.fromkeys(("coordinator", "stage", "worker", "gateway", "sidecar"), SERVERS),
    **dict.fromkeys(("weights",), VERBS),
}


@dataclass(frozen=True)
class Entry:
    """A command that can be loaded.

    Attributes:
        words: words after ``rlctl``.
        section: section of the root's help.
        load: imports or builds the command.
    """

    words: str
    section: str
    help: str
    load: Callable[[], click.Command]


def entries() -> dict[str, Entry]:
    """Return every command by words, read anew from ``COMMANDS`` and the verb table."""
    from rlctl.contract import verbs

    commands = {verb.cli: _verb_entry(verb) for verb in verbs.VERBS.values() if verb.cli and verb.fleet}
    for words, (module, line) in COMMANDS.items():
        commands[words] = Entry(words, _SECTIONS.get(words.split()[0], FLEET), line, _loader(module, words))
    return commands


def _loader(module: str, words: str) -> Callable[[], click.Command]:
    def load() -> click.Command:
        command: click.Command = getattr(importlib.import_module(module), re.sub("[ -]", "_", words))
        return command

    return load


def _verb_entry(verb: Any) -> Entry:
    from rlctl.cli.commands import verbs as builder

    return Entry(verb.cli, VERBS, builder.about(verb)[0], lambda: builder.VerbCommand(verb))


class Words(click.Group):
    """The commands whose words begin with a prefix. A further word shared by several commands is a group."""

    def __init__(self, prefix: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.prefix = prefix

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self._below())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load the used command, or return the group of a shared word."""
        del ctx
        below = self._below().get(cmd_name)
        if below is None:
            return None
        words = f"{self.prefix}{cmd_name}"
        if len(below) == 1 and below[0].words == words:
            return below[0].load()
        shared = [] if below[0].section == SERVERS else global_options()
        return Words(f"{words} ", name=cmd_name, help=_list_of(words, below), params=[*shared])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command, and suggest similar commands for an unknown word. click itself has no list of commands."""
        word = args[0]
        if not word.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, word) is None:
            suggestions = [f"{self.prefix}{similar}" for similar in difflib.get_close_matches(word, self._below())]
            # "checksum" is `weights checksum`.
            suggestions = suggestions or [words for words in entries() if words.endswith(f" {word}")]
            hint = f" Did you mean {' or '.join(map(repr, suggestions))}?" if suggestions else ""
            ctx.fail(f"No such command '{self.prefix}{word}'.{hint}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the root in full; of a group the commands, then the names of the global options."""
        if not self.prefix:
            super().format_options(ctx, formatter)
            return
        self.format_commands(ctx, formatter)
        write_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each word with a line of help, by section."""
        del ctx
        sections: dict[str, list[tuple[str, str]]] = {}
        for word, below in self._below().items():
            words = f"{self.prefix}{word}"
            single = below[0].words == words
            line = below[0].help if single else _list_of(words, below)
            sections.setdefault(below[0].section if not self.prefix else "Commands", []).append((word, line))
        for section in (*SECTIONS, "Commands"):
            if section in sections:
                with formatter.section(section):
                    formatter.write_dl(sections[section])

    def _below(self) -> dict[str, list[Entry]]:
        below: dict[str, list[Entry]] = {}
        for words, entry in entries().items():
            if words.startswith(self.prefix):
                below.setdefault(words.removeprefix(self.prefix).split()[0], []).append(entry)
        return below


def _list_of(words: str, below: Sequence[Entry]) -> str:
    return ", ".join(entry.words.removeprefix(words).strip() for entry in below)


AGAIN_S = 0.05
"""Seconds until a signal is sent again: the destructor or the callback has then ended."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


class Terminated(KeyboardInterrupt):
    """SIGTERM was received. The command ends as by Ctrl-C, with a separate exit code."""


class Root(Words):
    """The root. An error ends in an exit code and a line on stderr with the next step."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; in standalone mode exit with the code."""
        arguments = list(sys.argv[1:] if args is None else args)
        settings = extra.setdefault("obj", Settings(arguments))

        def run() -> Any:
            return super(Root, self).main(arguments, prog_name or "rlctl", complete_var, False, **extra)

        return _exit(settings, run) if standalone_mode else run()


def _exit(settings: Settings, run: Callable[[], Any]) -> NoReturn:
    from rlctl.contract.errors import RlctlError

    try:
        code = run()
        sys.stdout.flush()
        if settings.mutating:
            settings.announce_fleet(done=True)
    except (click.exceptions.Abort, KeyboardInterrupt) as error:
        from rlctl.cli.app.exit_codes import Exit

        terminated = isinstance(error, Terminated) or isinstance(error.__cause__, Terminated)
        code = Exit.TERMINATED if terminated else Exit.INTERRUPTED
    except OSError as error:
        if error.errno not in _UNWRITABLE and error.filename is None:
            raise
        from rlctl.cli.render.errors import report_click
        from rlctl.runtime.terminal import discard_unwritten

        discard_unwritten(sys.stdout)

        subject = "could not write" if error.filename is None else error.filename
        code = report_click(settings, click.ClickException(f"{subject}: {error.strerror}"))
    except click.ClickException as error:
        from rlctl.cli.render.errors import report_click

        settings.flags.setdefault("output", _output_given(settings.arguments))
        code = report_click(settings, error)
    except RlctlError as error:
        from rlctl.cli.render.errors import report

        code = report(settings, error)
    sys.exit(code if isinstance(code, int) else 0)


def _output_given(arguments: Sequence[str]) -> str | None:
    """Return the output format of a command line that could not be parsed, else a valid format of the environment."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("-o", "--output"):
            return value if equals else next(iter(arguments[index + 1 :]), None)
        if argument.startswith("-o") and len(argument) > 2:
            return argument[2:]
    output_format = os.environ.get("RLCTL_OUTPUT")
    return output_format if output_format in FORMATS else None


@click.group(
    "rlctl", cls=Root, params=[*global_options(root=True)], context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, message="rlctl %(version)s")
def root() -> None:
    """Control plane for RL post-training fleets: these weights, on every rank, verified, and only then generate.

    Exit codes: 0 every target confirmed, 1 failed, 2 usage, 3 partial, 4 unknown, 5 coordinator unreachable, 6 timed
    out, 7 precondition or fencing conflict, 130/143 signals.
    """


def _open_streams() -> None:
    """Open standard streams that the parent process closed on the null device.

    Python omits closed streams. The next opened file, such as a connection or the journal, would then get the number of
    a standard stream: the lowest free number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, closefd=False))


def main() -> None:
    _open_streams()

    def end(number: int, frame: FrameType | None) -> NoReturn:
        del frame
        # The interrupt may drop a call to the coordinator before its start. Python would warn about the call.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    unraisable_hook = sys.unraisablehook

    def send_again(unraisable: sys.UnraisableHookArgs) -> None:
        """Send a signal again after Python has dropped its interrupt, in a destructor or a callback."""
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            unraisable_hook(unraisable)
            return
        number = signal.SIGTERM if isinstance(unraisable.exc_value, Terminated) else signal.SIGINT
        timer = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = send_again
    for number, default in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is default:
            signal.signal(number, end)
    try:
        root()
    finally:
        # Skips Python's last collection over all modules of torch: seconds on a busy machine.
        gc.freeze()


__all__ = ["COMMANDS", "Command", "entries", "main", "root"]

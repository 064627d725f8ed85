"""docs/reference/cli.md: every command and option, from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from rlctl.cli import main
from rlctl.cli.app import settings
from rlctl.cli.app.exit_codes import Exit
from rlctl.cli.app.global_options import GlobalOption, global_options
from rlctl.cli.app.types import EnumType
from rlctl.cli.commands.verbs import VerbCommand
from tools.reference.markdown import prose, table

_SETTINGS = """\
A setting is taken from the flag, else from the environment variable, else from the context, else its default. Without
an endpoint, a command goes to the only fleet of this machine that is up, under any name. A command that changes
something then prints the name. If several fleets are up, the command fails and lists them. The bearer token comes from
`RLCTL_TOKEN_FILE`, `RLCTL_TOKEN`, or the context's `token_file` or `token`. Contexts are kept in
`XDG_CONFIG_HOME/rlctl/config.yaml`:

\b
current: lab
contexts:
  lab:
    endpoint: 10.0.0.5:5080
    token_file: ~/.config/rlctl/lab.token
    output: wide
"""

_JSON = """\
JSON is protojson with the field names of the protos. Message fields and `optional` fields appear if they are set, all
other fields always. 64-bit numbers are strings. With json, jsonl and yaml, an error is one line of JSON on stderr:
`{"error": {"reason", "message", "exit_code", …}}`. If the operation of a verb does not end OK, the operation is printed
on stdout and the error on stderr.
"""


def page() -> Iterator[str]:
    """Yield global options, output, exit codes, then every command."""
    yield "# The command line\n"
    yield from prose(main.root.help or "")
    yield "## Global options\n"
    yield "All commands except the servers and `demo` take these, before or after their names. The last one counts.\n"
    yield from table(["option", "meaning"], [_option(option) for option in global_options(root=True)])
    yield from prose(_SETTINGS)
    yield f"A context may set {', '.join(f'`{key}`' for key in settings.CONTEXT_KEYS)}.\n"
    yield "## Output\n"
    yield from table(["format", "what is printed on stdout; everything else goes to stderr"], _FORMATS)
    yield from prose(_JSON)
    yield "## Exit codes\n"
    yield from table(["code", "meaning"], [[str(int(code)), code.meaning] for code in Exit])
    for section in main.SECTIONS:
        yield f"## {section}\n"
        for words, entry in main.entries().items():
            if entry.section == section:
                yield from _command(words, entry.load())


_FORMATS = [
    ("`table`", "Aligned columns; on a terminal digests are shortened."),
    ("`wide`", "More columns; a line for each rank where `table` has one for each stage. Nothing is cut."),
    ("`json`", "The message: `Operation` for verbs, `Fleet` for `status`; an array of messages for lists."),
    ("`jsonl`", "One line of JSON for each message."),
    ("`yaml`", "The data of `json` as YAML."),
    ("`name`", "Names only, a line each: slots, models, operation ids."),
]


def _command(words: str, command: click.Command) -> Iterator[str]:
    yield f"### rlctl {words}\n"
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    yield f"`rlctl {' '.join([words, '[OPTIONS]', *(param.metavar or _name(param).upper() for param in arguments)])}`\n"
    if isinstance(command, VerbCommand):
        yield f"{command.text} See [{command.verb.name}](verbs.md#{command.verb.name.lower()}).\n"
    else:
        yield from prose(command.help or "")
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    own = [option for option in options if not isinstance(option, GlobalOption)]
    yield from table(["option", "meaning"], [_option(option) for option in own])


def _option(option: click.Option) -> list[str]:
    names = ", ".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag or option.count else f" {option.metavar or _value(option.type)}"
    notes = ["required"] if option.required else []
    if option.multiple and "repeatable" not in (option.help or ""):
        notes.append("repeatable")
    if option.envvar:
        notes.append(f"env: {option.envvar}")
    if isinstance(option.default, str | int | float) and not isinstance(option.default, bool) and option.default != "":
        shown = option.show_default if isinstance(option.show_default, str) else option.default
        notes.append(f"default: {shown}")
    return [f"`{names}{value}`", " ".join([option.help or "", *(f"[{note}]" for note in notes)])]


def _value(kind: Any) -> str:
    if isinstance(kind, EnumType):
        return "|".join(kind.offered)
    if isinstance(kind, click.Choice):
        return "|".join(str(choice) for choice in kind.choices)
    if isinstance(kind, click.IntRange):
        return "INTEGER"
    return str(kind.name).upper()


def _name(param: click.Parameter) -> str:
    return param.name or ""

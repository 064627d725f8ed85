"""Commands come from the table and from COMMANDS, lazily, and say what the contract says."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import click
import pytest
from cli_helpers import Cli

from rlctl.cli import main
from rlctl.cli.commands.verbs import VerbCommand
from rlctl.contract import verbs
from rlctl.contract.errors import Reason
from rlctl.contract.verbs import VERBS, Verb

OFFERED = [verb for verb in VERBS.values() if verb.cli and verb.fleet]


def find(words: str) -> click.Command | None:
    """The command of these words, found as click finds it."""
    command: click.Command | None = main.root
    for word in words.split():
        if not isinstance(command, click.Group):
            return None
        command = command.get_command(click.Context(command), word)
    return command


@pytest.mark.parametrize("verb", OFFERED, ids=lambda verb: verb.name)
def test_every_row_is_a_command_with_an_option_for_each_field(verb: Verb) -> None:
    command = find(verb.cli)
    assert isinstance(command, VerbCommand)
    flags = {flag for param in command.params for flag in param.opts}
    assert {"--model", "--slot", "--stage", "--request-id", "--dry-run", "--timeout", "-o"} <= flags
    for field in verb.request.DESCRIPTOR.fields:
        plain = field.message_type is None or field.message_type.name == "Duration"
        plain = plain and field.type != field.TYPE_BYTES
        if field.name != "header" and plain:
            assert f"--{field.name.replace('_', '-')}" in flags, field.name


@pytest.mark.parametrize("verb", OFFERED, ids=lambda verb: verb.name)
def test_help_is_the_comment_of_the_proto(cli: Cli, verb: Verb) -> None:
    ran = cli(*verb.cli.split(), "--help")
    assert ran.code == 0
    for question in ("Effect", "Idempotency", "States", "Partial failure", "Retry", "Deadline"):
        assert question in ran.out
    assert f"{verb.deadline_s:g} s." in ran.out


@pytest.mark.parametrize("words", sorted(main.entries()))
def test_every_command_has_help_and_options_that_explain_themselves(words: str) -> None:
    command = find(words)
    assert command is not None
    assert command.help
    for param in command.params:
        assert not isinstance(param, click.Option) or param.help, param.opts


def test_a_row_that_is_added_is_a_command_without_more(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(VERBS["AbortUpdate"], cli="update drop", fleet=True)
    monkeypatch.setitem(verbs.VERBS, "AbortUpdate", row)
    assert re.search(r"^  update +drop$", cli("--help").out, re.MULTILINE)
    assert "drop" in cli("update", "--help").out
    assert "Reason, for the record." in cli("update", "drop", "--help").out
    ran = cli("update", "drop", "--reason", "test", "--endpoint", "127.0.0.1:1")
    assert ran.code == 5


def test_a_noun_may_be_shared_by_rows_and_hand_written_commands(cli: Cli) -> None:
    shown = cli("weights", "--help").out
    assert all(word in shown for word in ("update", "checksum", "abort"))


def test_global_options_may_stand_between_the_words_of_a_command(cli: Cli) -> None:
    nowhere = ("--endpoint", "127.0.0.1:1")
    for given in ((*nowhere, "get", "stages"), ("get", *nowhere, "stages"), ("get", "stages", *nowhere)):
        assert "no coordinator answers at 127.0.0.1:1" in cli(*given).err
    assert cli("explain", "-o", "name", "pausemode").out == cli("-o", "name", "explain", "pausemode").out


def test_help_lists_options_and_no_arguments(cli: Cli) -> None:
    """They stand in the usage; a name alone would explain nothing."""
    shown = cli("describe", "stage", "--help").out
    assert "Usage: rlctl describe stage [OPTIONS] SLOT" in shown
    assert "\n  SLOT" not in shown
    groups = cli("weights", "--help").out
    assert groups.index("Commands:") < groups.index("Options:") < groups.index("--endpoint")


def test_unknown_words_are_usage_errors(cli: Cli) -> None:
    assert cli("paus").code == 2
    assert cli("memory", "free").code == 2
    assert cli("pause", "--no-such-option").code == 2
    assert cli("pause", "--mode", "gently").code == 2


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("statu", "status"),
        ("checksum", "weights checksum"),
        ("weights updat", "weights update"),
        ("get stage", "get stages"),
    ],
)
def test_a_wrong_word_is_told_what_is_near(cli: Cli, typed: str, meant: str) -> None:
    ran = cli(*typed.split())
    assert ran.code == 2
    assert f"No such command '{typed}'. Did you mean '{meant}'" in ran.err


def test_next_steps_name_commands_that_exist() -> None:
    named = [words for reason in Reason for words in re.findall(r"`rlctl ([a-z ]+)`", reason.next_step)]
    assert named
    assert all(find(words) is not None for words in named), named


HELPFUL = [
    ["--help"],
    ["pause", "--help"],
    ["weights", "update", "--help"],
    ["status", "--help"],
    ["up", "--help"],
    ["generate", "--help"],
    ["version"],
    ["explain", "PauseMode"],
]


@pytest.mark.parametrize("arguments", HELPFUL, ids=" ".join)
def test_help_loads_neither_grpc_nor_torch_nor_rich(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from rlctl.cli.main import root\n"
        "try: root.main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'grpc', 'torch', 'rich', 'asyncio', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("rlctl pau", "pause"),
        ("rlctl memory re", "release"),
        ("rlctl pause --mo", "--mode"),
        ("rlctl pause --mode re", "retract"),
    ],
)
def test_completion_offers_words_options_and_enum_values_without_grpc(line: str, offered: str) -> None:
    words = line.split()
    script = (
        "import sys, os\n"
        "from rlctl.cli.main import root\n"
        "try: root.main([])\n"
        "except SystemExit: pass\n"
        "assert not {'grpc', 'torch', 'rich'} & set(sys.modules)\n"
    )
    environment = {
        "_RLCTL_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "PATH": "/usr/bin:/bin",
    }
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert f"plain,{offered}" in ran.stdout.splitlines()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_rlctl(cli: Cli, shell: str) -> None:
    ran = cli("completion", shell)
    assert ran.code == 0
    assert f"_RLCTL_COMPLETE={shell}_complete" in ran.out


def test_nothing_is_not_the_name_of_everything(cli: Cli) -> None:
    ran = cli("explain", "")
    assert ran.code == 2
    assert "the contract has no ''" in ran.err
    assert len(ran.err) < 200

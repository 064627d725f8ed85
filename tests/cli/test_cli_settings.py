"""Where a setting comes from: flag, environment, context file, default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import pytest
from cli_helpers import Cli
from click.testing import CliRunner

from rlctl.cli.app.global_options import Command, global_options, pass_settings
from rlctl.cli.app.settings import Settings, config_file
from rlctl.cli.main import Root
from rlctl.contract.errors import InvalidRequest

CONFIG = """
current: lab
contexts:
  lab:
    endpoint: lab:1
    output: yaml
    timeout: 9s
    token: from-context
  other:
    endpoint: other:2
    token_file: {token_file}
"""


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], None]:
    def write(content: str) -> None:
        config_file().parent.mkdir(parents=True, exist_ok=True)
        config_file().write_text(content, errors="surrogateescape")

    (tmp_path / "token").write_text("from-file\n")
    write(CONFIG.format(token_file=tmp_path / "token"))
    return write


class _Probe(Root):
    """A root with the one command "show", which stores the settings that it got."""

    seen: Settings

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        @pass_settings
        def show(settings: Settings) -> None:
            self.seen = settings

        return Command(cmd_name, callback=show)


def settings_of(*arguments: str) -> Settings:
    root = _Probe(params=global_options(root=True))
    result = CliRunner().invoke(root, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return root.seen


def test_defaults_hold_without_anything() -> None:
    settings = settings_of("show")
    assert (settings.endpoint, settings.output, settings.color) == ("127.0.0.1:5080", "table", "auto")
    assert settings.timeout_s is None
    assert settings.token is None
    assert [settings.quiet, settings.verbose, settings.yes, settings.dry_run] == [False] * 4


@pytest.mark.usefixtures("config")
def test_the_current_context_beats_the_defaults() -> None:
    settings = settings_of("show")
    assert (settings.endpoint, settings.output, settings.timeout_s) == ("lab:1", "yaml", 9.0)
    assert settings.token == "from-context"


@pytest.mark.usefixtures("config")
def test_a_named_context_beats_the_current_one() -> None:
    settings = settings_of("--context", "other", "show")
    assert (settings.endpoint, settings.output, settings.token) == ("other:2", "table", "from-file")


@pytest.mark.usefixtures("config")
def test_the_environment_beats_the_context_and_a_flag_beats_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_ENDPOINT", "env:3")
    monkeypatch.setenv("RLCTL_OUTPUT", "json")
    monkeypatch.setenv("RLCTL_TIMEOUT", "500ms")
    monkeypatch.setenv("RLCTL_TOKEN", "from-env")
    settings = settings_of("--output", "name", "show")
    assert (settings.endpoint, settings.output, settings.timeout_s) == ("env:3", "name", 0.5)
    assert settings.token == "from-env"


def test_options_are_taken_after_the_subcommand_and_the_last_place_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_OUTPUT", "yaml")
    assert settings_of("show", "-o", "json").output == "json"
    settings = settings_of("--timeout", "1s", "-o", "wide", "show", "--timeout", "2s", "-q", "--yes", "--dry-run")
    assert (settings.timeout_s, settings.output) == (2.0, "wide")
    assert settings.quiet
    assert settings.yes
    assert settings.dry_run


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("contexts: [", "config.yaml: while parsing"),
        ("- a list", "may hold `current` and `contexts` only"),
        ("contxts: {}", "may hold `current` and `contexts` only"),
        ("contexts: lab", "contexts must map names"),
        ("contexts: {lab: {endpiont: x}}", "context 'lab': endpiont is not among"),
        ("contexts: {lab: nothing}", "context 'lab': its content"),
        ("current: nowhere", "no context 'nowhere'; there are: none"),
        ("current: [lab]\ncontexts: {lab: {}}", "no context \"['lab']\"; there are: lab"),
        ("current: 7\ncontexts: {lab: {}, 7.5: {}}", "no context '7'; there are: 7.5, lab"),
        ("contexts: {lab: {1: x}}", "context 'lab': 1 is not among"),
        ("current: lab\ncontexts: {lab: {endpoint: [here]}}", "endpoint is ['here']"),
        ("current: \udcff", "config.yaml: 'utf-8' codec can't decode"),
        ("current: lab\ncontexts: {lab: {output: xml}}", "output is 'xml': it must be one of table"),
    ],
)
def test_a_broken_context_file_is_named_with_what_is_wrong(
    config: Callable[[str], None], content: str, complaint: str
) -> None:
    config(content)
    settings = settings_of("show")
    with pytest.raises(InvalidRequest) as failure:
        _ = (settings.output, settings.endpoint)
    assert complaint in str(failure.value)
    assert str(config_file()) in str(failure.value)


@pytest.mark.parametrize("given", ["soon", "-5", "0", ".nan", ".inf", "true", "[5]", "1.0e+400"])
def test_a_broken_timeout_in_the_context_is_refused(config: Callable[[str], None], given: str) -> None:
    config(f"current: lab\ncontexts: {{lab: {{timeout: {given}}}}}")
    with pytest.raises(InvalidRequest, match="timeout is "):
        _ = settings_of("show").timeout_s


@pytest.mark.parametrize("name", ["token", "token_file"])
def test_a_token_in_the_context_is_a_text(config: Callable[[str], None], name: str) -> None:
    config(f"current: lab\ncontexts: {{lab: {{{name}: [a]}}}}")
    with pytest.raises(InvalidRequest, match=rf"{name} is \['a'\]"):
        _ = settings_of("show").token


@pytest.mark.usefixtures("config")
def test_an_unknown_context_is_a_usage_error_that_names_the_known_ones(cli: Cli) -> None:
    ran = cli("status", "--context", "nope")
    assert ran.code == 2
    assert "there are: lab, other" in ran.err


def test_a_broken_context_file_does_not_stop_what_needs_none(config: Callable[[str], None], cli: Cli) -> None:
    config("{")
    assert cli("--help").code == 0
    assert cli("pause", "--help").code == 0
    assert cli("version", "-o", "json").code == 0


def test_a_bad_value_in_the_environment_names_the_variable(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_OUTPUT", "xml")
    ran = cli("version")
    assert ran.code == 2
    assert "RLCTL_OUTPUT" in ran.err


def test_a_bad_value_of_a_flag_does_not_name_the_variable(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_OUTPUT", "json")
    for arguments in (["--output", "xml", "version"], ["version", "--output", "xml"]):
        ran = cli(*arguments)
        assert ran.code == 2
        assert "'xml' is not one of" in ran.err
        assert "RLCTL_OUTPUT" not in ran.err


def test_a_command_line_is_repeated_with_its_request_id_or_for_other_stages() -> None:
    settings = Settings(["pause", "--slot", "a", "--slot=b", "--mode", "in place", "--request-id", "old", "-q"])
    assert settings.command(request_id="new") == ("rlctl pause --slot a --slot=b --mode 'in place' -q --request-id new")
    assert settings.command(slots=["c"]) == "rlctl pause --mode 'in place' -q --slot c"


@pytest.mark.parametrize("words", [["--bogus"], ["status", "--bogus"], ["bogus"]])
def test_a_command_line_that_cannot_be_read_is_told_as_data_where_the_environment_asks_for_data(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("RLCTL_OUTPUT", "json")
    ran = cli(*words)
    assert ran.code == 2
    assert ran.error["reason"] == "USAGE"
    assert "bogus" in ran.error["message"]

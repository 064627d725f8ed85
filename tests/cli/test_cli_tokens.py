"""``rlctl tokens``: the file that it writes is the one that servers read."""

from __future__ import annotations

import json
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cli_helpers import Cli, LiveFleet

from rlctl.cli.app.settings import Settings
from rlctl.contract.scopes import Grant
from rlctl.transport import access_file
from rlctl.transport.access_file import Entry, hash_of, read
from rlctl.transport.auth import Access
from rlctl.transport.channel import bearer
from rlctl.transport.tls.identity import Identity

ALICE = "rlctl://lab/client/alice"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "access.json"
    monkeypatch.setenv("RLCTL_ACCESS_FILE", str(path))
    return path


def new(cli: Cli, *arguments: str) -> str:
    result = cli("tokens", "new", *arguments, "-o", "name")
    assert result.code == 0, result.err
    return str(result.out.strip())


def test_a_token_is_printed_once_and_kept_as_a_hash(cli: Cli, file: Path) -> None:
    token = new(cli, "ci", "--scope", "viewer", "--scope", "weights:actor")
    assert token.startswith("rlctl_")
    assert token not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    [made] = read(file)["ci"].tokens
    assert made.sha256 == hash_of(token)
    identity = Access(None, str(file)).authenticate(dict(bearer(token)))
    assert {str(grant) for grant in identity.principal.grants} == {"viewer", "weights:actor"}
    listed = cli("tokens", "list")
    assert made.id in listed.out
    assert token not in listed.out
    assert "viewer, weights:actor" in listed.out


def test_a_rotation_has_two_valid_tokens_until_it_ends(cli: Cli, file: Path) -> None:
    old = new(cli, "ci", "--scope", "rollout")
    fresh = new(cli, "ci", "--expires", "1h")
    assert old != fresh
    [first, second] = read(file)["ci"].tokens
    assert second.expires is not None
    assert second.expires - second.created == pytest.approx(3600, abs=1)
    assert cli("tokens", "revoke", "ci", "--keep-newest").code == 0
    assert [token.sha256 for token in read(file)["ci"].tokens] == [hash_of(fresh)]
    assert cli("tokens", "revoke", "ci", "--token", first.id).code == 2, "it is not there any more"
    assert cli("tokens", "revoke", "ci", "--token", second.id).code == 0
    assert cli("--yes", "tokens", "revoke", "ci").code == 0
    assert read(file) == {}


@pytest.mark.parametrize(
    ("waiting", "change"),
    [
        (("revoke", "bob"), ("--yes", "tokens", "revoke", "mallory")),
        (("revoke", "bob"), ("tokens", "limit", "mallory", "7")),
        (("revoke", "bob"), ("tokens", "new", "mallory")),
    ],
)
def test_a_change_during_the_question_stays(
    cli: Cli, file: Path, monkeypatch: pytest.MonkeyPatch, waiting: tuple[str, ...], change: tuple[str, ...]
) -> None:
    for name in ("bob", "mallory"):
        new(cli, name, "--scope", "admin")

    def confirm(*_: object) -> None:
        monkeypatch.undo()
        monkeypatch.setenv("RLCTL_ACCESS_FILE", str(file))
        assert cli(*change).code == 0
        changed.append(read(file).get("mallory"))

    changed: list[Entry | None] = []
    monkeypatch.setattr(Settings, "confirm", confirm)
    assert cli("tokens", *waiting).code == 0
    assert dict(read(file)) == {entry.name: entry for entry in changed if entry is not None}


def test_a_change_waits_for_the_end_of_an_earlier_change(file: Path) -> None:
    def add(name: str) -> None:
        with access_file.changing(file, new=True) as entries:
            entries[name] = Entry(name, (Grant.parse("viewer"),))

    with ThreadPoolExecutor(1) as thread:
        with access_file.changing(file, new=True) as entries:
            second = thread.submit(add, "second")
            with pytest.raises(TimeoutError):
                second.result(0.3)
            entries["first"] = Entry("first", (Grant.parse("viewer"),))
        second.result(20)
    assert sorted(read(file)) == ["first", "second"]


def test_only_a_new_principal_may_begin_a_file(cli: Cli, file: Path) -> None:
    for command in (("limit", "default", "3"), ("revoke", "ci"), ("revoke", "ci", "--keep-newest"), ("new", "ci")):
        assert cli("--yes", "tokens", *command).code == 2, command
        assert not file.exists()


def test_a_certificate_stands_for_a_principal(cli: Cli, file: Path) -> None:
    result = cli("tokens", "new", "alice", "--scope", "admin", "--certificate", ALICE)
    assert (result.code, result.out) == (0, "")
    assert Access(None, str(file)).authenticate({}, Identity.of(ALICE)).principal.name == "alice"
    [row] = json.loads(cli("tokens", "list", "-o", "json").out)
    assert (row["name"], row["scopes"], row["certificate"]) == ("alice", "admin", ALICE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("new", "ci"), "a new principal needs a scope"),
        (("new", "ci", "--scope", "root"), "'root' is no scope; there are: viewer, rollout"),
        (("new", "two words", "--scope", "viewer"), "is no name of a principal"),
        (("new", "fleet", "--scope", "viewer"), "is no name of a principal"),
        (("new", "ci", "--scope", "viewer", "--certificate", "CN=alice"), "does not begin with rlctl://"),
        (("new", "there", "--scope", "admin"), "there has viewer; all tokens of a principal have the same scopes"),
        (("revoke", "ci"), "has no principal 'ci'; it has: there"),
        (("revoke", "there", "--token", "12345678"), "there is nothing to revoke; there has tokens:"),
        (("revoke", "there", "--token", "1", "--keep-newest"), "exclude each other"),
    ],
)
def test_what_is_wrong_changes_nothing(cli: Cli, file: Path, arguments: tuple[str, ...], message: str) -> None:
    new(cli, "there", "--scope", "viewer")
    before = file.read_bytes()
    result = cli("tokens", *arguments)
    assert result.code == 2
    assert message in result.err
    assert file.read_bytes() == before


def test_a_broken_file_is_never_overwritten(cli: Cli, file: Path) -> None:
    for content, message in (
        ("{", "cannot be read"),
        ('{"version": 1, "principals": [{"name": "x", "scopes": ["root"]}]}', "principals[0].scopes: 'root'"),
        ('{"version": 1, "principals": [], "more": 1}', "unknown keys: more"),
        ('{"version": 1, "principals": [{"name": "x", "scopes": [], "tokens": [{"sha256": "0"}]}]}', "lacks created"),
        ('{"version": 1, "principals": [{"name": "x", "scopes": []}, {"name": "x", "scopes": []}]}', "twice"),
    ):
        file.write_text(content)
        result = cli("tokens", "new", "ci", "--scope", "viewer")
        assert result.code == 2
        assert message in result.err
        assert file.read_text() == content


def test_an_operation_of_the_command_line_names_user_and_host(rlctl: LiveFleet) -> None:
    operation = rlctl("pause", "-o", "json").data
    assert operation["caller"]["client"] == "cli"
    assert re.fullmatch(r".+@.+", operation["caller"]["user"])
    described = rlctl("describe", "operation", operation["operation_id"]).out
    assert re.search(r"Principal: +anonymous", described)
    assert re.search(r"Client: +cli/\S+ .+@.+", described)
    assert "cli/" in rlctl("get", "operations", "-o", "wide").out


def test_the_audit_is_a_table_and_jsonl(rlctl: LiveFleet) -> None:
    operation = rlctl("pause", "-o", "json").data
    rlctl("disable", "a")
    table = rlctl("audit").out
    assert re.search(r"anonymous +cli/\S+ \S+@\S+ +SetStageEnabled +a +OK", table)
    assert re.search(r"PauseGeneration +a, b +OK +" + operation["operation_id"], table)
    newest, before = (json.loads(line) for line in rlctl("audit", "--limit", "0", "-o", "jsonl").out.splitlines())
    assert (newest["method"], newest["slots"]) == ("SetStageEnabled", ["a"])
    assert before["operation_id"] == operation["operation_id"]
    assert rlctl("audit", "--denied", "-o", "json").data == []
    assert rlctl("audit", "--since", "1h", "--principal", "nobody", "-o", "name").out == ""


def test_a_principal_has_the_quota_of_the_file_unless_it_has_its_own(cli: Cli, file: Path) -> None:
    token = new(cli, "ci", "--scope", "rollout", "--max-in-flight", "2")
    new(cli, "other", "--scope", "rollout")
    assert Access(None, str(file)).authenticate(dict(bearer(token))).principal.max_in_flight == 2
    assert cli("tokens", "limit", "default", "100").code == 0
    new(cli, "ci")
    assert cli("--yes", "tokens", "revoke", "ci", "--keep-newest").code == 0
    assert (read(file).max_in_flight, read(file)["ci"].max_in_flight, read(file)["other"].max_in_flight) == (
        *(100, 2),
        None,
    )
    quotas = {row["name"]: row["quota"] for row in json.loads(cli("tokens", "list", "-o", "json").out)}
    assert quotas == {"ci": 2, "other": 100}
    changed = cli("tokens", "limit", "ci", "8")
    assert changed.code == 0
    assert "ci has a quota of 8 requests in flight at each server." in changed.err
    assert cli("--yes", "tokens", "revoke", "other").code == 0
    assert read(file).max_in_flight == 100
    conflict = cli("tokens", "new", "ci", "--max-in-flight", "9")
    assert conflict.code == 2
    assert "rlctl tokens limit ci 9" in conflict.err
    assert "ci has a quota of 100" in cli("tokens", "limit", "ci", "none").err
    assert "Principals without a quota of their own have no quota." in cli("tokens", "limit", "default", "none").err
    before = file.read_bytes()
    for wrong in ("0", "-1", "many", "1000001"):
        assert cli("tokens", "limit", "--", "ci", wrong).code == 2, wrong
    assert cli("tokens", "limit", "absent", "1").code == 2
    assert file.read_bytes() == before

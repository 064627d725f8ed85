"""The reference docs are those of the code, and the protos' comments agree with the verb table."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl import v1
from rlctl.cli import main
from rlctl.cli.app.exit_codes import of_reason
from rlctl.contract import comments as descriptors
from rlctl.contract.comments import ANSWERS, PACKAGE
from rlctl.contract.errors import Reason
from rlctl.contract.verbs import ANY, JOINED, VERBS, Verb
from rlctl.v1 import coordinator_pb2, rollout_pb2
from tools import reference

DOCS = Path(__file__).parents[2] / "docs" / "reference"
COORDINATOR = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
ROLLOUT = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"]
OFFERED = [verb for verb in VERBS.values() if verb.fleet]


def check(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.reference", "--check", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_docs_are_up_to_date() -> None:
    stale = reference.out_of_date(DOCS)
    assert not stale, f"run {reference.COMMAND}: {stale} are out of date"


def test_check_names_what_is_out_of_date_and_the_command_that_mends_it(tmp_path: Path) -> None:
    reference.write(tmp_path)
    assert check(tmp_path).returncode == 0
    (tmp_path / "verbs.md").write_text("old")
    (tmp_path / "cli.md").unlink()
    checked = check(tmp_path)
    assert checked.returncode == 1
    assert f"{tmp_path / 'verbs.md'} is out of date: run tools/protos" in checked.stderr
    assert f"{tmp_path / 'cli.md'} is out of date: run tools/protos" in checked.stderr
    assert "errors.md" not in checked.stderr


def test_the_docs_are_the_same_wherever_they_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = reference.pages()
    for name, value in {
        "HOME": "/elsewhere",
        "COLUMNS": "40",
        "RLCTL_ENDPOINT": "lab:1",
        "XDG_STATE_HOME": "/x",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert reference.pages() == before


def test_every_verb_has_a_section_and_every_section_its_answers() -> None:
    page = reference.pages()["verbs.md"]
    for verb in OFFERED:
        section = page.split(f"\n### {verb.name}\n")[1].split("\n##")[0]
        assert all(f"| {question} |" in section for question in ANSWERS), verb.name
        assert (f"`rlctl {verb.cli}`" in section) == bool(verb.cli)
        for field in verb.request.DESCRIPTOR.fields:
            assert f"| `{field.name}` |" in section, f"{verb.name}.{field.name}"


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_a_verb_names_the_data_of_its_ranks(verb: Verb) -> None:
    page = reference.pages()["verbs.md"]
    section = page.split(f"\n### {verb.name}\n")[1].split("\n##")[0]
    assert (f"| Data of each rank | `{verb.data}`: [" in section) == bool(verb.data)


def test_links_between_sections_lead_somewhere() -> None:
    for name, page in reference.pages().items():
        anchors = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
        for link in re.findall(r"\]\(#([^)]+)\)", page):
            assert link in anchors, f"{name}#{link}"
    verbs = {heading.lower() for heading in re.findall(r"^### (\w+)$", reference.pages()["verbs.md"], re.MULTILINE)}
    assert set(re.findall(r"verbs\.md#(\w+)", reference.pages()["cli.md"])) <= verbs


def test_every_reason_has_a_row_with_its_status_and_exit_code() -> None:
    page = reference.pages()["errors.md"]
    for reason in Reason:
        assert f"| `{reason.name}` | `{reason.exception.status}` |" in page
        row = next(line for line in page.splitlines() if line.startswith(f"| `{reason.name}` |"))
        assert row.split(" | ")[3] == str(int(of_reason(reason)))


def test_a_page_has_one_title() -> None:
    for name, page in reference.pages().items():
        assert name.endswith(".json") or len(re.findall(r"^# ", page, re.MULTILINE)) == 1, name


def test_every_command_has_a_section() -> None:
    headings = set(re.findall(r"^### rlctl (.+)$", reference.pages()["cli.md"], re.MULTILINE))
    assert headings == set(main.entries())


@pytest.mark.parametrize(
    ("service", "method"),
    [(service.name, method.name) for service in (COORDINATOR, ROLLOUT) for method in service.methods],
)
def test_the_comment_of_every_rpc_answers_what_a_caller_asks(service: str, method: str) -> None:
    text, answers = descriptors.rpc(service, method)
    assert text.endswith(".")
    assert list(answers) == list(ANSWERS)
    assert all(answers.values())


def test_an_answer_of_several_lines_is_one_answer() -> None:
    text, answers = descriptors.rpc("CoordinatorService", "LoadAdapter")
    assert text.endswith("The call is a whole update.")
    assert answers["Effect"].endswith(
        "Refused while requests run with the replaced adapter, unless generation is paused or abort_requests is set."
    )


@pytest.mark.parametrize("verb", OFFERED, ids=lambda verb: verb.name)
def test_the_deadline_in_the_comment_is_that_of_the_table(verb: Verb) -> None:
    _, answers = descriptors.rpc("CoordinatorService", verb.name)
    assert answers["Deadline"] == f"{verb.deadline_s:g} s."


@pytest.mark.parametrize("verb", [v for v in OFFERED if not v.in_update], ids=lambda verb: verb.name)
def test_the_states_in_the_comment_are_those_of_the_table(verb: Verb) -> None:
    """Only the first sentence lists states. UPDATING may go unsaid: there the update itself is who asks."""
    said = descriptors.rpc("CoordinatorService", verb.name)[1]["States"].split(". ")[0]
    if said.startswith("Every state except JOINING"):
        assert verb.states == JOINED
    elif said.startswith("Every state"):
        assert verb.states == ANY
    elif "every other state" not in said:
        named = set(re.findall(r"\b[A-Z]{5,}\b", said))
        assert named <= verb.states
        assert verb.states - named <= {"UPDATING"}


def test_every_declaration_of_the_contract_has_a_comment() -> None:
    for name in (path.stem for path in Path(v1.__path__[0]).glob("*_pb2.py")):
        file = importlib.import_module(f"{PACKAGE}.{name}")
        for message in file.DESCRIPTOR.message_types_by_name.values():
            assert descriptors.comment(message.full_name)
            for field in message.fields:
                assert descriptors.comment(f"{message.full_name}.{field.name}"), field.full_name
        for enum in file.DESCRIPTOR.enum_types_by_name.values():
            for value in enum.values:
                assert descriptors.comment(f"{enum.full_name}.{value.name}"), value.name


def test_comments_are_free_of_marks_and_lint_directives() -> None:
    comments = descriptors.comments()
    assert f"{PACKAGE}.RolloutService.GenerateStream" in comments
    assert not [name for name, text in comments.items() if "buf:lint" in text or text.startswith("//")]
    assert descriptors.comment(f"{PACKAGE}.NoSuchMessage") == ""
    assert descriptors.rpc("CoordinatorService", "NoSuchMethod") == ("", {})


@pytest.mark.parametrize(
    ("message", "field", "shown"),
    [
        ("Target", "slots", "repeated string"),
        ("ErrorDetail", "metadata", "map<string, string>"),
        ("RequestHeader", "timeout", "google.protobuf.Duration"),
        ("RequestHeader", "target", "Target"),
    ],
)
def test_types_are_named_as_the_proto_names_them(message: str, field: str, shown: str) -> None:
    descriptor = coordinator_pb2.DESCRIPTOR.pool.FindMessageTypeByName(f"{PACKAGE}.{message}")
    assert descriptors.type_name(descriptor.fields_by_name[field]) == shown

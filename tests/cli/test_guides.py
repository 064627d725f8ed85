"""The commands of the documents parse; those in blocks of README and guides run in order against a fleet."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from cli_helpers import started

from rlctl.cli.main import root
from rlctl.testing.in_process_fleet import StageSpec

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
OTHERS = sorted((ROOT / "docs").glob("*.md"))

OF_PROCESSES = ("up", "down", "restart", "logs", "rollback")
"""Commands for which a fleet in one process is not enough; tests/cli and tests/processes run them."""

PLACEHOLDERS = {
    "SLOT": "actor-0",
    "NAME": "math",
    "ID": "0",
    "NUMBER": "4",
    "REASON": "STALE",
    "FILE": "examples/multi-model.yaml",
    "BACKUP": "README.md",
}

IN_A_POD = re.compile(r"\bkubectl exec \S+ -- ")


def lines(document: Path) -> list[list[str]]:
    """Commands in blocks, but for excerpts with "..."."""
    blocks = re.findall(r"```bash\n(.*?)```", document.read_text(), flags=re.DOTALL)
    text = IN_A_POD.sub("", "".join(blocks).replace("\\\n", " "))
    words = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [each[1:] for each in words if each[:1] == ["rlctl"] and "..." not in each]


def inline(document: Path) -> list[list[str]]:
    """Commands in a text. Some name a command only: they have no words after it."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(code)[1:] for code in re.findall(r"`(rlctl [a-z][^`]*)`", IN_A_POD.sub("", prose))]


def parsed(words: list[str], directory: Path) -> click.Command:
    """The command of a line, once its options and arguments are found right."""
    words = [PLACEHOLDERS.get(word, str(directory) if word in ("DIR", "/tmp/tiny") else word) for word in words]
    node: click.Command = root
    while isinstance(node, click.Group) and words:
        name, words = words[0], words[1:]
        found = node.get_command(click.Context(node), name)
        assert found is not None, name
        node = found
    if words:
        node.make_context(node.name, words)
    return node


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "docs" / "kubernetes.md"], ids=[*NAMES, "docs/kubernetes.md"])
def test_commands_parse(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for words in [*lines(document), *inline(document)]:
        parsed(words, tmp_path)


@pytest.mark.parametrize("document", OTHERS, ids=lambda path: path.name)
def test_commands_in_blocks_of_other_documents_parse(document: Path, tmp_path: Path) -> None:
    for words in lines(document):
        parsed(words, tmp_path)


RUN = {
    name: [words for words in lines(path) if words[0] not in OF_PROCESSES]
    for name, path in zip(NAMES, DOCUMENTS, strict=True)
}


@pytest.mark.parametrize("commands", [each for each in RUN.values() if each], ids=[name for name in RUN if RUN[name]])
def test_the_commands_of_blocks_run(commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "weights.txt").write_text("one")
    specs = [StageSpec(slot, str(tmp_path)) for slot in ("actor-0", "actor-1")]
    with started(tmp_path / "journal.db", specs) as rlctl:
        for words in commands:
            ran = rlctl(*(str(tmp_path) if word == "/tmp/tiny" else word for word in words))
            missing = words[0] == "plan" and not Path("/tmp/tiny").exists()  # it asks for the model of the guide
            assert ran.code == 0 or missing, (words, ran.err)

"""The commands of README and guides: those of a block run in order against a fleet, those in a text parse."""

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


def lines(document: Path) -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", document.read_text(), flags=re.DOTALL)
    words = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [each[1:] for each in words if each[:1] == ["rlctl"]]


def inline(document: Path) -> list[list[str]]:
    """Commands in a text. Some name a command only: they have no words after it."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(code)[1:] for code in re.findall(r"`(rlctl [a-z][^`]*)`", prose)]


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_commands_parse(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for words in [*lines(document), *inline(document)]:
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

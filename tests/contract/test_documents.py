"""Links between documents resolve, names of code exist, and glossary and decisions are complete and in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from rlctl.v1 import common_pb2, results_pb2, verbs_pb2
from tests.support.source_names import defined

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def prose(path: Path) -> str:
    """The text without blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_links_of_a_document_resolve(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def sections() -> list[list[str]]:
    """The terms of each section of the glossary."""
    parts = re.split(r"^## ", GLOSSARY, flags=re.MULTILINE)[1:]
    return [terms for part in parts if (terms := re.findall(r"^- \*\*(.+?)\*\*: ", part, flags=re.MULTILINE))]


def test_the_terms_of_the_glossary_are_in_order_and_defined_once() -> None:
    terms = [term.casefold() for section in sections() for term in section]
    assert len(terms) > 100
    assert sorted(set(terms)) == sorted(terms)
    for section in sections():
        assert section == sorted(section, key=str.casefold)


@pytest.mark.parametrize(
    "enum",
    [
        common_pb2.Evidence,
        common_pb2.Outcome,
        common_pb2.PauseMode,
        common_pb2.StageState,
        common_pb2.VerificationLevel,
        results_pb2.OperationState,
        verbs_pb2.UpdateKind,
    ],
    ids=lambda enum: enum.DESCRIPTOR.name,
)
def test_the_glossary_names_every_value_of_an_enum(enum: EnumTypeWrapper) -> None:
    values = [value.name for value in enum.DESCRIPTOR.values if value.number]
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.DESCRIPTOR.name).upper() + "_"
    for value in values:
        assert re.search(rf"\b{value.removeprefix(prefix)}\b", GLOSSARY, flags=re.IGNORECASE), value


PATH = re.compile(r"(?<![\w./:-])((?:rlctl|engines|protos|tests|docs|tools|examples)/[\w./-]*\w)")


def paths(name: str) -> list[str]:
    """The paths in the code of a guide: alone, as a word of a command, or in a block of commands."""
    text = (ROOT / name).read_text()
    code = re.findall(r"^```bash$(.*?)^```$|(?<!`)`([^`]+)`", text, flags=re.DOTALL | re.MULTILINE)
    return [path for part in code for path in PATH.findall(" ".join(part))]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "RELEASES.md"])
def test_the_paths_of_a_guide_exist(name: str) -> None:
    assert paths(name)
    assert [path for path in paths(name) if not (ROOT / path).exists()] == []


def test_the_guide_for_contributors_has_a_line_for_every_package() -> None:
    listed = {path.split("/")[1] for path in paths("CONTRIBUTING.md") if path.startswith("rlctl/")}
    packages = {path.parent.name for path in (ROOT / "rlctl").glob("*/__init__.py")}
    assert packages - listed == set()


def test_the_simulation_page_has_every_module() -> None:
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "docs" / "simulation.md").read_text(), flags=re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`([\w/]+)`", row)]
    folder = ROOT / "tests" / "simulator"
    modules = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.py")}
    assert sorted(listed) == sorted(module for module in modules if not module.endswith("__init__"))


def test_the_simulation_page_has_the_branches_of_modules_that_exist() -> None:
    names = re.findall(r"^\| `([\w/]+\.py)` \| \d", (ROOT / "docs" / "simulation.md").read_text(), flags=re.MULTILINE)
    assert names
    assert [name for name in names if not (ROOT / "rlctl" / name).exists()] == []


DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_context_decision_and_consequences_on_one_page(decision: Path) -> None:
    text = decision.read_text()
    assert text.startswith(f"# {decision.name[:4]}. ")
    assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE) == ["Context", "Decision", "Consequences"]
    assert all(part.strip() for part in re.split(r"^#.+$", text, flags=re.MULTILINE)[2:])
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 120


def test_the_index_of_decisions_lists_each_by_its_title_and_number() -> None:
    titles = [decision.read_text().partition("\n")[0].partition(". ")[2] for decision in DECISIONS]
    rows = [f"| [{path.name[:4]}]({path.name}) | {title} |" for path, title in zip(DECISIONS, titles, strict=True)]
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert re.findall(r"^\| \[.+$", index, flags=re.MULTILINE) == rows
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))


def test_the_functions_that_the_architecture_names_are_in_their_modules() -> None:
    text = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    places = re.findall(r"((?:`[\w.]+`(?:,? and )?)+) in `([\w/]+\.py)`", text)
    assert len(places) > 40
    missing = [
        f"{path}: {name}"
        for names, path in places
        for name in re.findall(r"`([\w.]+)`", names)
        if name not in defined(ROOT / path)
    ]
    assert missing == []
    methods = set(re.findall(r"`([A-Z]\w+\.\w+)`", text))
    assert methods - set().union(*(defined(ROOT / path) for _, path in places)) == set()

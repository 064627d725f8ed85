"""Any text is a document or has problems with lines; it never ends in a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_topology_resolve import ENGINES, HF, PD, REGULAR, model

from rlctl.topology import document
from rlctl.topology.document import Node
from rlctl.topology.load import load
from rlctl.topology.plan import plan
from rlctl.topology.problems import Problems
from rlctl.topology.resolve import resolve

SEEDS = [
    model(REGULAR + "  overrides: {mem_fraction_static: 0.8}\n  environment: {A: b}"),
    model(PD, "name: actor\nmodel_path: /x\nupdate_weights: true"),
    "fleet: &f\n  num_gpus: 4\n  network: {interface: 10.0.0.0/8}\n" + model(REGULAR).replace("sglang", "models"),
]
TROUBLE = [
    "\t",
    "\0",
    ":",
    "- ",
    "{",
    "}",
    "[",
    "]",
    "&a ",
    "*a",
    "<<: *a",
    "!!python/object:os.system x",
    "\n",
    "  ",
    "'",
    '"',
    "%",
    "#",
    "9" * 400,
    "1e999",
    ".inf",
    ".nan",
    "2001-99-99",
    "!!int x",
    "!!binary '='",
    "null",
    "~",
    "-1",
    "0x",
    "? ",
    "---\n",
    "...\n",
    "|",
    ">",
    "\ufeff",
    "é",
    "1:90",
    "y",
    "=",
]


def run(text: str) -> Problems:
    """Everything that a command does with a file."""
    problems = Problems("f.yaml")
    root = document.parse(text, problems)
    if root is not None:
        topology = resolve(root, HF, ENGINES, problems, file=True)
        if not problems.errors:
            plan(topology, gpus=0)
    assert root is not None or problems.errors
    assert all(problem.line <= text.count("\n") + 2 for problem in problems.entries)
    return problems


@settings(max_examples=400)
@given(
    st.sampled_from(SEEDS), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), st.sampled_from(["", *TROUBLE])))
)
def test_a_mutilated_file_has_problems_and_no_traceback(text: str, cuts: list[tuple[float, int, str]]) -> None:
    for place, length, instead in cuts:
        at = int(place * len(text))
        text = text[:at] + instead + text[at + length :]
    run(text)


@settings(max_examples=200)
@given(st.text())
def test_any_text_has_problems_and_no_traceback(text: str) -> None:
    run(text)


@settings(max_examples=200)
@given(st.binary())
def test_any_bytes_have_problems_and_no_traceback(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(raw)
    problems = Problems("any.yaml")
    assert document.read(path, problems) is not None or problems.errors


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: [1,\nb: 2", 2, "no valid YAML"),
        ("a: 1\na: 2", 2, "given already in line 1"),
        ("a: !!python/object:os.system x", 1, "is not allowed"),
        ("a: &x [*x]", 0, "nested too deep"),
        ("[" * 2000, 0, "nested too deep"),
        ("? [a]\n: 1", 1, "a key must be a word"),
        ("", 0, "it is empty"),
        ("a: 2001-99-99\nb: !!int x", 2, "is no int"),
        ("<<: 1", 1, "only mappings can be merged"),
        ('a: 1\n"b\\nc": 2', 2, "a key must be a word, and 'b\\nc' is none"),
        ('a: 1\n"\\ud800": 2', 2, "a key must be a word"),
        ('a: 1\nb: "\\ud800"', 2, "'\\ud800' has characters that are none of a text"),
        ('a: "x\\0y"', 1, "has characters that are none of a text"),
        ('a: "\\e[31m"', 1, "has characters that are none of a text"),
        ("a: 1\n---\nb: 2", 2, "expected a single document in the stream, but found another document"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_line(text: str, line: int, words: str) -> None:
    problems = Problems("f.yaml")
    document.parse(text, problems)
    (problem,) = problems.errors
    assert problem.line == line
    assert words in problem.message


def test_aliases_that_grow_without_measure_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    problems = Problems("f.yaml")
    assert document.parse("\n".join(lines), problems) is None
    assert "its aliases make it larger" in problems.errors[0].message


def test_merge_keys_fill_in_and_do_not_override() -> None:
    problems = Problems("f.yaml")
    root = document.parse("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}", problems)
    assert root is not None
    assert isinstance(root.value, dict)
    merged = root.value["b"].value
    assert isinstance(merged, dict)
    assert {name: node.value for name, node in merged.items()} == {"x": 3, "y": 2}
    assert not problems.entries


def test_dates_are_texts_and_scalars_are_what_they_are() -> None:
    problems = Problems("f.yaml")
    root = document.parse("a: 2026-01-02\nb: 1\nc: 1.5\nd: yes\ne: ~\nf: x", problems)
    assert root is not None
    assert isinstance(root.value, dict)
    assert [node.value for node in root.value.values()] == ["2026-01-02", 1, 1.5, True, None, "x"]
    assert [node.line for node in root.value.values()] == [1, 2, 3, 4, 5, 6]


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "Is a directory"), (tmp_path / "no", "No such file")):
        problems = Problems(str(path))
        assert document.read(path, problems) is None
        assert words in problems.errors[0].message
    (tmp_path / "latin").write_bytes(b"a: 1\nb: \xe9")
    problems = Problems("latin")
    assert document.read(tmp_path / "latin", problems) is None
    assert (problems.errors[0].line, problems.errors[0].message) == (2, "it is not UTF-8")


def test_a_file_whose_name_is_no_text_is_named_all_the_same(tmp_path: Path) -> None:
    _, problems = load(tmp_path / "\udcff.yaml", HF, ENGINES)
    assert (
        str(problems.errors[0]).encode().decode()
        == f"{tmp_path}/\\xff.yaml: it cannot be read: No such file or directory"
    )


def test_a_text_of_several_lines_is_one() -> None:
    problems = Problems("f.yaml")
    root = document.parse("a: |\n  one\n  two\té", problems)
    assert root is not None
    assert root.value == {"a": Node("one\ntwo\té", 1)}
    assert problems.errors == []


def test_values_without_a_file_have_no_lines() -> None:
    assert document.of({"a": [1]}) == Node({"a": Node([Node(1)])})

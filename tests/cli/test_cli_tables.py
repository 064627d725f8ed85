"""Tables on a terminal and elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from rlctl.cli.render import tables
from rlctl.cli.render.tables import Table, facts, plain, rich

DIGEST = "0123456789abcdef" * 4
TABLE = Table(
    ("SLOT", "DIGEST", "NOTE", "ERROR"),
    [("actor-0", DIGEST, "", ""), ("a", "", "x" * 300, "")],
    frozenset({"ERROR"}),
)


def on_terminal(table: Table, *, width: int, whole_ids: bool = False) -> list[str]:
    written = io.StringIO()
    Console(file=written, width=width, force_terminal=False).print(rich([table], width=width, whole_ids=whole_ids))
    return [line.rstrip() for line in written.getvalue().splitlines()]


def test_plain_tables_are_aligned_and_nothing_is_cut_or_wrapped() -> None:
    header, first, second = plain([TABLE]).splitlines()
    assert header.split() == ["SLOT", "DIGEST", "NOTE"]
    assert first.split() == ["actor-0", DIGEST, "-"]
    assert second.split() == ["a", "-", "x" * 300]
    assert header.index("DIGEST") == first.index(DIGEST) == second.index("-")
    assert not any(line.endswith(" ") for line in (header, first, second))


def test_an_optional_column_appears_as_soon_as_one_row_has_it() -> None:
    full = Table(TABLE.headers, [*TABLE.rows, ("b", "", "", "broken")], TABLE.optional)
    assert "ERROR" not in plain([TABLE])
    assert "ERROR" in plain([full])


def test_titles_and_facts_have_no_line_of_headers() -> None:
    shown = plain([facts([("Slot", "a"), ("Nothing", ""), ("State", "READY")], title="Stage"), TABLE])
    assert shown.splitlines()[:4] == ["Stage", "Slot:   a", "State:  READY", ""]


def test_a_terminal_gets_short_digests_unless_whole_ones_are_asked_for() -> None:
    assert any(f"{DIGEST[:12]}…" in line for line in on_terminal(TABLE, width=80))
    assert any(DIGEST in line for line in on_terminal(TABLE, width=400, whole_ids=True))


def test_only_the_last_column_wraps_on_a_narrow_terminal() -> None:
    lines = on_terminal(TABLE, width=60)
    assert sum("actor-0" in line for line in lines) == 1
    assert "".join(lines).count("x") == 300
    assert all(len(line) <= 60 for line in lines)


def test_sentences_that_have_no_room_in_a_column_stand_below() -> None:
    table = Table(("SLOT", "OUTCOME", "ERROR"), [("actor-0", "APPLIED", ""), ("actor-1", "UNKNOWN", "it is gone " * 3)])
    narrow = on_terminal(table, width=40)
    assert [line.split() for line in narrow[:3]] == [
        ["SLOT", "OUTCOME"],
        ["actor-0", "APPLIED"],
        ["actor-1", "UNKNOWN"],
    ]
    assert "".join(narrow[3:]).startswith("actor-1: it is gone")
    assert on_terminal(table, width=60)[0].split() == ["SLOT", "OUTCOME", "ERROR"]


OPERATIONS = Table(
    ("OPERATION", "VERB", "STATE", "CONFIRMED", "MODEL", "CREATED", "TOOK", "ERROR"),
    [
        (
            "01a1fdbf-ec9c-75b9-a7ec-137efacacfdb",
            "PauseGeneration",
            "OK",
            "2/2",
            "actor",
            "2026-11-21T10:56:16",
            "6ms",
            "",
        )
    ],
    frozenset({"ERROR"}),
)


def test_a_narrow_terminal_shortens_ids_then_does_without_what_matters_least_and_says_so() -> None:
    assert "01a1fdbf-ec9c-75b9-a7ec-137efacacfdb" in on_terminal(OPERATIONS, width=120)[1]
    header, row, *rest = on_terminal(OPERATIONS, width=90)
    assert row.split() == ["…137efacacfdb", "PauseGeneration", "OK", "2/2", "actor", "2026-11-21T10:56:16", "6ms"]
    assert not rest
    header, row, note = on_terminal(OPERATIONS, width=60)
    assert header.split() == ["OPERATION", "VERB", "STATE", "CONFIRMED", "TOOK"]
    assert row.split() == ["…137efacacfdb", "PauseGeneration", "OK", "2/2", "6ms"]
    assert note == "(too narrow for CREATED, MODEL; -o wide shows everything)"
    header, row, *note = on_terminal(OPERATIONS, width=40)
    assert header.split() == ["OPERATION", "VERB", "STATE"]
    assert "CREATED, MODEL, CONFIRMED, TOOK" in " ".join(note)


def test_what_is_kept_is_cut_only_when_nothing_else_is_left() -> None:
    table = Table(("NAME", "TYPE", "MEANING"), [("mode", "PauseMode", "words " * 30), ("x", "uint32", "")])
    lines = on_terminal(table, width=50)
    assert lines[0].split() == ["NAME", "TYPE", "MEANING"]
    assert " ".join(lines).count("words") == 30


def test_square_brackets_in_cells_are_text_not_markup() -> None:
    shown = on_terminal(Table(("ERROR",), [("[red]no[/red]",)]), width=80)
    assert "[red]no[/red]" in shown[1]


def test_without_a_terminal_rich_is_used_only_when_colours_are_asked_for() -> None:
    assert tables.console("auto") is None
    assert tables.console("never") is None
    console = tables.console("always")
    assert console is not None
    assert not console.no_color

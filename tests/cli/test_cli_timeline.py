"""The timeline of an update in the terminal, and as a page."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from cli_helpers import LiveFleet

from rlctl.cli.render import timeline
from rlctl.cli.render.tables import plain
from rlctl.contract.durations import duration
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_DIRTY, TRANSPORT_TORCH_GLOO, VERIFICATION_LEVEL_EXPECTED
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_PARTIAL,
    PHASE_KIND_PAUSE,
    PHASE_KIND_TRANSFER,
    PHASE_KIND_VERIFY,
    Operation,
    Phase,
    RankTransfer,
    StagePhase,
)


def stage(slot: str, took_s: float, *, slowest: int = 0, **fields: object) -> StagePhase:
    given = {"outcome": OUTCOME_APPLIED, "slowest_rank": slowest} | fields
    return StagePhase(slot=slot, duration=duration(took_s), **given)


@pytest.fixture
def operation() -> Operation:
    """Pause at once; 2 s later a transfer of 1 s; a verification that stage <b> fails; 10 s in all."""
    sent = [RankTransfer(rank=rank, bytes=3_000_000, transfer=duration(0.5)) for rank in (0, 1)]
    made = Operation(verb="WeightUpdate", operation_id="some-id", state=OPERATION_STATE_PARTIAL, targets=["a", "<b>"])
    made.create_time.FromSeconds(1000)
    made.done_time.FromSeconds(1010)
    made.timeline.phases.extend(
        [
            Phase(kind=PHASE_KIND_PAUSE, duration=duration(1), stages=[stage("a", 0.5), stage("<b>", 1, slowest=1)]),
            Phase(
                kind=PHASE_KIND_TRANSFER,
                start=duration(3),
                duration=duration(1),
                stages=[stage("a", 1, ranks=sent, transport=TRANSPORT_TORCH_GLOO)],
            ),
            Phase(
                kind=PHASE_KIND_VERIFY,
                start=duration(9),
                duration=duration(1),
                stages=[stage("<b>", 1, outcome=OUTCOME_DIRTY, failed_level=VERIFICATION_LEVEL_EXPECTED)],
            ),
        ]
    )
    return made


def test_waits_between_phases_are_shown(operation: Operation) -> None:
    shown = [(bar.name, bar.start_s, bar.length_s) for bar in timeline.bars(operation)]
    assert shown == [("pause", 0, 1), ("wait", 1, 2), ("transfer", 3, 1), ("wait", 4, 5), ("verify", 9, 1)]


def test_the_table_draws_bars_and_names_who_was_last(operation: Operation) -> None:
    title, header, pause, wait, transfer, _, verify = plain([timeline.table(operation)]).splitlines()
    assert title == "Timeline:"
    assert header.split()[:5] == ["PHASE", "START", "TIME", "OF", "10.0s"]
    assert pause.split()[3] == "###" + "." * 27
    assert wait.split()[3] == "..." + "~" * 6 + "." * 21
    assert "<b> rank 1" in pause
    assert "6 MB" in transfer
    assert "6 MB/s" in transfer
    assert "torch_gloo" in transfer
    assert "DIRTY, failed EXPECTED" in verify


def test_the_phases_under_way_are_shown_while_a_command_waits(operation: Operation) -> None:
    assert timeline.running(operation) == []
    operation.timeline.phases[1].running = True
    assert timeline.running(operation) == ["transfer 1.0s"]
    assert "running, torch_gloo" in plain([timeline.table(operation)])


class Page(HTMLParser):
    """Tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_escaped_and_without_outside_resources(operation: Operation) -> None:
    text = timeline.page(operation)
    page = Page()
    page.feed(text)
    assert not page.open
    assert not page.attributes & {"src", "href", "onclick"}
    assert "url(" not in text
    assert "@import" not in text
    shown = "".join(page.text)
    for part in ("WeightUpdate PARTIAL", "transfer", "rank 1", "<b>", "6 MB", "wait"):
        assert part in shown


def test_describe_operation_draws_an_update_and_writes_its_page(rlctl: LiveFleet, tmp_path: Path) -> None:
    checkpoint = tmp_path / "other"
    checkpoint.mkdir()
    (checkpoint / "weights.txt").write_text("other")
    update = rlctl("weights", "update", "--model-path", str(checkpoint), "-o", "name")
    operation_id = update.out.strip()
    shown = rlctl("describe", "operation", operation_id).out
    assert "Timeline:" in shown
    for phase in ("pause", "transfer", "publish", "resume"):
        assert f"\n{phase} " in shown
    page = tmp_path / "update.html"
    assert rlctl("describe", "operation", operation_id, "--html", str(page)).out.strip() == str(page)
    assert operation_id in page.read_text()
    assert rlctl("describe", "operation", operation_id, "--html", str(tmp_path / "no" / "page.html")).code == 2
    paused = rlctl("pause", "-o", "name").out.strip()
    refused = rlctl("describe", "operation", paused, "--html", str(page), "-o", "json")
    assert refused.error["reason"] == "UNSUPPORTED"
    assert "has no timeline" in refused.error["message"]

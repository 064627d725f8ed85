"""What the demo shows, and what it refuses before it starts anything."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import pytest
from cli_helpers import Cli
from rich.console import Console

from rlctl.contract.errors import Reason
from rlctl.demo.judge import Judge, Step, Verdict
from rlctl.demo.show import Display, plot


def step(number: int) -> Step:
    digest = f"d{number}"
    seen = {"digests": {"a": digest}, "contents": digest, "verified": {"a": "expected"}, "evidence": {"a": "rank"}}
    return Step(number, f"step-{number}", reward=0.5, tokens_per_s=1234.0, pause_ms=41.0, expected=digest, **seen)


def on_terminal(*, width: int, height: int, steps: int) -> tuple[str, str]:
    """(what a terminal was sent while the steps went by, what it was sent at the end)."""
    display, written, judge = Display(as_json=False), io.StringIO(), Judge()
    display._console = Console(file=written, force_terminal=True, color_system=None, width=width, height=height)
    for number in range(1, steps + 1):
        judge.look(step(number))
        display.step(step(number))
    live = written.getvalue()
    display.end(judge.verdict(0.25, 0.5))
    return live, written.getvalue().removeprefix(live)


def test_a_low_terminal_shows_the_newest_steps_and_all_of_them_at_the_end() -> None:
    live, end = on_terminal(width=120, height=24, steps=40)
    last_frame = live[live.rindex("version") :]
    assert "step-40" in last_frame
    assert "step-23" in last_frame
    assert "step-22" not in last_frame
    assert len(last_frame.splitlines()) < 24
    assert all(f"step-{number} " in end for number in range(1, 41))


def test_nothing_is_cut_on_a_terminal_of_80_columns() -> None:
    _, end = on_terminal(width=80, height=24, steps=40)
    assert "…" not in end
    row = next(line for line in end.splitlines() if "step-40" in line)
    assert row.split()[:2] == ["40", "step-40"]
    assert row.split()[-3:] == ["yes", "expected", "rank"]
    assert len(row.rstrip()) <= 80


@pytest.mark.parametrize("terminal", [True, False])
def test_each_step_shows_level_and_evidence(terminal: bool) -> None:
    display, written = Display(as_json=False), io.StringIO()
    display._console = Console(file=written, force_terminal=terminal, color_system=None, width=120, height=24)
    first = step(1)
    first.verified = {"a": "expected", "b": "received"}
    first.evidence = {}
    display.step(first)
    display.close()
    assert written.getvalue().rstrip().splitlines()[-1].split()[-3:] == ["yes", "expected/received", "-"]


def test_the_verdict_names_its_measure_and_is_broken_between_words_only() -> None:
    _, end = on_terminal(width=60, height=24, steps=1)
    said = end[end.index("PASSED") :]
    assert all(len(line) <= 60 for line in said.splitlines())
    assert "PASSED: greedy reward on all 100 sums 0.25 → 0.50 in 1 GRPO step; after" in " ".join(said.split())


def test_the_lines_of_json_say_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    display, judge = Display(as_json=True), Judge()
    judge.look(step(1))
    display.step(step(1))
    display.end(judge.verdict(0.25, 0.5))
    seen, verdict = map(json.loads, capsys.readouterr().out.splitlines())
    assert (seen["kind"], seen["step"], seen["checksums_equal"]) == ("step", 1, True)
    assert (verdict["kind"], verdict["reward_first"], verdict["reward_last"]) == ("verdict", 0.25, 0.5)


def test_a_plot_that_cannot_be_written_is_refused_before_anything_runs(cli: Cli, tmp_path: Path) -> None:
    ran = cli("demo", "--plot", str(tmp_path / "nowhere" / "plot.png"))
    assert ran.code == 2
    assert "nowhere/plot.png cannot be written" in ran.err


def test_several_ranks_are_for_engines_that_the_demo_can_verify_with_them(cli: Cli) -> None:
    from rlctl.demo import loop

    sizes = [spec.tp_size for spec in loop._engines(loop.Settings(engine="sglang", tp_size=2), Path("checkpoint"))]
    assert sizes == [2, 2]
    assert [spec.tp_size for spec in loop._engines(loop.Settings(), Path("checkpoint"))] == [2, 1]
    ran = cli("demo", "--engine", "vllm", "--tp", "2")
    assert ran.code == 2
    assert "servers of one rank only" in ran.err


def test_what_a_failed_demo_names_is_kept_and_the_rest_is_not(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from rlctl.demo import loop

    def fail(settings: loop.Settings, listener: loop.Listener, directory: Path) -> Verdict:
        log = directory / "actor-0.log"
        log.write_text("why")
        raise Reason.ENGINE_FAILED.error("actor-0 ended", next_step=f"See {log}.")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(loop, "run", fail)
    ran = cli("demo")
    (directory,) = tmp_path.glob("rlctl-demo-*")
    assert ran.code == 1
    assert f"See {directory / 'actor-0.log'}." in ran.err
    assert (directory / "actor-0.log").read_text() == "why"

    def interrupt(*_: object) -> Verdict:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "run", interrupt)
    assert cli("demo").code != 0
    assert list(tmp_path.glob("rlctl-demo-*")) == [directory]


def test_a_plot_is_a_png_whatever_its_file_is_called(tmp_path: Path) -> None:
    judge = Judge()
    judge.look(step(1))
    plot([step(1)], judge.verdict(0.25, 0.5), tmp_path / "reward.of.today")
    assert (tmp_path / "reward.of.today").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_made_is_refused_before_the_training(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    ran = cli("demo", "--steps", "1", "--plot", str(tmp_path / "plot.png"))
    assert ran.code == 2
    assert "matplotlib is not installed" in ran.err

"""The demo on a terminal, as JSON, as a plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from rlctl.demo.judge import Step, Verdict
from rlctl.demo.task import EVERY

COLUMNS = (
    *("step", "version", "rollout reward", "tokens/s", "pause ms", "transfer ms", "max |Δlogp|"),
    *("weights equal", "verified", "evidence"),
)
HEAD_LINES = 6
"""Lines of a terminal outside a live table: its frame and the text above."""


class Display:
    """A table that grows step by step: live on a terminal, else line by line; or one JSON object a line."""

    def __init__(self, *, as_json: bool) -> None:
        self._json = as_json
        self._console = Console(file=sys.stderr if as_json else sys.stdout)
        self._live: Live | None = None
        self.steps: list[Step] = []

    def note(self, text: str) -> None:
        """Print a remark beside the steps."""
        self._console.print(text, style="dim", markup=False, highlight=False)

    def step(self, step: Step) -> None:
        self.steps.append(step)
        if self._json:
            print(json.dumps(step.json()), flush=True)  # noqa: T201 - the data, on stdout
            return
        cells = _cells(step)
        if not self._console.is_terminal:
            if len(self.steps) == 1:
                self._line(COLUMNS)
            self._line(cells)
            return
        if self._live is None:
            # Erased at the end and printed once more in full: a live table cannot be taller than the terminal.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        newest = self.steps[-max(1, self._console.height - HEAD_LINES) :]
        self._live.update(_table(newest), refresh=True)

    def end(self, verdict: Verdict) -> None:
        self.close()
        if self._json:
            print(json.dumps(verdict.json()), flush=True)  # noqa: T201 - the data, on stdout
        if verdict.passed:
            self._say(_passed(verdict), "green")
        else:
            where = f" at step {verdict.steps}" if self.steps and self.steps[-1].problem else ""
            self._say(f"FAILED{where}: {verdict.problem}", "red")

    def close(self) -> None:
        """Restore the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._console.print(_table(self.steps))

    def _say(self, text: str, style: str) -> None:
        """Print a sentence: broken between words on a terminal, else in one line."""
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)

    def _line(self, cells: Sequence[str]) -> None:
        widths = (4, 8, 14, 8, 8, 11, 11, 13, 8, 8)
        text = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        print(text, file=self._console.file, flush=True)


def _table(steps: Sequence[Step]) -> Table:
    # Fits into 80 columns: heads of two lines, no frame.
    table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for column in COLUMNS:
        table.add_column(column.replace(" ", "\n"), no_wrap=True, justify="right")
    for step in steps:
        table.add_row(*_cells(step), style="red" if step.problem else "")
    return table


def _passed(verdict: Verdict) -> str:
    rewards = f"{verdict.reward_first:.2f} → {verdict.reward_last:.2f}"
    steps = f"{verdict.steps} GRPO steps" if verdict.steps > 1 else "1 GRPO step"
    return (
        f"PASSED: greedy reward on all {len(EVERY)} sums {rewards} in {steps}; "
        "after each of them every engine held exactly the trainer's weights, verified at level expected with an answer "
        "from every rank; log probabilities of engine and trainer differed by at most "
        f"{verdict.max_logprob_diff:.1e}."
    )


def _cells(step: Step) -> tuple[str, ...]:
    return (
        str(step.step),
        step.version or "-",
        f"{step.reward:.2f}",
        f"{step.tokens_per_s:,.0f}",
        f"{step.pause_ms:.0f}",
        f"{step.transfer_ms:.1f}",
        f"{step.max_logprob_diff:.1e}",
        "yes" if step.checksums_equal else "NO",
        _each(step.verified),
        _each(step.evidence),
    )


def _each(values: Mapping[str, str]) -> str:
    """Return the common value of all slots, or all values."""
    return "/".join(sorted(set(values.values()))) or "-"


def plot(steps: Sequence[Step], verdict: Verdict, path: Path) -> None:
    """Plot reward and pause over the steps, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True)
    numbers = [step.step for step in steps]
    above.plot(numbers, [step.reward for step in steps], label="rollouts (temperature 1)")
    above.plot(
        [0, verdict.steps],
        [verdict.reward_first, verdict.reward_last],
        "o--",
        label="evaluation (greedy, all sums)",
    )
    above.set_ylabel("mean reward")
    above.set_ylim(0, 1.02)
    above.legend(loc="lower right")
    below.plot(numbers, [step.pause_ms for step in steps], label="pause")
    below.plot(numbers, [step.transfer_ms for step in steps], label="transfer")
    below.set_ylabel("ms")
    below.set_ylim(bottom=0)
    below.set_xlabel("GRPO step")
    below.legend(loc="upper right")
    figure.suptitle("rlctl demo: GRPO through a fleet of two engines (TP 2 and TP 1)")
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)

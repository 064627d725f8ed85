"""``rlctl demo``: train a real language model by reinforcement through a fleet on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import click


@click.command()
@click.option("--steps", default=40, show_default=True, type=click.IntRange(1), help="GRPO steps.")
@click.option(
    "--engine",
    default="torch",
    show_default=True,
    type=click.Choice(["torch", "sglang", "vllm"]),
    help="Engine; sglang, vllm: two real servers (tools/engines install NAME).",
)
@click.option(
    "--tp",
    type=click.IntRange(1),
    help="Tensor-parallel ranks of both engines (torch, sglang).  [default: 2 and 1; of servers 1]",
)
@click.option(
    "--mode",
    default="sync",
    show_default=True,
    type=click.Choice(["sync", "one-step-off", "async"]),
    help="Generate, then train; train on the samples of the step before; or on any finished samples.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of everything that is drawn.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per step, a last one with the verdict.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a PNG of reward and pauses.")
@click.option(
    "--sabotage",
    type=click.Choice(["skip-sync", "stale-engine", "drop-tensor", "wrong-rank", "stale-decode"]),
    help="Break one thing on purpose; the demo must notice and fail.",
)
def demo(
    steps: int,
    engine: str,
    tp: int | None,
    mode: str,
    seed: int,
    as_json: bool,
    plot: Path | None,
    sabotage: str | None,
) -> None:
    """Train a tiny model by GRPO through a fleet on this machine.

    Makes a small Llama, starts a coordinator, an engine with two tensor-parallel ranks and one with a single rank (or
    two SGLang or vLLM servers), and trains on sums of two digits: rollouts through the fleet, a gradient step in this
    process, the new weights to both engines over gloo after every step. Exits non-zero unless the reward rose, every
    engine held exactly the trainer's weights after every step, and log probabilities of engines and trainer agreed.
    """
    if plot is not None and not os.access(plot if plot.exists() else plot.absolute().parent, os.W_OK):
        raise click.BadParameter(f"{plot} cannot be written", param_hint="--plot")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.BadParameter("matplotlib is not installed: pip install 'rlctl[demo]'", param_hint="--plot")
    if engine != "torch" and sabotage not in (None, "skip-sync", "stale-decode"):
        raise click.BadParameter(f"{sabotage} breaks the torch engine only", param_hint="--sabotage")
    if engine == "vllm" and tp not in (None, 1):
        raise click.BadParameter("of vLLM the demo starts servers of one rank only", param_hint="--tp")
    from rlctl.contract.errors import RlctlError
    from rlctl.demo import loop, show

    display = show.Display(as_json=as_json)
    settings = loop.Settings(seed=seed, steps=steps, engine=engine, tp_size=tp or 0, sabotage=sabotage or "", mode=mode)
    directory = Path(tempfile.mkdtemp(prefix="rlctl-demo-"))
    keep = False
    try:
        verdict = loop.run(settings, loop.Listener(display.note, display.step), directory)
    except RlctlError as error:
        keep = True  # the error names a log in the directory
        display.close()
        click.echo(f"error: {error}\n  Logs and checkpoint are kept in {directory}.", err=True)
        sys.exit(1)
    finally:
        display.close()
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)
    display.end(verdict)
    if plot is not None:
        show.plot(display.steps, verdict, plot)
    sys.exit(0 if verdict.passed else 1)

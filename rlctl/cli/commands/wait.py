"""``rlctl wait``: block until the stages meet a condition."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import cast

import click

from rlctl.cli.app.connection import connected
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.app.types import ParamType
from rlctl.cli.render import stages as roster
from rlctl.cli.render.printer import show
from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime.terminal import time_limit
from rlctl.v1.fleet_pb2 import Fleet, Stage

WAIT_S = 300.0
AGAIN_S = 0.2

Condition = Callable[[Fleet, Sequence[Stage]], str]
"""(fleet, selected stages) → the unmet condition, or ""."""


class ConditionType(ParamType):
    """``routable`` or ``version=LABEL``."""

    name = "condition"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Condition:
        if callable(value):
            return cast(Condition, value)
        word, equals, label = str(value).partition("=")
        if word == "routable" and not equals:
            return _routable
        if word != "version" or not label:
            self.fail(f"{value!r} is neither routable nor version=LABEL", param, ctx)
        return lambda fleet, stages: _at_version(fleet, stages, label)


@click.command(cls=Command)
@click.option(
    "--for",
    "condition",
    required=True,
    type=ConditionType(),
    metavar="routable|version=LABEL",
    help="routable: every enabled stage is routable. version=LABEL: every enabled stage is routable at version LABEL.",
)
@click.option("--model", default="", metavar="NAME", help="Only the stages of this model.")
@click.option("--slot", "slots", multiple=True, metavar="SLOT", help="Only this stage.  [repeatable]")
@pass_settings
def wait(settings: Settings, condition: Condition, model: str, slots: tuple[str, ...]) -> None:
    """Wait until stages are routable, or at a version.

    A coordinator that cannot be reached is tried again until the time is up: 5 minutes unless --timeout says
    otherwise. Exit code 6 when the time was up, 5 when no coordinator answered.
    """
    limit_s = settings.timeout_s or WAIT_S
    deadline = time.monotonic() + limit_s
    missing: RlctlError | None = None
    try:
        with time_limit(limit_s, "waiting"):
            while True:
                try:
                    with connected(settings) as fleet, contextlib.closing(fleet.watch()) as events:
                        for _ in events:
                            status = fleet.status()
                            stages = _counted(status, model, slots)
                            why = condition(status, stages) if stages else "no such stage is registered"
                            if not why:
                                show(settings, roster.stages_view(stages))
                                return
                            missing = Reason.DEADLINE_EXCEEDED.error(
                                f"after {limit_s:g} s: {why}", next_step="`rlctl status` says more."
                            )
                except RlctlError as error:
                    if error.reason is not Reason.UNREACHABLE:
                        raise
                    missing = error
                time.sleep(AGAIN_S)
    except RlctlError as error:
        if error.reason is Reason.DEADLINE_EXCEEDED and time.monotonic() >= deadline:
            raise missing or error from None
        raise


def _counted(fleet: Fleet, model: str, slots: Sequence[str]) -> list[Stage]:
    """Return the stages selected by model and slots; without slots only enabled stages."""
    return [
        stage
        for stage in fleet.stages
        if model in ("", stage.registration.model) and (stage.registration.slot in slots if slots else stage.enabled)
    ]


def _routable(fleet: Fleet, stages: Sequence[Stage]) -> str:
    del fleet
    return ", ".join(f"{s.registration.slot} is not routable ({s.not_routable})" for s in stages if not s.routable)


def _at_version(fleet: Fleet, stages: Sequence[Stage], label: str) -> str:
    latest = {model.name: model.latest for model in fleet.models}
    for stage in stages:
        published = latest[stage.registration.model]
        if published.label != label:
            return f"{stage.registration.model} is at version {published.label or 'none'}, not {label}"
        if stage.report.weight_version.sequence != published.sequence:
            return f"{stage.registration.slot} is at version {stage.report.weight_version.label or 'none'}, not {label}"
    return _routable(fleet, stages)

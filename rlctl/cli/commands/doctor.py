"""``rlctl doctor``: faults of this host and of a fleet, and a mend for each."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import click

from rlctl.cli.app.connection import bounded
from rlctl.cli.app.exit_codes import Exit
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.doctor.findings import Finding, Verdict
from rlctl.cli.doctor.fleet import FLEET_CHECKS, read_fleet, unreachable
from rlctl.cli.doctor.host import HOST_CHECKS, read_host
from rlctl.cli.render import values
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import Table
from rlctl.contract.errors import RlctlError


@click.command(cls=Command)
@pass_settings
def doctor(settings: Settings) -> None:
    """Check this host and, where there is one, a fleet; print a mend for each fault.

    This host: versions, plug-ins, /dev/shm, ulimits, proxy variables, the default port, disk, GPUs. The fleet that
    --endpoint names, or the only one that is up on this host: coordinator, this caller's certificate, clocks, versions,
    engines, links between coordinator and stages, min_healthy, and the stages' addresses from here. Nothing is changed.
    Exit code 1 when a check fails; warnings do not count.
    """
    host = read_host()
    findings = [finding for check in HOST_CHECKS for finding in check(host)]
    if settings.has_fleet:
        findings += _of_fleet(settings)
    show(settings, _view(findings))
    failures, warnings = (sum(each.verdict is verdict for each in findings) for verdict in _COUNTED)
    settings.say(f"{values.count(failures, 'failure')}, {values.count(warnings, 'warning')}")
    if failures:
        sys.exit(Exit.FAILED)


_COUNTED = (Verdict.FAILURE, Verdict.WARNING)


def _of_fleet(settings: Settings) -> list[Finding]:
    endpoint = settings.endpoint
    try:
        with bounded(settings) as connection:
            readings = read_fleet(connection, endpoint, settings.tls or None)
    except RlctlError as error:
        return [unreachable(endpoint, error)]
    return [finding for check in FLEET_CHECKS for finding in check(readings)]


def _view(findings: Sequence[Finding]) -> View:
    rows: list[tuple[str, str, str]] = []
    for finding in findings:
        rows.append((finding.verdict, finding.subject, finding.seen))
        if finding.mend:
            rows.append(("", "", f"→ {finding.mend}"))
    return View(
        [dataclasses.asdict(finding) for finding in findings],
        lambda _: [Table(("", "", ""), rows)],
        lambda: [finding.subject for finding in findings if finding.verdict is not Verdict.OK],
    )

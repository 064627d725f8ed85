"""``rlctl validate``: all errors of a topology file at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from rlctl.cli.app.exit_codes import Exit
from rlctl.cli.app.global_options import pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.commands.topology_flags import TopologyCommand, flags, options
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import prose


@click.command(cls=TopologyCommand)
@options
@click.option("--json-schema", is_flag=True, help="Print the JSON Schema of such files, for editors, instead.")
@pass_settings
def validate(settings: Settings, /, file: Path | None, json_schema: bool, **option_values: Any) -> None:
    """Check a topology file and its flags, without starting or calling a process.

    Every problem has its line, its key and the expected value. Arguments of engines are checked against the engine
    that is installed here. A setting that this version cannot run is an error with its reason; `plan` still shows the
    setting. Exit code 2 when there is an error; warnings do not count.
    """
    from rlctl.cli.render import values
    from rlctl.topology.json_schema import schema
    from rlctl.topology.load import load
    from rlctl.topology.support import unsupported

    if json_schema:
        click.echo(json.dumps(schema(), indent=2))
        return
    topology, problems = load(file, flags(option_values))
    if topology is not None and not problems.errors:
        problems.entries += unsupported(topology)
    ordered_problems = problems.in_order()
    if ordered_problems or settings.output not in ("table", "wide"):
        lines = [str(problem) for problem in ordered_problems]
        show(settings, View([problem.data for problem in ordered_problems], lambda _: [prose(lines)], lambda: lines))
    errors = len(problems.errors)
    if topology is None or errors:
        settings.say(values.count(errors, "error"))
        sys.exit(Exit.USAGE)
    engines = sum(group.engines for model in topology.models for group in model.groups)
    counted = (len(topology.models), "model"), (engines, "engine"), (topology.num_gpus, "GPU")
    settings.say(f"valid: {', '.join(values.count(number, noun) for number, noun in counted)}")

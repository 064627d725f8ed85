"""The file and the flags that ``up``, ``plan`` and ``validate`` share: rlctl's, and slime's as slime takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from rlctl.cli import state
from rlctl.cli.options import Command
from rlctl.cli.settings import Settings
from rlctl.cli.tables import Table, facts
from rlctl.cli.types import pairs
from rlctl.errors import Reason
from rlctl.launch.deployment import Deployment
from rlctl.launch.devices import gpu_count
from rlctl.launch.engine_run import Limits
from rlctl.launch.spec import EngineSpec
from rlctl.topology import support
from rlctl.topology.diff import Change
from rlctl.topology.flags import Flags
from rlctl.topology.load import loaded
from rlctl.topology.plan import Plan
from rlctl.topology.plan import plan as make_plan
from rlctl.topology.problems import Problem, Problems, invalid
from rlctl.topology.schema import DEVICES, LAUNCHERS, POLICIES

ADDRESSES = "--rollout-external-engine-addrs"
_SGLANG = "rlctl.sglang"
_ADDRESSES = "rlctl.addresses"


class TopologyCommand(Command):
    """A command that takes ``--sglang-ANYTHING [VALUE...]`` and flags with several values, as slime does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take out what click cannot: flags whose names are SGLang's, and lists of words."""
        kept: list[str] = []
        sglang: dict[str, str] = {}
        addresses: list[str] = []
        files: list[str] = []
        rest = list(args)
        while rest:
            word = rest.pop(0)
            name, equals, value = word.partition("=")
            if name == "--sglang-config":
                files.append(value if equals else _value_of(name, rest))
            elif name == ADDRESSES:
                addresses += [value] if equals else _words(rest)
            elif name.startswith("--sglang-"):
                words = [value] if equals else _words(rest)
                if not equals and words and words[-1].endswith((".yaml", ".yml")):
                    files.append(words.pop())  # the file, after a switch
                sglang[name.removeprefix("--sglang-").replace("-", "_")] = _joined(words)
            else:
                kept.append(word)
        ctx.meta[_SGLANG] = sglang
        ctx.meta[_ADDRESSES] = addresses
        return super().parse_args(ctx, [*kept, *files])


def _words(rest: list[str]) -> list[str]:
    """The words up to the next flag, taken off; a negative number is none."""
    words = []
    while rest and not (rest[0].startswith("-") and not rest[0][1:2].isdigit()):
        words.append(rest.pop(0))
    return words


def _value_of(flag: str, rest: list[str]) -> str:
    if not rest:
        raise click.UsageError(f"{flag} needs a file")
    return rest.pop(0)


def _joined(words: Sequence[str]) -> str:
    """Nothing is a switch that is on; several are a list."""
    import json

    return "true" if not words else words[0] if len(words) == 1 else json.dumps(words)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The file and the flags, which the command gets as ``file`` and the names of :func:`flags`."""
    declared = (
        click.argument("file", required=False, type=click.Path(path_type=Path), metavar="[FILE]"),
        click.option("--hf-checkpoint", metavar="DIR", help="Checkpoint of models that name none."),
        click.option(
            "--rollout-num-gpus", "num_gpus", type=click.IntRange(1), help="GPUs of all groups (ranks, on a CPU)."
        ),
        click.option(
            "--rollout-num-gpus-per-engine", "num_gpus_per_engine", type=click.IntRange(1),
            help="GPUs of each engine, where the file does not say.  [default: 1]",
        ),
        click.option("--num-gpus-per-node", type=click.IntRange(1), help="GPUs of a node.  [default: 8]"),
        click.option("--rollout-external", "external", is_flag=True, help="Attach to engines that run already."),
        click.option(
            ADDRESSES, "external_addresses", multiple=True, metavar="HOST:PORT...",
            help="Their addresses.",
        ),
        click.option(
            "--prefill-num-servers", type=click.IntRange(1),
            help="Without a file: this many prefill engines; the rest decode.",
        ),
        click.option("--router-policy", type=click.Choice(POLICIES), help="How gateways pick an engine."),
        click.option(
            "--sglang-*", "sglang_", metavar="[VALUE]", expose_value=False, multiple=True,
            help="Argument of SGLang by its name, for every SGLang engine, below the file's.",
        ),
        click.option(
            "--sglang-config", "config_", expose_value=False, metavar="FILE", help="The file, under slime's name."
        ),
        click.option("--engine", help="Engine plug-in, where the file does not say.  [default: torch]"),
        click.option("--model", help="Without a file: the model that the engines serve.  [default: actor]"),
        click.option(
            "--device", type=click.Choice(DEVICES),
            help="What the ranks compute on, where the file does not say; auto: GPUs, if any.  [default: auto]",
        ),
        click.option("--listen", metavar="ADDRESS", help="Where the coordinator listens.  [default: 127.0.0.1:5080]"),
        click.option("--name", help="Name of the fleet on this machine.  [default: default]"),
        click.option("--launcher", type=click.Choice(LAUNCHERS), help="What starts the processes.  [default: local]"),
        click.option(
            "--option", "options", multiple=True, metavar="NAME=VALUE",
            help="Setting of every engine, below the file's.  [repeatable]",
        ),
        click.option("--insecure", is_flag=True, help="Bind where other hosts can reach it though there is no token."),
    )  # fmt: skip
    for option in reversed(declared):
        command = option(command)
    return command


def flags(given: dict[str, Any]) -> Flags:
    """The flags from the parameters of the command that runs."""
    ctx = click.get_current_context()
    sglang: dict[str, str] = ctx.meta[_SGLANG]
    return Flags(
        **{
            **given,
            "options": pairs(given["options"]),
            "sglang": sglang,
            "external_addresses": (*ctx.meta[_ADDRESSES], *given["external_addresses"]),
        }
    )


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a file and its flags come to on this machine.

    Attributes:
        plan: what is to run.
        problems: warnings.
        running: the fleet of that name that is up, or None.
    """

    plan: Plan
    problems: Problems
    running: state.FleetState | None

    @property
    def present(self) -> dict[str, EngineSpec]:
        """Engines that run, by slot."""
        if self.running is None or not self.running.deployment:
            return {}
        return {spec.slot: spec for spec in Deployment.of(self.running.deployment).engines}

    @property
    def deployment(self) -> Deployment:
        """What a supervisor is told."""
        topology = self.plan.topology
        return Deployment(
            name=topology.name,
            listen=topology.listen,
            engines=tuple(self.plan.specs),
            insecure=topology.insecure,
            restart=topology.restart,
            limits=Limits(
                heal_s=topology.heal_timeout_s, drain_s=topology.drain_timeout_s, backoff_s=topology.backoff_s
            ),
        )

    def obstacles(self) -> list[Problem]:
        """Why it cannot be run here, and now: what this version cannot, and what this machine lacks."""
        return [*support.unsupported(self.plan), *support.missing(self.plan, gpus=gpu_count())]

    def refuse(self) -> None:
        """Raise UNSUPPORTED, or TOPOLOGY_INVALID for what this machine lacks, with every reason."""
        if found := support.unsupported(self.plan):
            lines = "\n  ".join(map(str, found))
            raise Reason.UNSUPPORTED.error(
                lines, field=found[0].key, next_step="docs/topology.md says what can be run."
            )
        if found := support.missing(self.plan, gpus=gpu_count()):
            raise invalid(found)


def prepare(file: Path | None, given: Flags) -> Prepared:
    """Read, resolve and plan. Raises TOPOLOGY_INVALID with everything that is wrong."""
    topology, problems = loaded(file, given)
    running = state.read(topology.name)
    if running is not None and not running.alive:
        running = None
    models = tuple(dataclasses.replace(model, model_path=_absolute(model.model_path)) for model in topology.models)
    topology = dataclasses.replace(topology, models=models)
    bind = ""
    if topology.interface:
        from rlctl.weights.interfaces import address_on

        bind = address_on(topology.interface)
    prepared = Prepared(make_plan(topology, gpus=gpu_count(), bind=bind), problems, running)
    plan = make_plan(topology, gpus=gpu_count(), running=prepared.present, bind=bind)
    return dataclasses.replace(prepared, plan=plan)


def token(settings: Settings, plan: Plan) -> str | None:
    """The bearer token: of the file's token_file, else as for every command. Raises FIELD_INVALID."""
    if plan.topology.token_file:
        from rlctl.transport.auth import load_token

        return load_token({}, file=str(Path(plan.topology.token_file).expanduser()))
    return settings.token


def warn(settings: Settings, problems: Problems) -> None:
    """Tell the warnings."""
    for problem in problems.in_order():
        if problem.warning:
            settings.say(str(problem))


def plan_tables(plan: Plan, changes: Sequence[Change], obstacles: Sequence[Problem], *, wide: bool) -> list[Table]:
    """The plan for people. ``changes``: against a fleet that runs; none: there is none."""
    topology = plan.topology
    about = facts(
        [
            ("Fleet", topology.name),
            ("Coordinator", topology.listen),
            ("Launcher", topology.launcher),
            ("Interface", topology.interface),
            ("GPUs", f"{topology.num_gpus} on {plan.nodes} node{'s' if plan.nodes > 1 else ''} of "
                     f"{topology.num_gpus_per_node}" if topology.num_gpus else ""),
        ]
    )  # fmt: skip
    models = Table(
        ("MODEL", "UPDATABLE", "ENGINES", "RANKS", "WORLD", "ROUTER", "GATEWAY", "CHECKPOINT"),
        [
            [
                model.name, "yes" if model.update_weights else "no", str(model.engines), str(model.ranks),
                str(model.world_size or ""), model.router_policy, model.gateway, model.model_path,
            ]
            for model in plan.models
        ],
        frozenset({"ROUTER", "GATEWAY"}),
    )  # fmt: skip
    actions = {change.slot: change for change in changes}
    rows = []
    for engine in plan.engines:
        spec = engine.spec
        change = actions.get(spec.slot)
        rows.append(
            [
                spec.slot, change.action if change else "", ",".join(change.fields) if change else "", spec.model,
                spec.worker_type, spec.engine, f"{spec.tp_size}" + (f"x{spec.pp_size}" if spec.pp_size > 1 else ""),
                "attached" if spec.attached else spec.device, _places([(r.node, r.gpu) for r in engine.ranks]),
                str(engine.rank_offset or ""), " ".join(f"{key}={value}" for key, value in spec.options.items()),
            ]
        )  # fmt: skip
    rows += [[c.slot, c.action, *[""] * 9] for c in changes if c.action == "remove"]
    rows += [
        [name, "", "", "", "placeholder", "", "", "", _places(cells), "", ""] for name, cells in plan.reserved.items()
    ]
    engines = Table(
        ("SLOT", "CHANGE", "WHY", "MODEL", "TYPE", "ENGINE", "TP", "DEVICE", "NODE:GPU", "OFFSET", "OPTIONS"),
        rows,
        frozenset({"CHANGE", "WHY", "OPTIONS"}),
    )
    tables = [about, models, engines]
    if wide:
        ranks = [
            [spec_rank, str(r.tp), str(r.pp), r.stage, f"{r.node}:{r.gpu}"]
            for engine in plan.engines
            for r in engine.ranks
            for spec_rank in [f"{engine.spec.slot}.{r.rank}"]
        ]
        commands = [[name, command] for engine in plan.engines for name, command in engine.commands.items()]
        tables += [Table(("RANK", "TP", "PP", "STAGE", "NODE:GPU"), ranks), Table(("PROCESS", "COMMAND"), commands)]
    if obstacles:
        tables.append(Table(("",), [[str(problem)] for problem in obstacles], title="Cannot be run here:"))
    return tables


def _places(cells: Sequence[tuple[int, int]]) -> str:
    """0:0-3,1:0-3."""
    runs: list[list[int]] = []
    for node, gpu in cells:
        if runs and runs[-1][0] == node and runs[-1][2] == gpu - 1:
            runs[-1][2] = gpu
        else:
            runs.append([node, gpu, gpu])
    return ",".join(f"{node}:{first}" + (f"-{last}" if last > first else "") for node, first, last in runs)


def _absolute(path: str) -> str:
    """A directory that is there, absolute; anything else as it was written."""
    found = Path(path).expanduser()
    return str(found.resolve()) if path and found.is_dir() else path

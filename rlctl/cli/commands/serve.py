"""``rlctl coordinator``, ``rlctl stage``, ``rlctl worker``: a server in the foreground, as started by launchers."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from rlctl.cli.app.tls_options import TLS_OPTIONS, tls_flags
from rlctl.cli.app.types import DEVICE, DURATION, LEVEL, pairs
from rlctl.contract.errors import Reason
from rlctl.launch.supervisor.fleet_state import state_directory
from rlctl.runtime.restart_limit import RESTARTS, WITHIN_S, RestartLimit

DEVICE_OPTION = click.option(
    "--device",
    default="auto",
    show_default=True,
    type=DEVICE,
    metavar="auto|cpu|cuda|cuda:N",
    help="Device to compute on; auto: GPUs, if any.",
)

METRICS_OPTION = click.option(
    "--metrics",
    default="",
    metavar="HOST:PORT",
    help="Serve metrics for Prometheus here; port 0 takes any. Needs the extra [metrics].  [default: none]",
)

ACCESS_OPTION = click.option(
    "--access-file",
    default="",
    envvar="RLCTL_ACCESS_FILE",
    show_envvar=True,
    help="File with further principals and their scopes; `rlctl tokens` writes it.",
)


PROCESS = "rlctl.process"
"""Key of the process options in a context's ``meta``."""


def _process_option(*arguments: str, **settings: Any) -> Callable[..., Any]:
    """Return an option of :func:`serve`, which is no argument of the command."""

    def keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        context.meta.setdefault(PROCESS, {})[parameter.name] = value

    return click.option(*arguments, expose_value=False, callback=keep, **settings)


_PROCESS_OPTIONS = (
    _process_option("--log-level", default="INFO", show_default=True, type=LEVEL, help="Level of the log on stderr."),
    _process_option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        envvar="RLCTL_LOG_FORMAT",
        show_envvar=True,
        help="Lines of the log as text, or as JSON with operation, update, slot and epoch.",
    ),
    _process_option("--end-with-parent", is_flag=True, help="End when standard input ends."),
)


def process_options(command: Callable[..., Any]) -> Callable[..., Any]:
    return _with(command, _PROCESS_OPTIONS)


def _server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("--listen", default="127.0.0.1:0", show_default=True, help="Address to bind; port 0 takes any."),
        click.option(
            "--token-file", default="", help="File with the bearer token. Else RLCTL_TOKEN_FILE, RLCTL_TOKEN."
        ),
        click.option(
            "--insecure",
            is_flag=True,
            help="Bind an address that other hosts can reach, without a token or certificates.",
        ),
        *TLS_OPTIONS,
        *_PROCESS_OPTIONS,
    )
    return _with(command, options)


def _engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("--engine", default="torch", show_default=True, help="Engine plug-in."),
        click.option("--model-path", required=True, help="Directory of the checkpoint."),
        click.option("--tp-size", default=1, show_default=True, type=click.IntRange(1), help="Tensor-parallel ranks."),
        DEVICE_OPTION,
        click.option("--dtype", default="auto", show_default=True, help="Dtype to hold the weights in."),
        click.option(
            "--option", "options", multiple=True, metavar="NAME=VALUE", help="Setting of the plug-in.  [repeatable]"
        ),
        click.option("--node", default=socket.gethostname, help="Name of this host, as other hosts know it."),
    )
    return _with(command, options)


def _with(command: Callable[..., Any], options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Add the options to the command; help lists the options in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def _secured(option_values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration, with the token and the certificate of the process."""
    from rlctl.transport.auth import load_token
    from rlctl.transport.tls.credentials import load_tls

    token_file = option_values.pop("token_file")
    return {**option_values, "token": load_token(file=token_file), "tls": load_tls({}, **tls_flags())}


def _engine_config(option_values: dict[str, Any], rank: int) -> Any:
    """Move the options of :func:`_engine_options`, except the plug-in's name, into an engine configuration."""
    from rlctl.engine import EngineConfig, brings_ranks
    from rlctl.launch.local import gpus

    names = ("model_path", "tp_size", "device", "dtype", "options", "node")
    engine, settings = option_values["engine"], {name: option_values.pop(name) for name in names}
    settings["device"] = gpus.of_process(settings["device"], engine, rank)
    settings["options"] = pairs(settings["options"])
    followers = len(option_values.get("followers", ())) if brings_ranks(engine) else 0
    return EngineConfig(rank=rank, nodes=1 + followers, **settings)


@click.command()
@click.option(
    "--journal", default="", help="File of the journal.  [default: journal.db in the state directory of the fleet]"
)
@click.option("--new", is_flag=True, help="Start over: put the journal of the earlier fleet aside as NAME.previous.db.")
@click.option(
    "--heal-by-hand",
    multiple=True,
    metavar="MODEL",
    help="Bring stages of this model to the published version only when asked (`rlctl heal`).  [repeatable]",
)
@click.option(
    "--admit-only",
    metavar="SLOT,...",
    help="Admitted slots; other slots are refused until `rlctl admit` admits them.  [default: every slot]",
)
@click.option(
    "--owner-grace",
    type=DURATION,
    metavar="DURATION",
    help="How long the owner of an update may be silent after a failed write.  [default: 5s]",
)
@click.option(
    "--heal-grace",
    type=DURATION,
    metavar="DURATION",
    help="How long a DIRTY stage is left to the next update before it is healed.  [default: 60s]",
)
@click.option(
    "--audit-retention",
    type=DURATION,
    metavar="DURATION",
    help="How long records of the audit are kept, the newest 100,000 at most.  [default: 90d]",
)
@ACCESS_OPTION
@_server_options
@METRICS_OPTION
@click.option(
    "--web",
    default="",
    metavar="HOST:PORT",
    help="Serve a read-only page of the fleet here; port 0 takes any. Needs the extra [web].  [default: none]",
)
def coordinator(
    journal: str,
    new: bool,
    admit_only: str | None,
    owner_grace: float | None,
    heal_grace: float | None,
    audit_retention: float | None,
    web: str,
    **option_values: Any,
) -> None:
    """Run a coordinator."""
    from rlctl.coordinator.audit import KEPT_S
    from rlctl.coordinator.journal.start_over import start_over
    from rlctl.coordinator.server import CoordinatorConfig, CoordinatorServer
    from rlctl.coordinator.updates.manager import Graces
    from rlctl.runtime.server_process import announce

    if web:
        refuse_without_aiohttp()
    defaults = Graces()
    graces = Graces(owner_grace or defaults.owner_s, heal_grace or defaults.heal_s)
    path = Path(journal) if journal else state_directory() / "journal.db"
    topology = None if admit_only is None else tuple(filter(None, admit_only.split(",")))
    config = CoordinatorConfig(
        path, topology=topology, graces=graces, audit_kept_s=audit_retention or KEPT_S, **_secured(option_values)
    )

    async def start() -> Callable[[], Any]:
        if new:
            await asyncio.to_thread(start_over, path)
        server = CoordinatorServer(config)
        await server.start()
        page, facts = None, bound_metrics(server.metrics_address)
        if web:
            from rlctl.cli.web.server import WebServer  # loads aiohttp

            page = WebServer(server)
            try:
                facts["web_address"] = await page.start(web)
            except BaseException:
                await server.stop()
                raise
        announce("coordinator", address=server.address, pid=os.getpid(), **facts)
        ends.append(server.coordinator.end_of_reign())

        async def stop() -> None:
            if page is not None:
                await page.stop()
            await server.stop()

        return stop

    ends: list[Awaitable[object]] = []
    serve(start, ends)


@click.command()
@click.option("--slot", required=True, help="Stable name of the stage in the fleet.")
@click.option("--model", default="actor", show_default=True, help="Model that it serves.")
@click.option(
    "--coordinator", default="", help="Address of the coordinator. Without it, the stage waits for a coordinator."
)
@click.option(
    "--follower",
    "followers",
    multiple=True,
    metavar="ADDRESS",
    help="Address of a follower's worker, in the order of their ranks.  [repeatable]",
)
@click.option("--rollout-listen", default="127.0.0.1:0", show_default=True, help="Address for generation.")
@click.option(
    "--data-listen",
    default="",
    help="Address of the data port; by default a free port on the host of --rollout-listen.",
)
@click.option("--advertise", default="", help="Host name under which other hosts reach this process.")
@click.option("--weight-version", default="", help="Label of the model's first version.")
@click.option("--frozen", is_flag=True, help="The model never receives weights.")
@click.option(
    "--worker-type",
    default="regular",
    show_default=True,
    type=click.Choice(["regular", "prefill", "decode", "encoder"]),
    help="Requests that the engine serves.",
)
@ACCESS_OPTION
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=RESTARTS,
    show_default=True,
    help="Server engines: restarts after failures before the engine is left FAILED; 0: no limit.",
)
@click.option(
    "--restarts-within", type=DURATION, default=WITHIN_S, show_default="30m", help="Time in which restarts count."
)
@_engine_options
@_server_options
@METRICS_OPTION
def stage(restarts: int, restarts_within: float, **option_values: Any) -> None:
    """Run a stage server: rank 0 of one engine."""
    from rlctl.runtime.server_process import announce
    from rlctl.stage.server import StageConfig, StageServer

    engine_config = _engine_config(option_values, 0)
    limit = RestartLimit(restarts, restarts_within)
    config = StageConfig(engine_config=engine_config, restarts=limit, **_secured(option_values))

    async def start() -> Callable[[], Any]:
        server = StageServer(config)
        await server.start()
        announce(
            "stage",
            address=server.address,
            rollout_address=server.rollout_address,
            data_address=server.data_address,
            pid=os.getpid(),
            **bound_metrics(server.metrics_address),
        )
        return server.stop

    serve(start)


@click.command()
@click.option("--rank", required=True, type=click.IntRange(1), help="Rank, 1 or more; of sglang: number of the node.")
@_engine_options
@_server_options
def worker(rank: int, **option_values: Any) -> None:
    """Run a follower rank. The engine starts when rank 0 attaches. The process ends when rank 0 ends."""
    from rlctl.runtime.server_process import announce
    from rlctl.worker.server import WorkerConfig, WorkerServer

    engine_config = _engine_config(option_values, rank)
    config = WorkerConfig(engine_config=engine_config, **_secured(option_values))

    async def start() -> Callable[[], Any]:
        server = WorkerServer(config)
        address = await server.start()
        announce("worker", address=address, pid=os.getpid())
        ends.append(server.abandoned.wait())
        return server.stop

    ends: list[Awaitable[object]] = []
    serve(start, ends)


def refuse_without_aiohttp() -> None:
    """Raise UNSUPPORTED if aiohttp is not installed."""
    if importlib.util.find_spec("aiohttp") is None:
        raise Reason.UNSUPPORTED.error(
            "the page needs aiohttp, which is not installed here", field="web", next_step="pip install 'rlctl[web]'"
        )


def bound_metrics(address: str) -> dict[str, str]:
    return {"metrics_address": address} if address else {}


def process_setting(name: str) -> Any:
    """Return the value of one of :func:`process_options` of the running command."""
    return click.get_current_context().meta[PROCESS][name]


def serve(
    start: Callable[[], Any], ends: Sequence[Awaitable[object]] = (), *, end_with_parent: bool = False
) -> NoReturn:
    """Start, wait for SIGTERM or the first of the ``ends`` that ``start`` adds, stop, and end the process.

    An error of an end sets the exit status. ``end_with_parent``: as the option of that name.
    """
    from rlctl.cli.app.exit_codes import of_reason
    from rlctl.contract.errors import RlctlError
    from rlctl.runtime import event_loops, logs, server_process

    context = click.get_current_context()
    fields = {name: context.params[name] for name in ("slot", "model", "rank") if context.params.get(name)}
    fields = {"process": str(context.info_name), **fields}
    logs.configure(process_setting("log_level"), process_setting("log_format"), fields)
    server_process.collect_seldom()
    end_with_parent = end_with_parent or process_setting("end_with_parent")

    async def main() -> None:
        stop = server_process.stop_event()
        if end_with_parent:
            server_process.end_with_parent()
        starting = asyncio.ensure_future(start())
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return
        end = starting.result()
        futures = [stopping, *map(asyncio.ensure_future, ends)]
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        await end()
        for ended in done:
            await ended

    code = 0
    try:
        event_loops.run_last(main())
    except RlctlError as error:
        # A single line: launchers quote the last line of a log.
        click.echo(str(error), err=True)
        code = of_reason(error.reason)
    server_process.end(code)

"""``rlctl gateway``: an HTTP gateway in front of a fleet, in the foreground."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import click

from rlctl.cli.app.tls_options import tls_flags, tls_options
from rlctl.cli.app.types import DURATION
from rlctl.cli.commands.serve import (
    ACCESS_OPTION,
    METRICS_OPTION,
    bound_metrics,
    process_options,
    process_setting,
    serve,
)

_GENERATION = ("model", "policy", "admission", "resume", "tokenizer", "timeout_s", "max_inflight")
"""Options that are settings of generation."""


@click.command()
@click.option("--coordinator", required=True, metavar="ADDRESS", help="The fleet's coordinator.")
@click.option("--dialect", default="sglang", show_default=True, help="HTTP dialect: sglang, slime, omni, vllm.")
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="Address to bind; port 0 takes any.")
@click.option("--model", default="", help="Model of requests that name no model.  [default: the fleet's only one]")
@click.option(
    "--policy",
    default="consistent_hashing",
    show_default=True,
    type=click.Choice(["consistent_hashing", "least_connections", "round_robin"]),
    help="Rule for the choice of a request's stage.",
)
@click.option(
    "--admission", default="latest", show_default=True, help="Versions to generate at: latest, any, max_staleness=K."
)
@click.option(
    "--resume",
    default="return",
    show_default=True,
    type=click.Choice(["return", "continue"]),
    help="Samples that a pause or an abort cuts: returned to the caller, or continued.",
)
@click.option(
    "--tokenizer",
    default="",
    metavar="DIRECTORY",
    help="For chats; needed where versions come over groups.  [default: the latest version's checkpoint]",
)
@click.option(
    "--request-timeout",
    "timeout_s",
    default="10m",
    show_default=True,
    type=DURATION,
    help="Time limit of a request, with its wait.",
)
@click.option("--max-inflight", default=8192, show_default=True, type=click.IntRange(1), help="Most samples at a time.")
@click.option(
    "--middleware-path", "middleware_paths", multiple=True, metavar="MODULE:CLASS", help="Middleware.  [repeatable]"
)
@click.option(
    "--slime-router-middleware-paths",
    "slime_paths",
    multiple=True,
    metavar="MODULE.CLASS",
    help="--middleware-path under slime's name; separated by spaces.  [repeatable]",
)
@click.option(
    "--router-backend",
    default="",
    type=click.Choice(["", "sglang-router"]),
    metavar="sglang-router",
    help="Run this Rust router in front of the gateway, with the serving stages as workers.",
)
@click.option("--router-listen", default="127.0.0.1:0", show_default=True, help="Address of the router.")
@click.option("--router-pairs", is_flag=True, help="For prefill and decode engines: the router picks a pair.")
@click.option("--router-policy", default="cache_aware", show_default=True, help="Policy of the router.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1), help="Processes that share the port.")
@click.option(
    "--admin-api-key-file", default="", help="omni: file with the key that admin requests need.  [default: none]"
)
@click.option(
    "--drain",
    "drain_s",
    default="30s",
    show_default=True,
    type=DURATION,
    help="Time for running requests when the gateway ends.",
)
@click.option("--token-file", default="", help="File with the bearer token. Else RLCTL_TOKEN_FILE, RLCTL_TOKEN.")
@ACCESS_OPTION
@click.option(
    "--insecure",
    is_flag=True,
    help="Bind an address that other hosts can reach, without a token or certificates; with TLS, need no certificate "
    "of callers.",
)
@tls_options
@process_options
@METRICS_OPTION
def gateway(
    listen: str,
    middleware_paths: tuple[str, ...],
    slime_paths: tuple[str, ...],
    router_backend: str,
    router_listen: str,
    router_pairs: bool,
    router_policy: str,
    workers: int,
    admin_api_key_file: str,
    token_file: str,
    metrics: str,
    **option_values: Any,
) -> None:
    """Run an HTTP gateway, with one dialect, in front of a fleet."""
    from rlctl.runtime.server_process import announce

    paths = (*middleware_paths, *(path for option_value in slime_paths for path in option_value.split()))
    settings = {name: option_values.pop(name) for name in _GENERATION}

    if router_backend and workers > 1:
        raise click.UsageError("--router-backend is for one worker")
    if workers > 1 and metrics.endswith(":0"):
        raise click.UsageError("--metrics needs a port where there are several workers: each takes the next one")

    files = tls_flags()
    scheme = "https" if any(files.values()) else "http"

    def announce_address(address: str, **facts: str) -> None:
        announce("gateway", address=f"{scheme}://{address}", dialect=option_values["dialect"], pid=os.getpid(), **facts)

    def run(listen: str, on_ready: Callable[..., None], *, forked: bool = False, number: int = 0) -> NoReturn:
        from rlctl.gateway.backend.service import Settings
        from rlctl.gateway.router.process import SglangRouter
        from rlctl.gateway.server import GatewayConfig, GatewayServer
        from rlctl.runtime.addresses import refuse_insecure, split
        from rlctl.transport.auth import load_token
        from rlctl.transport.tls.credentials import load_tls

        key = load_token(file=admin_api_key_file) if admin_api_key_file else ""
        token, router = load_token(file=token_file), None
        if router_backend:
            # The router checks the fleet's own token only.
            refuse_insecure(router_listen, token=token, insecure=option_values["insecure"])
            host, port = split(router_listen, "router_listen")
            router = SglangRouter(policy=router_policy, host=host, port=port, pairs=router_pairs, token=token)

        config = GatewayConfig(
            listen=listen,
            token=token,
            middleware_paths=paths,
            generation=Settings(**settings, admin_api_key=key or ""),
            share_port=workers > 1,
            warm=True,
            router=router,
            metrics=_port_of(metrics, number),
            tls=load_tls({}, **files),
            **option_values,
        )

        async def start() -> Callable[[], Any]:
            server = GatewayServer(config)
            try:
                await server.start()
            except BaseException:
                await server.stop()
                raise
            facts = {"router": router.url} if router else {}
            on_ready(server.address, **facts, **bound_metrics(server.metrics_address))
            return server.stop

        serve(start, end_with_parent=forked)

    if workers == 1:
        run(listen, announce_address)
    _fork(workers, listen, run, announce_address, option_values["drain_s"])


def _fork(
    workers: int, listen: str, run: Callable[..., NoReturn], on_ready: Callable[[str], None], drain_s: float
) -> NoReturn:
    """Start several processes on a shared port. gRPC is not loaded before the fork."""
    from rlctl.contract.os_errors import unbound
    from rlctl.gateway.prefork import Workers, hold
    from rlctl.runtime import server_process
    from rlctl.runtime.addresses import join, split

    host, port = split(listen, "listen")
    try:
        reserved_socket, bound = hold(host, port)
    except OSError as error:
        raise unbound(listen, error) from None
    address = join(host, bound)
    ends_s = 2 * drain_s + server_process.ENDS_S  # requests, then admin calls, have the time of the drain
    parent = Workers(
        workers, lambda ready, number: run(address, lambda *_, **__: ready(), forked=True, number=number), ends_s
    )
    code = parent.run(lambda: on_ready(address), end_with_parent=process_setting("end_with_parent"))
    reserved_socket.close()
    server_process.end(code)


def _port_of(metrics: str, number: int) -> str:
    """Return the metrics address of a gateway process: the processes have consecutive ports."""
    from rlctl.runtime.addresses import join, split

    if not number or not metrics:
        return metrics
    host, port = split(metrics, "metrics")
    return join(host, port + number)

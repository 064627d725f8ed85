"""``rlctl gateway``: HTTP dialects in front of a fleet, in the foreground."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from rlctl.cli.serve import serve
from rlctl.cli.types import DURATION


@click.command()
@click.option("--coordinator", required=True, metavar="ADDRESS", help="The fleet's coordinator.")
@click.option("--dialect", default="sglang", show_default=True, help="What it speaks: sglang, slime, omni, vllm.")
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="Address to bind; port 0 takes any.")
@click.option("--model", default="", help="Model of requests that name none.  [default: the fleet's only one]")
@click.option(
    "--policy",
    default="consistent_hashing",
    show_default=True,
    type=click.Choice(["consistent_hashing", "least_connections", "round_robin"]),
    help="Which of the stages that may serve a request does.",
)
@click.option(
    "--admission", default="latest", show_default=True, help="Versions to generate at: latest, any, max_staleness=K."
)
@click.option(
    "--resume",
    default="return",
    show_default=True,
    type=click.Choice(["return", "continue"]),
    help="Samples that a pause or an abort cuts: given to the caller, or gone on with.",
)
@click.option("--tokenizer", default="", metavar="DIRECTORY", help="For chats.  [default: the models' checkpoints]")
@click.option(
    "--request-timeout", default="10m", show_default=True, type=DURATION, help="Most time of one request, waiting too."
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
    help="The same under slime's name; several with spaces between them.  [repeatable]",
)
@click.option("--drain", default="30s", show_default=True, type=DURATION, help="Time for what runs when it ends.")
@click.option("--token-file", default="", help="File with the bearer token. Else RLCTL_TOKEN_FILE, RLCTL_TOKEN.")
@click.option("--insecure", is_flag=True, help="Bind where other hosts can reach it though there is no token.")
@click.option("--log-level", default="INFO", show_default=True, help="Level of the log on stderr.")
@click.option("--end-with-parent", is_flag=True, help="End when standard input ends.")
def gateway(
    coordinator: str,
    dialect: str,
    listen: str,
    model: str,
    policy: str,
    admission: str,
    resume: Any,
    tokenizer: str,
    request_timeout: float,
    max_inflight: int,
    middleware_paths: tuple[str, ...],
    slime_paths: tuple[str, ...],
    drain: float,
    token_file: str,
    insecure: bool,
    log_level: str,
    end_with_parent: bool,
) -> None:
    """Run HTTP dialects in front of a fleet."""
    from rlctl.gateway.generation.service import Settings
    from rlctl.gateway.server import GatewayConfig, GatewayServer
    from rlctl.process import announce
    from rlctl.transport.auth import load_token

    config = GatewayConfig(
        coordinator=coordinator,
        dialect=dialect,
        listen=listen,
        token=load_token(file=token_file),
        insecure=insecure,
        middleware_paths=(*middleware_paths, *(path for given in slime_paths for path in given.split())),
        generation=Settings(
            model=model,
            policy=policy,
            admission=admission,
            resume=resume,
            timeout_s=request_timeout,
            max_inflight=max_inflight,
            tokenizer=tokenizer,
        ),
        drain_s=drain,
    )

    async def start() -> Callable[[], Any]:
        server = GatewayServer(config)
        try:
            await server.start()
        except BaseException:
            await server.stop()
            raise
        announce("gateway", address=f"http://{server.address}", dialect=dialect, pid=os.getpid())
        return server.stop

    serve(start, log_level, end_with_parent)

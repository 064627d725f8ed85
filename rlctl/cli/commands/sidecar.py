"""``rlctl sidecar vllm``: SGLang's HTTP interface in front of a vLLM server, in the foreground."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import click

from rlctl.cli.app.types import DURATION, pairs
from rlctl.cli.commands.serve import DEVICE_OPTION, process_options, serve


@click.command("vllm")
@click.option("--upstream", default="", metavar="URL", help="Running vLLM server: http://HOST:PORT or unix:PATH.")
@click.option("--launch", default="", metavar="MODEL", help="Directory of a checkpoint: launch a vLLM server with it.")
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="Address to bind; port 0 takes any.")
@click.option(
    "--router", "routers", multiple=True, metavar="URL", help="slime-style router to register with.  [repeatable]"
)
@click.option("--advertise", default="", metavar="HOST", help="Host name under which routers reach the sidecar.")
@click.option(
    "--coordinator",
    default="",
    metavar="ADDRESS",
    help="Coordinator that drives the vLLM; the sidecar then refuses admin verbs.",
)
@click.option(
    "--route",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "tokens", "completions"]),
    help="vLLM's /inference/v1/generate or /v1/completions.",
)
@click.option("--api-key-file", default="", help="File with the running vLLM's key for requests.")
@click.option(
    "--vllm-arg", "arguments", multiple=True, metavar="NAME=VALUE", help="Argument of the launched vLLM.  [repeatable]"
)
@click.option(
    "--tp-size",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Tensor-parallel ranks of the launched vLLM.",
)
@DEVICE_OPTION
@click.option("--python", default="", help="Interpreter that vLLM is installed for.  [default: RLCTL_VLLM_VENV's]")
@click.option(
    "--start-timeout", "start_s", default="15m", show_default=True, type=DURATION, help="Time limit of the launch."
)
@click.option(
    "--token-file", default="", help="File with the token of admin verbs. Else RLCTL_TOKEN_FILE, RLCTL_TOKEN."
)
@click.option("--insecure", is_flag=True, help="Bind an address that other hosts can reach, without a token.")
@process_options
def sidecar_vllm(
    listen: str, arguments: tuple[str, ...], device: str, token_file: str, insecure: bool, **option_values: Any
) -> None:
    """Run SGLang's HTTP interface in front of a vLLM."""
    from rlctl_vllm.sidecar.server import SidecarConfig, SidecarServer

    from rlctl.launch.local import gpus
    from rlctl.runtime.addresses import refuse_insecure, split
    from rlctl.runtime.server_process import announce
    from rlctl.transport.auth import load_token

    token = load_token(file=token_file)
    refuse_insecure(listen, token=token, insecure=insecure)
    host, port = split(listen, "listen")
    device = gpus.of_process(device, "vllm", 0)
    config = SidecarConfig(
        host=host, port=port, arguments=pairs(arguments), device=device, token=token, **option_values
    )
    ends: list[Awaitable[object]] = []

    async def start() -> Callable[[], Any]:
        server = SidecarServer(config)
        try:
            await server.start()
        except BaseException:
            await server.stop()
            raise
        announce("sidecar", address=server.url, pid=os.getpid())
        ends.append(server.failed)
        return server.stop

    serve(start, ends)

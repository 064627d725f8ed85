"""The file and the flags of ``up``, ``plan`` and ``validate``: rlctl's flags, and slime's in slime's syntax."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from rlctl.cli.app.global_options import Command
from rlctl.cli.app.types import NUMBERS, pairs
from rlctl.topology.flags import ADDRESSES, Flags
from rlctl.topology.schema import DEVICES, LAUNCHERS, MOST, POLICIES

_SGLANG = "rlctl.sglang"
_ADDRESSES = "rlctl.runtime.addresses"


class TopologyCommand(Command):
    """A command that accepts ``--sglang-ANYTHING [VALUE...]`` and flags with several values, as slime does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words that click cannot: flags with SGLang's names, and lists of words."""
        click_arguments: list[str] = []
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
                words = [value] if equals else _words(rest)
                if not words:
                    raise click.UsageError(f"{name} needs HOST:PORT")
                addresses += words
            elif name.startswith("--sglang-"):
                words = [value] if equals else _words(rest)
                if not equals and words and words[-1].endswith((".yaml", ".yml")):
                    files.append(words.pop())  # the file, after a switch
                sglang[name.removeprefix("--sglang-").replace("-", "_")] = _joined(words)
            else:
                click_arguments.append(word)
        ctx.meta[_SGLANG] = sglang
        ctx.meta[_ADDRESSES] = addresses
        return super().parse_args(ctx, [*click_arguments, *files])


def _words(rest: list[str]) -> list[str]:
    """Remove and return the words up to the next flag. A negative number is no flag."""
    words = []
    while rest and not (rest[0].startswith("-") and not rest[0][1:2].isdigit()):
        words.append(rest.pop(0))
    return words


def _value_of(flag: str, rest: list[str]) -> str:
    if not rest:
        raise click.UsageError(f"{flag} needs a file")
    return rest.pop(0)


def _joined(words: Sequence[str]) -> str:
    """Return the value of a flag: no word is a switch that is on; several words are a list."""
    return "true" if not words else words[0] if len(words) == 1 else json.dumps(words)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the file and the flags to a command, as ``file`` and the parameters of :func:`flags`."""
    declared = (
        click.argument("file", required=False, type=click.Path(path_type=Path), metavar="[FILE]"),
        click.option("--hf-checkpoint", metavar="DIR", help="Checkpoint of models that name no checkpoint."),
        click.option(
            "--rollout-num-gpus", "num_gpus", type=click.IntRange(1, MOST), help="GPUs of all groups (ranks, on a CPU)."
        ),
        click.option(
            "--rollout-num-gpus-per-engine", "num_gpus_per_engine", type=click.IntRange(1, MOST),
            help="GPUs of each engine, if the file does not set them.  [default: 1]",
        ),
        click.option("--num-gpus-per-node", type=click.IntRange(1, MOST), help="GPUs of a node.  [default: 8]"),
        click.option("--rollout-external", "external", is_flag=True, help="Attach to engines that run already."),
        click.option(
            ADDRESSES, "external_addresses", multiple=True, metavar="HOST:PORT...",
            help="Addresses of the external engines.  [repeatable]",
        ),
        click.option(
            "--prefill-num-servers", type=click.IntRange(1, MOST),
            help="Without a file: this many prefill engines; the rest decode.",
        ),
        click.option("--router-policy", type=click.Choice(POLICIES), help="How gateways pick an engine."),
        click.option(
            "--gateways", metavar="HOST", help="Give every model that names no gateway an HTTP gateway on this host.",
        ),
        click.option(
            "--sglang-*", "sglang_", metavar="[VALUE]", expose_value=False, multiple=True,
            help="Argument of SGLang by its name, for every SGLang engine; the file overrides it.  [repeatable]",
        ),
        click.option(
            "--sglang-config", "config_", expose_value=False, metavar="FILE", help="The file, under slime's name."
        ),
        click.option("--engine", help="Engine plug-in, if the file does not set it.  [default: torch]"),
        click.option("--model", help="Without a file: the model that the engines serve.  [default: actor]"),
        click.option(
            "--device", type=click.Choice(DEVICES),
            help="Device of the ranks, if the file does not set it; auto: GPUs, if any.  [default: auto]",
        ),
        click.option("--listen", metavar="ADDRESS", help="Where the coordinator listens.  [default: 127.0.0.1:5080]"),
        click.option("--name", help="Name of the fleet on this machine.  [default: default]"),
        click.option("--launcher", type=click.Choice(LAUNCHERS), help="Launcher of the processes.  [default: local]"),
        click.option("--address", metavar="HOST:PORT", help="The Ray cluster.  [default: RAY_ADDRESS, or this host's]"),
        click.option(
            "--placement-group", metavar="NAME", help="Name or id of a placement group for the engines.",
        ),
        click.option(
            "--bundles", type=NUMBERS, default=(), metavar="0,1,4-7",
            help="Bundles of the placement group for engines, in this order.  [default: all, by node]",
        ),
        click.option(
            "--bundle-share", type=click.FloatRange(0.01, 1), help="Share of a bundle for a rank.  [default: 1]",
        ),
        click.option(
            "--option", "options", multiple=True, metavar="NAME=VALUE",
            help="Setting of every engine; the file overrides it.  [repeatable]",
        ),
        click.option(
            "--insecure",
            is_flag=True,
            help="Bind an address that other hosts can reach, without a token or certificates.",
        ),
        click.option(
            "--tls", metavar="DIR", help="Directory of `rlctl certs init`; every process gets its own certificate.",
        ),
        click.option("--web", metavar="HOST:PORT", help="Where the coordinator serves its page.  [default: nowhere]"),
    )  # fmt: skip
    for option in reversed(declared):
        command = option(command)
    return command


def flags(option_values: dict[str, Any]) -> Flags:
    ctx = click.get_current_context()
    sglang: dict[str, str] = ctx.meta[_SGLANG]
    return Flags(
        **{
            **option_values,
            "options": pairs(option_values["options"]),
            "sglang": sglang,
            "external_addresses": (*ctx.meta[_ADDRESSES], *option_values["external_addresses"]),
        }
    )

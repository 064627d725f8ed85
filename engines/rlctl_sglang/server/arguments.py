"""Arguments of the installed SGLang, read from the source text. Nothing is imported or run.

Arguments are fields annotated ``A[type, ...]`` in ``srt/arg_groups/fields`` (SGLang 0.5.20 and later), and
``add_argument`` calls in ``srt/server_args.py`` (all arguments in older versions).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlctl_servers.server import argparse_source
from rlctl_servers.server.update_blockers import keepers_in

from rlctl.contract.errors import RlctlError
from rlctl.engine import KnownOptions
from rlctl_sglang.options import NODES, OURS, TAKEN, Options, interpreter
from rlctl_sglang.server.update_blockers import KEEPERS

_INSTEAD = {
    **dict.fromkeys(("tp_size", "tp", "tensor_parallel_size"), "write num_gpus_per_engine"),
    **dict.fromkeys(("host", "port"), "servers bind a free port on loopback, behind their stage server"),
    "model_path": "write the model's model_path",
    "device": "write the group's device",
    "dtype": "write the model's dtype",
    **dict.fromkeys(("api_key", "admin_api_key"), "each server gets keys of its own"),
}


def known_options(settings: Mapping[str, str]) -> KnownOptions | None:
    """Return the settings of the SGLang of ``settings["python"]``, else of the environment; None without an SGLang."""
    try:
        python = interpreter(Options(python=settings.get("python", "")))
    except RlctlError:
        return None
    options = _of_installation(python)
    frozen = {keeper.name: keeper.reason for keeper in keepers_in(KEEPERS, settings)}
    return replace(options, frozen=frozen) if options else None


@functools.cache
def _of_installation(python: str) -> KnownOptions | None:
    for source in argparse_source.installed(python, "sglang/srt"):
        names: set[str] = set()
        renamed: dict[str, str] = {}
        for file in (source / "server_args.py", *sorted(source.glob("arg_groups/fields/*.py"))):
            tree = argparse_source.parsed(file)
            if tree is None:
                continue
            names |= {name for call in argparse_source.calls(tree) for name in argparse_source.added(call)}
            for field, argument_names in _declared(tree):
                names |= set(argument_names)
                if field not in argument_names:
                    renamed[field] = f"SGLang's argument is called {argument_names[0]}"
        if names:
            reserved = {name: _INSTEAD.get(name, "it must not be given") for name in TAKEN}
            reserved |= dict.fromkeys(
                NODES, "an engine larger than num_gpus_per_node has a process on each of its nodes"
            )
            names = (names - reserved.keys()) | set(OURS)
            origin = f"SGLang {argparse_source.version(source.parent.parent, 'sglang')}".strip()
            return KnownOptions(frozenset(names), {**renamed, **reserved}, origin)
    return None


def _declared(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Yield (field, names of its argument) for fields that are arguments."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        hint = node.annotation
        if not (isinstance(hint, ast.Subscript) and isinstance(hint.value, ast.Name) and hint.value.id == "A"):
            continue
        settings = {
            keyword.arg: keyword.value
            for call in ast.walk(hint)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Arg"
            for keyword in call.keywords
        }
        if "no_cli" in settings:
            continue
        argument_names = [
            *argparse_source.names(settings.get("cli_name")),
            *argparse_source.names(settings.get("aliases")),
        ]
        field = node.target.id
        yield field, argument_names if "cli_name" in settings else [field, *argument_names]

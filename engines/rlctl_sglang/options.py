"""The plug-in's settings, read from ``EngineConfig.options`` once."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlctl.errors import Reason

VENV = "RLCTL_SGLANG_VENV"
"""Environment variable that says where SGLang's environment is."""

OURS = ("url", "api_key_file", "admin_key_file", "python", "allowed_roots", "start_s")
"""Settings of the plug-in itself."""

TAKEN = (
    *("model_path", "host", "port", "api_key", "admin_api_key", "config", "weight_version", "skip_server_warmup"),
    *("tp_size", "tp", "tensor_parallel_size", "device", "dtype", "incremental_streaming_output", "base_gpu_id"),
)
"""Arguments of SGLang that rlctl sets itself."""

NODES = ("nnodes", "node_rank", "dist_init_addr")
"""Arguments of a server over several nodes, which is not launched."""


@dataclass(frozen=True)
class Options:
    """Settings of one engine.

    Attributes:
        url: a running server to attach to; empty: one is launched.
        api_key: key of an attached server for requests.
        admin_key: its key for admin calls; without one, others can drive the server too.
        python: the interpreter that SGLang is installed for.
        allowed_roots: directories below which checkpoints may be read; empty: the one that the first lies in.
        start_s: longest time that a launched server may take to be ready, seconds.
        arguments: further arguments of SGLang by name ("mem_fraction_static"); "true" stands for a flag.
    """

    url: str = ""
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    python: str = ""
    allowed_roots: tuple[str, ...] = ()
    start_s: float = 900.0
    arguments: Mapping[str, str] = field(default_factory=dict)


def parse_options(given: Mapping[str, str]) -> Options:
    """The settings. Raises FIELD_INVALID, FIELD_CONFLICT or UNSUPPORTED naming ``options.NAME``."""
    arguments = {name: value for name, value in given.items() if name not in OURS}
    for name in arguments:
        if name in TAKEN:
            raise Reason.FIELD_CONFLICT.error(f"rlctl sets SGLang's {name} itself", field=f"options.{name}")
        if name in NODES:
            raise Reason.UNSUPPORTED.error(
                "a server over several nodes is not launched: each node needs a process of its own",
                field=f"options.{name}",
                next_step="Start SGLang on every node, and attach to the first one with --option url=.",
            )
        if not name.replace("_", "").isalnum() or not name.islower():
            raise Reason.FIELD_INVALID.error(f"{name!r} is no argument's name", field=f"options.{name}")
    url = given.get("url", "").rstrip("/")
    if url and not url.startswith(("http://", "https://")):
        raise Reason.FIELD_INVALID.error(f"{url!r} is no http address", field="options.url")
    if url and (extra := [*arguments, *({"python", "start_s"} & given.keys())]):
        raise Reason.FIELD_CONFLICT.error(
            f"a server that runs already takes no settings: {', '.join(sorted(extra))}", field=f"options.{extra[0]}"
        )
    if not url and (keys := {"api_key_file", "admin_key_file"} & given.keys()):
        raise Reason.FIELD_CONFLICT.error(
            "a launched server gets keys that the stage makes", field=f"options.{sorted(keys)[0]}"
        )
    api_key = _key(given, "api_key_file")
    return Options(
        url=url,
        api_key=api_key,
        admin_key=_key(given, "admin_key_file") or api_key,
        python=given.get("python", ""),
        allowed_roots=_directories(given.get("allowed_roots", "")),
        start_s=_seconds(given.get("start_s", "900")),
        arguments=arguments,
    )


def interpreter(options: Options) -> str:
    """The Python that runs SGLang. Raises FIELD_INVALID, saying how to install it, when it is not there."""
    if options.python:
        found = Path(options.python)
    else:
        found = Path(os.environ.get(VENV) or Path(sys.prefix).parent / ".venv-sglang") / "bin" / "python"
    if not os.access(found, os.X_OK):
        raise Reason.FIELD_INVALID.error(
            f"SGLang's environment is not there: {found} cannot be run",
            field="options.python",
            next_step=f"Run `tools/engines install sglang`, or set {VENV} or --option python=PATH.",
        )
    return str(found)


def _key(given: Mapping[str, str], name: str) -> str:
    path = given.get(name, "")
    if not path:
        return ""
    try:
        key = Path(path).read_text().strip()
    except OSError as error:
        raise Reason.FIELD_INVALID.error(f"{path} cannot be read: {error.strerror}", field=f"options.{name}") from None
    if not key:
        raise Reason.FIELD_INVALID.error(f"{path} is empty", field=f"options.{name}")
    return key


def _directories(text: str) -> tuple[str, ...]:
    directories = tuple(filter(None, text.split(os.pathsep)))
    for directory in directories:
        if not os.path.isabs(directory):
            raise Reason.FIELD_INVALID.error(f"{directory!r} is no absolute path", field="options.allowed_roots")
    return directories


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise Reason.FIELD_INVALID.error(f"{text!r} is no time in seconds above zero", field="options.start_s")
    return value

"""The plug-in's settings, read once from ``EngineConfig.options``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlctl_servers import options
from rlctl_servers.options import address, check_arguments, key

from rlctl.contract.errors import Reason

VENV = "RLCTL_SGLANG_VENV"
"""Environment variable with the path of SGLang's environment."""

OURS = (*options.OURS, "admin_key_file")
"""Settings of the plug-in itself."""

TAKEN = (
    *("model_path", "host", "port", "api_key", "admin_api_key", "config", "weight_version", "skip_server_warmup"),
    *("tp_size", "tp", "tensor_parallel_size", "device", "dtype", "incremental_streaming_output", "base_gpu_id"),
)
"""Arguments of SGLang that rlctl sets itself."""

GRPC = ("grpc_port", "grpc_mode", "smg_grpc_mode")
"""Arguments that make SGLang serve gRPC."""

NODES = ("nnodes", "node_rank", "dist_init_addr")
"""Arguments of a server over several nodes, set by each node's process."""


@dataclass(frozen=True)
class Options(options.Options):
    """Settings of one engine.

    Attributes:
        admin_key: key of an attached server for admin calls, by default ``api_key``; without a key, other clients can
            drive the server too.
    """

    admin_key: str = field(default="", repr=False)


def parse_options(settings: Mapping[str, str]) -> Options:
    """Parse the settings. Raises FIELD_INVALID, FIELD_CONFLICT or UNSUPPORTED naming ``options.NAME``."""
    arguments = {name: value for name, value in settings.items() if name not in OURS}
    for name in arguments:
        if name in NODES:
            raise Reason.FIELD_INVALID.error(
                "each node has a process of its own, which sets its place",
                field=f"options.{name}",
                next_step="`rlctl worker --engine sglang --rank NUMBER` on every further node; its address with "
                "--follower to `rlctl stage` on the first one.",
            )
    check_arguments("SGLang", arguments, TAKEN)
    refuse_workers(arguments)
    for name in GRPC:
        if name in arguments:
            raise Reason.UNSUPPORTED.error(
                "SGLang's own gRPC needs no key, so any caller could pause it and write its weights",
                field=f"options.{name}",
                next_step="Leave it out.",
            )
    if not address(settings, arguments) and (keys := {"api_key_file", "admin_key_file"} & settings.keys()):
        raise Reason.FIELD_CONFLICT.error(
            "a launched server gets keys that the stage makes", field=f"options.{sorted(keys)[0]}"
        )
    common = options.parse(settings, arguments)
    return Options(**vars(common), admin_key=key(settings, "admin_key_file") or common.api_key)


def refuse_workers(arguments: Mapping[str, Any]) -> None:
    """Raise UNSUPPORTED for a server of several HTTP workers.

    A pause waits for the requests of a single worker. Weights would be written under the requests of the other workers
    (``multi_tokenizer_mixin``, 0.5.23).
    """
    number = str(arguments.get("tokenizer_worker_num") or 1)
    if number != "1":
        raise Reason.UNSUPPORTED.error(
            f"a pause of SGLang with {number} tokenizer workers ends the requests of one worker only",
            field="options.tokenizer_worker_num",
            next_step="Leave it out.",
        )


def interpreter(settings: Options) -> str:
    """Return SGLang's Python interpreter. Raises FIELD_INVALID with the install command if none is found."""
    return options.interpreter("SGLang", settings.python, VENV)

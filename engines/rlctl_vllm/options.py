"""Settings of the vLLM plug-in, from ``EngineConfig.options``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlctl_servers import options
from rlctl_servers.options import address, check_arguments, data_routes, directories, key, start_seconds

from rlctl.contract.errors import Reason
from rlctl.engine import HttpRoute

PRODUCT = "vLLM"
VENV = "RLCTL_VLLM_VENV"
"""Environment variable with the path of vLLM's environment."""

OURS = ("url", "api_key_file", "python", "allowed_roots", "start_s", "data_routes")
TAKEN = (
    *("model", "served_model_name", "host", "port", "uds", "api_key", "config", "tensor_parallel_size", "dtype"),
    *("worker_extension_cls", "enable_scale_out", "return_tokens_as_token_ids", "enable_prompt_tokens_details"),
    *("generation_config", "data_parallel_size", "pipeline_parallel_size", "headless", "grpc_port"),
)
"""Arguments of vLLM that rlctl sets itself, or that make more than one server of tensor-parallel ranks."""


@dataclass(frozen=True)
class Options:
    """Settings of an engine.

    Attributes:
        url: running server to attach to; empty: a server is launched.
        api_key: key of an attached server for requests. vLLM's admin calls need no key.
        python: interpreter of vLLM's installation.
        allowed_roots: directories below which checkpoints may be read; empty: the directory that contains the first
            checkpoint.
        start_s: longest time until a launched server is ready, in seconds.
        data_routes: further routes of the data port.
        arguments: further arguments of vLLM by name ("max_model_len"); "true" stands for a flag.
    """

    url: str = ""
    api_key: str = field(default="", repr=False)
    python: str = ""
    allowed_roots: tuple[str, ...] = ()
    start_s: float = 900.0
    data_routes: tuple[HttpRoute, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)


def parse_options(given: Mapping[str, str]) -> Options:
    """Return the settings. Raises FIELD_INVALID or FIELD_CONFLICT, naming ``options.NAME``."""
    arguments = {name: value for name, value in given.items() if name not in OURS}
    check_arguments(PRODUCT, arguments, TAKEN)
    url = address(given, arguments)
    if not url and "api_key_file" in given:
        raise Reason.FIELD_CONFLICT.error("a launched server needs no key", field="options.api_key_file")
    return Options(
        url=url,
        api_key=key(given, "api_key_file"),
        python=given.get("python", ""),
        allowed_roots=directories(given.get("allowed_roots", "")),
        start_s=start_seconds(given.get("start_s", "900")),
        data_routes=data_routes(given.get("data_routes", "")),
        arguments=arguments,
    )


def interpreter(settings: Options) -> str:
    """Return the Python that runs vLLM. Raises FIELD_INVALID, with how to install vLLM, if missing."""
    return options.interpreter(PRODUCT, settings.python, VENV)

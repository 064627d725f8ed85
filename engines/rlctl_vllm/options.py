"""Settings of the vLLM plug-in, from ``EngineConfig.options``."""

from __future__ import annotations

from collections.abc import Mapping

from rlctl_servers import options
from rlctl_servers.options import OURS, Options, address, check_arguments

from rlctl.contract.errors import Reason

PRODUCT = "vLLM"
VENV = "RLCTL_VLLM_VENV"
"""Environment variable with the path of vLLM's environment."""

TAKEN = (
    *("model", "served_model_name", "host", "port", "uds", "api_key", "config", "tensor_parallel_size", "dtype"),
    *("worker_extension_cls", "enable_scale_out", "return_tokens_as_token_ids", "enable_prompt_tokens_details"),
    *("generation_config", "data_parallel_size", "pipeline_parallel_size", "headless", "grpc_port"),
)
"""Arguments of vLLM that rlctl sets itself, or that make more than one server of tensor-parallel ranks."""


def parse_options(settings: Mapping[str, str]) -> Options:
    """Return the settings. Raises FIELD_INVALID or FIELD_CONFLICT, naming ``options.NAME``."""
    arguments = {name: value for name, value in settings.items() if name not in OURS}
    check_arguments(PRODUCT, arguments, TAKEN)
    if not address(settings, arguments) and "api_key_file" in settings:
        raise Reason.FIELD_CONFLICT.error("a launched server needs no key", field="options.api_key_file")
    return options.parse(settings, arguments)  # vLLM's admin calls need no key


def interpreter(settings: Options) -> str:
    """Return the Python that runs vLLM. Raises FIELD_INVALID, with how to install vLLM, if missing."""
    return options.interpreter(PRODUCT, settings.python, VENV)

"""A vLLM server as a child process, behind a Unix socket that only this user can reach.

No key protects vLLM's admin calls, so the directory of the socket is the fence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rlctl_servers.options import Options
from rlctl_servers.server import temp_dirs
from rlctl_servers.server.http import Http
from rlctl_servers.server.packages import link_packages
from rlctl_servers.server.process import ServerProcess, cores_of, flags

from rlctl.contract.errors import RlctlError
from rlctl.engine import EngineConfig
from rlctl_vllm.options import PRODUCT, interpreter
from rlctl_vllm.updates.worker_calls import EXTENSION

PROBE_S = 5.0

KV_CACHE_GIB = "1"
"""GiB of the KV cache on a CPU, where vLLM would take half of the memory."""


class Scratch(temp_dirs.Scratch):
    """Directory of a server: sockets, links to rlctl's packages, copies of adapters."""

    prefix: ClassVar[str] = "rlctl-vllm-"


class VLLMProcess(ServerProcess):
    """A launched vLLM server.

    Attributes:
        scratch: directory of temporary files.
    """

    def __init__(self, config: EngineConfig, options: Options) -> None:
        """Prepare the command. Raises FIELD_INVALID if vLLM is not installed."""
        python = interpreter(options)
        self._config = config
        self._options = options
        self.scratch = Scratch()
        self._socket = self.scratch.path / "http"
        super().__init__(Http(PRODUCT, "http://vllm", socket=str(self._socket)), python, options.start_s)

    def command(self) -> Sequence[str]:
        """Return the command of vLLM's module. The script needs a distribution of vLLM's name; a CPU build has a
        different name.
        """
        return [
            "-m",
            "vllm.entrypoints.openai.api_server",
            *flags(_arguments(self._config, self._options, self._socket)),
        ]

    def environment(self) -> Mapping[str, str]:
        """Return vLLM's variables. Of this Python environment vLLM sees the extension's packages only."""
        packages = link_packages(self.scratch.path, Path(__file__).parents[1])
        return {**_environment(self._config, self._options, packages), "TMPDIR": str(self.scratch.path)}

    def inherited(self) -> Sequence[int]:
        """Return the lock that shows that the process lives."""
        return [self.scratch.lock]

    async def ready(self) -> bool:
        """Whether the server is ready. No other server can be behind its socket."""
        try:
            return (await self.http.call("/health", timeout_s=PROBE_S)).status == 200
        except (TimeoutError, RlctlError):
            return False

    def let_go(self) -> None:
        self.scratch.remove()


def _arguments(config: EngineConfig, options: Options, socket: Path) -> dict[str, str]:
    arguments = {
        "model": config.model_path,
        "served_model_name": "rlctl",
        "uds": str(socket),
        "tensor_parallel_size": str(config.tp_size),
        "worker_extension_cls": EXTENSION,
        "enable_scale_out": "true",  # token ids in and out, with the weight version of every token
        "return_tokens_as_token_ids": "true",
        "enable_prompt_tokens_details": "true",
        "generation_config": "vllm",  # without the checkpoint's sampling defaults
        "logprobs_mode": "processed_logprobs",  # after temperature
        "max_logprobs": "101",
        "disable_uvicorn_access_log": "true",
    }
    if config.device.partition(":")[0] == "cpu":
        arguments |= {"enforce_eager": "true", "block_size": "32", "max_num_seqs": "64"}
    if config.dtype != "auto":
        arguments["dtype"] = config.dtype.removeprefix("torch.")
    return arguments | dict(options.arguments)


def _environment(config: EngineConfig, options: Options, packages: Path) -> dict[str, str]:
    device, _, number = config.device.partition(":")
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",  # admin calls
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH", "")])),
    }
    if options.arguments.get("enable_lora") == "true":
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if device == "cpu":
        room = os.environ.get("VLLM_CPU_KVCACHE_SPACE", KV_CACHE_GIB)
        variables |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": room}
        if config.tp_size > 1:
            # By default vLLM gives every rank a NUMA node, and refuses to start with too few nodes.
            variables["VLLM_CPU_OMP_THREADS_BIND"] = cores_of(config.tp_size)
    elif number and "CUDA_VISIBLE_DEVICES" not in os.environ:
        first = int(number)
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(first + rank) for rank in range(config.tp_size))
    return variables

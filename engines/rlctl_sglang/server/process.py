"""One SGLang server as a child process, with an address and keys of its own."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlctl_servers.server import argparse_source
from rlctl_servers.server.http import Http
from rlctl_servers.server.packages import link_packages
from rlctl_servers.server.process import ServerProcess, cores_of, flags

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import EngineConfig
from rlctl.weights.group.network_interfaces import interface_of
from rlctl_sglang.options import Options, interpreter
from rlctl_sglang.ranks.channel import ENTRY_POINT
from rlctl_sglang.server.leftovers import Scratch

PRODUCT = "SGLang"
PROBE_S = 5.0

_STAND_INS = Path(__file__).parents[1] / "cpu"

_PAIRED_ON_CPU = {
    # With overlap the prefill server waits for a CUDA event.
    "prefill": {"disaggregation_transfer_backend": "nixl", "disable_overlap_schedule": "true"},
    # By default the decode server keeps retracted entries in memory that is registered with CUDA.
    "decode": {
        "disaggregation_transfer_backend": "nixl",
        "disaggregation_decode_retraction_backup": "cpu_tensor",
    },
}
"""Arguments of a pair's server without a GPU, by its part."""


@dataclass(frozen=True)
class Meeting:
    """Meeting point of a server over several nodes.

    Attributes:
        nodes: number of nodes.
        node: number of this node.
        address: HOST:PORT on the first node, where the ranks of all nodes meet.
        host: address of this node for the other nodes.
    """

    nodes: int
    node: int
    address: str
    host: str


class SGLangProcess(ServerProcess):
    """A launched SGLang server, or its part on one node.

    Attributes:
        scratch: temporary files and segments, after the launch.
    """

    scratch: Scratch

    def __init__(self, config: EngineConfig, options: Options, meeting: Meeting | None = None) -> None:
        """``meeting``: None for a single node. Raises FIELD_INVALID without SGLang, UNSUPPORTED for a pair on a CPU
        without NIXL.
        """
        python = interpreter(options)
        _refuse_without_nixl(config, options, python)
        self._config = config
        self._options = options
        self._meeting = meeting
        self._port = hold_port()
        api_key, admin_key = secrets.token_hex(32), secrets.token_hex(32)
        self._keys = {"api-key": api_key, "admin-api-key": admin_key}
        self._keys_file: Path | None = None
        http = Http(PRODUCT, f"http://127.0.0.1:{self._port.getsockname()[1]}", api_key, admin_key)
        super().__init__(http, python, options.start_s)

    def command(self) -> Sequence[str]:
        """Return SGLang's command. The keys are in a file, since every user of the host can read a command line."""
        self.scratch = Scratch()
        self._keys_file = self.scratch.path / "keys.yaml"
        self._keys_file.write_text(json.dumps(self._keys))
        arguments = [*_arguments(self._config, self._options, self._meeting), "--config", str(self._keys_file)]
        arguments += ["--host", "127.0.0.1", "--port", str(self._port.getsockname()[1])]
        return ["-m", "sglang.launch_server", *arguments]

    def redacted(self, line: str) -> str:
        """Return a line without keys: SGLang writes all of its arguments into its log."""
        for name, key in self._keys.items():
            line = line.replace(key, f"<{name}>")
        return line

    def environment(self) -> Mapping[str, str]:
        packages = link_packages(self.scratch.path, Path(__file__).parents[1], dict([ENTRY_POINT]))
        return {**_environment(self._config, self._meeting, packages), "TMPDIR": str(self.scratch.path)}

    def inherited(self) -> Sequence[int]:
        """Return the lock that shows that the server lives."""
        return [self.scratch.lock]

    async def ready(self) -> bool:
        """Return whether this server serves. No other server knows the keys, and this server asks for a key."""
        await asyncio.to_thread(self.scratch.note, self.pid)  # looks at every process
        try:
            if (await self.http.call("/ready", timeout_s=PROBE_S)).status != 200:
                return False
            if (await self.http.call("/model_info", timeout_s=PROBE_S, key="none")).status != 401:
                raise Reason.ENGINE_FAILED.error(f"a different server answers at {self.http.url}")
            return (await self.http.call("/model_info", timeout_s=PROBE_S, admin=False)).status == 200
        except TimeoutError:
            return False
        except RlctlError as error:
            if error.reason is Reason.ENGINE_FAILED:
                raise
            return False

    def settled(self) -> None:
        """Delete the file of the keys, which SGLang has read."""
        if self._keys_file is not None:
            self._keys_file.unlink(missing_ok=True)

    def ended(self) -> None:
        self.scratch.remove()

    def let_go(self) -> None:
        self._port.close()


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """Bind a free TCP port of an address of this machine, held while the socket is open.

    The socket never listens. So the kernel gives the port to no process that asks for any free port, and SGLang, which
    sets SO_REUSEADDR as well, can still bind it.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    return sock


def _arguments(config: EngineConfig, options: Options, meeting: Meeting | None) -> list[str]:
    """Return the command line without address and keys."""
    arguments = {
        "model_path": config.model_path,
        "tp_size": str(config.tp_size),
        "incremental_streaming_output": "true",
        "log_level_http": "warning",
        "sleep_on_idle": "true",  # an idle scheduler spins otherwise, a core for each rank
    }
    device, _, number = config.device.partition(":")
    if device == "cpu":
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "mem_fraction_static": "0.1",
            "max_total_tokens": "16384",
            "skip_server_warmup": "true",
            **_PAIRED_ON_CPU.get(options.arguments.get("disaggregation_mode", ""), {}),
        }
    elif number:
        arguments["base_gpu_id"] = number
    if config.dtype != "auto":
        arguments["dtype"] = config.dtype.removeprefix("torch.")
    if meeting is not None:
        arguments |= {
            "nnodes": str(meeting.nodes),
            "node_rank": str(meeting.node),
            "dist_init_addr": meeting.address,
        }
    arguments |= options.arguments
    return flags(arguments)


def _refuse_without_nixl(config: EngineConfig, options: Options, python: str) -> None:
    """Raise UNSUPPORTED without NIXL on a CPU: SGLang itself would end late, with a traceback.

    On a GPU the user chooses and installs the backend.
    """
    part = _PAIRED_ON_CPU.get(options.arguments.get("disaggregation_mode", ""), {}) if config.device == "cpu" else {}
    backend = options.arguments.get("disaggregation_transfer_backend", "nixl")
    if part and backend == "nixl" and not any(argparse_source.installed(python, "nixl")):
        raise Reason.UNSUPPORTED.error(
            "on a CPU prefill and decode servers of SGLang need NIXL, which is not installed for it",
            field="options.disaggregation_mode",
            next_step="`tools/engines install sglang` installs it; or `pip install nixl nixl-cu12` there.",
        )


def _environment(config: EngineConfig, meeting: Meeting | None, packages: Path) -> Mapping[str, str]:
    """Return environment variables. ``packages``: the folder of the plug-in."""
    # A health probe must neither generate nor mark a paused server as ill.
    variables = {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    if os.environ.get("SGLANG_PLUGINS"):
        variables["SGLANG_PLUGINS"] = f"{os.environ['SGLANG_PLUGINS']},rlctl"
    if meeting is not None:
        # By default each side takes the address of its host name, perhaps outside the network between the nodes.
        variables |= {"SGLANG_HOST_IP": meeting.host, "GLOO_SOCKET_IFNAME": interface_of(meeting.host)}
    path = [str(packages), os.environ.get("PYTHONPATH", "")]
    if config.device.partition(":")[0] != "cpu":
        return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    path.insert(0, str(_STAND_INS))
    variables |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    if config.tp_size > 1:
        # A CUDA build of torch brings NCCL, which SGLang would open even without a GPU.
        ranks_here = config.tp_size if meeting is None else max(config.tp_size // meeting.nodes, 1)
        variables["SGLANG_NCCL_SO_PATH"] = "not used on a CPU"
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = cores_of(ranks_here)
    return variables

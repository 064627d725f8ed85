"""One SGLang server as a child process: its address and keys are its own, and it does not outlive this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from rlctl.engine import EngineConfig
from rlctl.errors import Reason, RlctlError
from rlctl_sglang.http import Http
from rlctl_sglang.options import Options, interpreter
from rlctl_sglang.scratch import Scratch

LOOK_S = 0.2
PROBE_S = 5.0
TAIL = 40
TERM_S = 2.0

_STAND_INS = Path(__file__).parent / "cpu"

_START = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the stage server, however that ends
if os.getppid() != int(sys.argv[1]):
    sys.exit("the stage server has ended")
os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", *sys.argv[2:]])
"""


class ServerProcess:
    """A launched SGLang server. SGLang's own processes end when the first of them does.

    Attributes:
        http: how to talk to it.
        pid: its process id, 0 before it runs.
        scratch: what it leaves behind, once it was launched.
    """

    scratch: Scratch

    def __init__(self, config: EngineConfig, options: Options) -> None:
        """Raises FIELD_INVALID when SGLang is not installed."""
        self._config = config
        self._options = options
        self._python = interpreter(options)
        self._port = hold_port()
        api_key, admin_key = secrets.token_hex(32), secrets.token_hex(32)
        self._keys = {"api-key": api_key, "admin-api-key": admin_key}
        self.http = Http(f"http://127.0.0.1:{self._port.getsockname()[1]}", api_key, admin_key)
        self._popen: subprocess.Popen[bytes] | None = None
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._reader: threading.Thread | None = None
        self._ended = threading.Event()

    @property
    def pid(self) -> int:
        """Its process id, 0 before it runs."""
        return self._popen.pid if self._popen is not None else 0

    async def start(self, on_end: Callable[[RlctlError], None]) -> None:
        """Launch it and wait until it is ready. ``on_end`` is told, from another thread, if it ends by itself.

        Raises ENGINE_FAILED with the end of its log, FIELD_INVALID for an argument that it does not know,
        DEADLINE_EXCEEDED.
        """
        self._launch(on_end)
        deadline = asyncio.get_running_loop().time() + self._options.start_s
        while True:
            if self._ended.is_set():
                raise self.failure()
            self.scratch.note(self.pid)
            if await self._ready():
                self._keys_file.unlink(missing_ok=True)
                return
            if asyncio.get_running_loop().time() > deadline:
                raise Reason.DEADLINE_EXCEEDED.error(f"SGLang was not ready after {self._options.start_s:g} s")
            await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        """End it, at once when it does not go by itself: a deadlocked one does not react."""
        self._ended.set()  # nobody is to be told
        if self._popen is not None:
            # To the first of its processes only: the end of the others looks like a crash to it, which it looks into.
            self._popen.terminate()
            await asyncio.to_thread(self._wait, TERM_S)
            self._signal(signal.SIGKILL)
            await asyncio.to_thread(self._wait, TERM_S)
        await self.http.close()
        self._port.close()

    def kill(self) -> None:
        """End it and all of its processes at once; ``on_end`` is told."""
        self._signal(signal.SIGKILL)

    def failure(self) -> RlctlError:
        """Why it ended, from the end of its log."""
        lines = [line for line in self._tail if line.strip()]
        for line in lines:
            if "unrecognized arguments:" in line:
                name = line.partition("unrecognized arguments:")[2].split()[0].lstrip("-").replace("-", "_")
                return Reason.FIELD_INVALID.error(
                    f"the installed SGLang has no argument {name!r}", field=f"options.{name}"
                )
        errors = [line for line in lines if "Error" in line]
        code = self._popen.poll() if self._popen is not None else None
        cause = (errors or lines or ["it said nothing"])[-1].strip()
        return Reason.ENGINE_FAILED.error(f"SGLang ended with {code}: {cause}")

    def _launch(self, on_end: Callable[[RlctlError], None]) -> None:
        # Keys on a command line can be read by everybody on the host.
        self.scratch = Scratch()
        self._keys_file = self.scratch.path / "keys.yaml"
        self._keys_file.write_text(json.dumps(self._keys))
        arguments = [*_arguments(self._config, self._options), "--config", str(self._keys_file)]
        arguments += ["--host", "127.0.0.1", "--port", str(self._port.getsockname()[1])]
        self._popen = subprocess.Popen(
            [self._python, "-c", _START, str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_environment(self._config), "TMPDIR": str(self.scratch.path)},
            pass_fds=[self.scratch.lock],
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, args=(on_end,), name="sglang-log", daemon=True)
        self._reader.start()

    def _read(self, on_end: Callable[[RlctlError], None]) -> None:
        """Pass its log on, and notice its end."""
        popen = self._popen
        assert popen is not None
        assert popen.stdout is not None
        for raw in popen.stdout:
            line = self._redacted(raw.decode(errors="replace").rstrip())
            self._tail.append(line)
            print(f"sglang: {line}", file=sys.stderr, flush=True)  # noqa: T201 - the log of the stage server
        popen.wait()
        popen.stdout.close()
        self.scratch.remove()
        told = self._ended.is_set()
        self._ended.set()
        if not told:
            on_end(self.failure())

    def _redacted(self, line: str) -> str:
        """Without its keys: SGLang writes all of its arguments into its log."""
        for name, key in self._keys.items():
            line = line.replace(key, f"<{name}>")
        return line

    async def _ready(self) -> bool:
        """Whether it serves, and whoever answers is really it: nobody else knows its keys, and it wants one."""
        try:
            if (await self.http.call("/ready", timeout_s=PROBE_S)).status != 200:
                return False
            if (await self.http.call("/model_info", timeout_s=PROBE_S, key="none")).status != 401:
                raise Reason.ENGINE_FAILED.error(f"another server answers at {self.http.url}")
            return (await self.http.call("/model_info", timeout_s=PROBE_S, admin=False)).status == 200
        except TimeoutError:
            return False
        except RlctlError as error:
            if error.reason is Reason.ENGINE_FAILED:
                raise
            return False

    def _signal(self, number: int) -> None:
        if self._popen is None:
            return
        try:
            os.killpg(self._popen.pid, number)
        except ProcessLookupError:
            return

    def _wait(self, timeout_s: float) -> bool:
        assert self._reader is not None
        self._reader.join(timeout_s)
        return not self._reader.is_alive()


def hold_port() -> socket.socket:
    """A free port of the loopback interface, held while the socket is open: bound, and never listened on, so that the
    kernel gives it to nobody who asks for any, and SGLang, which sets SO_REUSEADDR as well, can still bind it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _arguments(config: EngineConfig, options: Options) -> list[str]:
    """The command line without address and keys."""
    named = {
        "model_path": config.model_path,
        "tp_size": str(config.tp_size),
        "incremental_streaming_output": "true",
        "log_level_http": "warning",
        "sleep_on_idle": "true",  # an idle scheduler spins otherwise, a core for each rank
    }
    device, _, number = config.device.partition(":")
    if device == "cpu":
        named |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "mem_fraction_static": "0.1",
            "max_total_tokens": "16384",
            "skip_server_warmup": "true",
        }
    elif number:
        named["base_gpu_id"] = number
    if config.dtype != "auto":
        named["dtype"] = config.dtype.removeprefix("torch.")
    named |= options.arguments
    arguments = []
    for name, value in named.items():
        arguments.append(f"--{name.replace('_', '-')}")
        if value != "true":
            arguments += _words(value)
    return arguments


def _words(value: str) -> list[str]:
    """A list, "[1, 2]", as an argument takes several values; anything else as it is."""
    if value.startswith("["):
        with contextlib.suppress(ValueError):
            return [word if isinstance(word, str) else json.dumps(word) for word in json.loads(value)]
    return [value]


def _environment(config: EngineConfig) -> Mapping[str, str]:
    """What SGLang needs around it."""
    # A health probe must neither generate nor mark a paused server as ill.
    variables = {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    if config.device.partition(":")[0] != "cpu":
        return variables
    path = [str(_STAND_INS), os.environ.get("PYTHONPATH", "")]
    variables |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    if config.tp_size > 1:
        # A CUDA build of torch brings NCCL, which SGLang would open without asking whether there is a GPU.
        variables["SGLANG_NCCL_SO_PATH"] = "not used on a CPU"
        cores = sorted(os.sched_getaffinity(0))
        each = max(len(cores) // config.tp_size, 1)
        shares = [[cores[(rank * each + i) % len(cores)] for i in range(each)] for rank in range(config.tp_size)]
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return variables

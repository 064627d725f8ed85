"""Servers and trainers forked from a process that has imported what they need.

The imports of torch and transformers take five seconds of a core, several times the cost of most tests with an engine;
those of a coordinator or a gateway take half a second. The suites start hundreds of each. A launcher therefore gets its
processes from here: separate processes with the usual arguments, environment, standard streams and process group. A
launcher in another process (``rlctl up``, an actor of Ray) does so by
:mod:`tests.support.launchers.sitecustomize`. A process that needs a different environment before its imports starts
with an interpreter, and so do all processes of a launcher under :data:`INTERPRETERS`.

The forking process imports torch for the first rank or script that needs it. A rank on a GPU starts with an
interpreter: a process that has used a GPU must not be forked.

Run as a program, this module is the forking process: it takes requests from sockets, and ends with its owner.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import IO, Any

SERVERS = (
    *("rlctl.cli.main", "rlctl.cli.commands.gateway", "rlctl.cli.commands.serve", "rlctl.cli.web.server"),
    *("rlctl.coordinator.server", "rlctl.gateway.prefork", "rlctl.gateway.server"),
    *("rlctl.stage.server", "rlctl.testing.fake_engine", "rlctl.worker.server"),
)
TORCH = ("rlctl_torch.engine", "transformers.models.qwen2.modeling_qwen2")
COMMANDS = ("rlctl.cli.commands.up", "rlctl.launch.local.child_processes", "rlctl.sdk.blocking")
DEMO = (*TORCH, "rlctl.demo.loop", "transformers.models.llama.modeling_llama")
ENGINES = ("sglang", "torch", "vllm")
MODULES = ("rlctl", "other_host", "with_nccl")
"""What launchers run: rlctl, or a module of a test that changes something of rlctl's and runs it."""
EARLY = ("HF_", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TRANSFORMERS_")
"""Prefixes of environment variables that imports read."""
LATE = ("PYTHONBREAKPOINT", "PYTHONPATH")
"""Variables that may differ: Ray sets the first, and the second is for later imports."""
MOST_BYTES = 1 << 18
SHARED = "RLCTL_TESTS_FORKING"
"""Variable with the facts of the shared forking process, for launchers in other processes."""
INTERPRETERS = "RLCTL_TESTS_INTERPRETERS"
"""Variable that makes a launcher in another process start interpreters."""
AWAIT_MS = 500
LONGEST_ADDRESS = 107
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


class Forked:
    """A forked process with the interface of :class:`subprocess.Popen`."""

    def __init__(
        self,
        nursery: Nursery,
        argv: Sequence[str],
        stderr: IO[bytes],
        env: Mapping[str, str],
        imported: Sequence[str],
    ) -> None:
        """``argv``: a script or one of :data:`MODULES`, and its arguments; ``imported``: modules it finds imported."""
        stdin, self_stdin = os.pipe()
        self_stdout, stdout = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(self_stdin, "wb", 0)
        self.stdout: IO[bytes] = os.fdopen(self_stdout, "rb")
        self.returncode: int | None = None
        self._ended = threading.Event()
        self._handle: int | None = None
        self._using = threading.Lock()
        try:
            nursery.fork(self, argv, (stdin, stdout, stderr.fileno()), env, imported)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(stdin)
            os.close(stdout)

    def born(self, pid: int) -> None:
        """Record the process id, before the process's end is reported."""
        self.pid, self._handle = pid, os.pidfd_open(pid)

    def ended(self, returncode: int) -> None:
        """Record the exit status of the process, already waited for."""
        with self._using:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None
        self.returncode = returncode
        self._ended.set()

    def close(self) -> None:
        """Close this end of the process's streams."""
        self.stdin.close()
        self.stdout.close()

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired([], timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with self._using, contextlib.suppress(ProcessLookupError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The forking process, started at its first use."""

    def __init__(self, program: str = __file__, shared: Mapping[str, Any] | None = None) -> None:
        """``shared``: facts of a forking process of another process, by :meth:`share`; None: of this process."""
        self._program = program
        self._address: str | None = shared["address"] if shared else None
        self._listener: socket.socket | None = None
        self._env: dict[str, str] = dict(shared["environment"]) if shared else {}
        """Environment of the forking process."""
        self._lock = threading.Lock()
        self._children: dict[int, Forked] = {}
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._awaited: Forked | None = None
        self._gone = False
        self._said = threading.Condition()

    def popen(self, command: list[str], **options: Any) -> Any:
        """Start a process for a launcher: forked, if allowed."""
        python, dash_m, module, *arguments = command
        env = options["env"]
        forks = (python, dash_m) == (sys.executable, "-m") and module in MODULES and _device(arguments) == "cpu"
        if not forks or not self._has_imports_of(env):
            return subprocess.Popen(command, **options)
        return Forked(self, [module, *arguments], options["stderr"], env, TORCH if _torch(arguments) else SERVERS)

    def script(
        self, argv: Sequence[str], stderr: IO[bytes], environ: Mapping[str, str] = MappingProxyType({})
    ) -> Forked:
        """Start a process that runs a script; ``environ``: variables beside those of this process."""
        return Forked(self, argv, stderr, {**_own(), **environ}, TORCH)

    def run(self, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run ``rlctl`` with these arguments to its end. It is forked, if allowed, and killed when its time is up."""
        if not self._has_imports_of(_own()):
            command = [sys.executable, "-m", "rlctl", *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
        imported = (*SERVERS, *COMMANDS, *(DEMO if arguments[0] == "demo" else ()))
        with tempfile.TemporaryFile() as stderr:
            process = Forked(self, ["rlctl", *arguments], stderr, _own(), imported)
            process.stdin.close()
            limit = threading.Timer(timeout_s, process.kill)
            limit.start()
            try:
                stdout = process.stdout.read()
                process.wait()
            finally:
                limit.cancel()
                process.close()
            stderr.seek(0)
            return subprocess.CompletedProcess(
                arguments, process.returncode or 0, stdout.decode(), stderr.read().decode()
            )

    def fork(
        self,
        child: Forked,
        argv: Sequence[str],
        streams: Sequence[int],
        env: Mapping[str, str],
        imported: Sequence[str],
    ) -> None:
        """Start a process; ``child`` is notified of the start and, later, of the end.

        ``imported``: modules that the forking process has imported by then.

        Raises RuntimeError if the forking process is gone, and OSError.
        """
        with self._lock:
            control = self._socket or self._start()
            asked = json.dumps(
                {"argv": list(argv), "env": dict(env), "cwd": os.getcwd(), "imported": list(imported)}
            ).encode()
            with self._said, contextlib.suppress(BrokenPipeError):
                self._awaited = child
                socket.send_fds(control, [asked], list(streams))
                self._said.wait_for(lambda: self._awaited is None or self._gone)
                control.send(b"go")
            if self._awaited is not None:
                raise RuntimeError("the process that forks is gone; it said why on the standard error")

    def share(self, address: Path) -> str:
        """Let launchers in other processes use the forking process, which their first request starts.

        ``address``: path of a socket to make. Returns the value of :data:`SHARED` for their environment; "null", which
        makes them start interpreters, if the path is too long for a socket.
        """
        if len(str(address)) > LONGEST_ADDRESS:
            return "null"
        self._env = _own()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(address))
        self._listener.listen()
        threading.Thread(target=self._await, args=(self._listener,), name="shared forking", daemon=True).start()
        early = {name: value for name, value in self._env.items() if name.startswith(EARLY)}
        facts = {"address": str(address), "environment": early, "python": sys.executable, "namespaces": _namespaces()}
        return json.dumps(facts)

    def close(self) -> None:
        """End the forking process and all its running children."""
        if self._listener is not None:
            with self._lock:
                self._listener.close()
        if self._socket is not None and self._process is not None:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._process.wait()
            self._socket.close()

    def _has_imports_of(self, env: Mapping[str, str]) -> bool:
        """Return True if imports read the same variables here and in ``env``."""
        ours = self._env or _own()
        early = {name for name in {*env, *ours} if name.startswith(EARLY) and name not in LATE}
        return all(env.get(name) == ours.get(name) for name in early)

    def _await(self, listener: socket.socket) -> None:
        """Start the forking process at the first connection of another launcher, which that process accepts."""
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while not any(event & select.POLLIN for _, event in poll.poll(AWAIT_MS)):
            if listener.fileno() < 0:
                return
        with self._lock:
            # Once the listener is closed, another file may have its number, and may be what poll() has seen.
            if self._socket is None and listener.fileno() >= 0:
                self._start()

    def _start(self) -> socket.socket:
        if self._address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.connect(self._address)
        else:
            self._env = self._env or _own()
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sockets = [theirs.fileno(), *([self._listener.fileno()] if self._listener is not None else [])]
            command = [sys.executable, self._program, *map(str, sockets)]
            self._process = subprocess.Popen(command, pass_fds=sockets, process_group=0, env=self._env)
            theirs.close()
        threading.Thread(target=self._listen, args=(self._socket,), name="forked processes", daemon=True).start()
        return self._socket

    def _listen(self, control: socket.socket) -> None:
        try:
            with contextlib.suppress(ConnectionResetError):
                self._hear(control)
        finally:
            with self._said:
                self._gone = True
                self._said.notify_all()
                for child in self._children.values():  # no process can wait for them any more
                    child.kill()
                    child.ended(-signal.SIGKILL)

    def _hear(self, control: socket.socket) -> None:
        while said := control.recv(MOST_BYTES):
            message = json.loads(said)
            with self._said:
                if "status" in message:
                    self._children.pop(message["pid"]).ended(os.waitstatus_to_exitcode(message["status"]))
                elif self._awaited is not None:
                    self._awaited.born(message["pid"])
                    self._children[message["pid"]], self._awaited = self._awaited, None
                    self._said.notify_all()


NURSERY = Nursery()


def standing_in(nursery: Nursery = NURSERY) -> SimpleNamespace:
    """Return the parts of the module ``subprocess`` that launchers use."""
    return SimpleNamespace(
        Popen=nursery.popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired, DEVNULL=subprocess.DEVNULL
    )


def shared() -> Nursery | None:
    """Return what a launcher in a process of a test forks from; None in a different Python environment.

    A launcher in a different namespace has a forking process of its own.
    """
    facts = json.loads(os.environ.get(SHARED, "null"))
    if facts is None or facts["python"] != sys.executable or INTERPRETERS in os.environ:
        return None
    return Nursery(shared=facts) if facts["namespaces"] == _namespaces() else Nursery()


def _namespaces() -> list[str]:
    """Return what a process inherits: its namespaces, user and root directory."""
    inherited = [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES]
    return [*inherited, os.readlink("/proc/self/root"), str(os.geteuid())]


def _torch(arguments: Sequence[str]) -> bool:
    """Return True for a rank that imports torch."""
    return arguments[0] in ("stage", "worker") and _value(arguments, "--engine", "") in ENGINES


def _device(arguments: Sequence[str]) -> str:
    return _value(arguments, "--device", "cpu")


def _value(arguments: Sequence[str], flag: str, default: str) -> str:
    return arguments[arguments.index(flag) + 1] if flag in arguments else default


def _own() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **os.environ}


def main() -> None:
    """Fork at each request; in the child, become ``rlctl``."""
    owner, *listeners = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    _import(SERVERS)
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    callers = [owner]
    callers_of: dict[int, socket.socket] = {}
    while True:
        for ready in select.select([*callers, *listeners, woken], [], [])[0]:
            if ready == woken:
                os.read(woken, 4096)
                _reap(callers_of)
            elif ready in listeners:
                callers.append(ready.accept()[0])
            elif (asked := _request(ready)) is None:
                if ready is owner:
                    return
                callers.remove(ready)
                ready.close()
            else:
                _import(asked[0]["imported"])
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for each in (woken, wake, *(caller.detach() for caller in (*callers, *listeners))):
                        os.close(each)
                    become(*asked)
                    return
                for stream in asked[1]:
                    os.close(stream)
                callers_of[pid] = ready
                with contextlib.suppress(OSError):  # the caller has ended, and with it the standard input of its child
                    ready.send(json.dumps({"pid": pid}).encode())
                    ready.recv(MOST_BYTES)  # the parent knows the process: its end may be reported


def _import(names: Sequence[str]) -> None:
    """Import modules for all processes forked from now on."""
    if all(name in sys.modules for name in names):
        return
    for name in names:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("an imported module has started a thread, which a forked process would lack")
    gc.collect()
    gc.freeze()


def _request(caller: socket.socket) -> tuple[dict[str, Any], Sequence[int]] | None:
    """Return a request and its standard streams; None after the caller's end."""
    try:
        asked, streams, _, _ = socket.recv_fds(caller, MOST_BYTES, 3)
    except OSError:
        return None
    return (json.loads(asked), streams) if asked else None


def _reap(callers_of: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with contextlib.suppress(OSError):  # the caller has ended
                callers_of.pop(ended[0]).send(json.dumps({"pid": ended[0], "status": ended[1]}).encode())


def become(asked: dict[str, Any], streams: Sequence[int]) -> None:
    """Run the requested program, to its end."""
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = asked["argv"]
    path = [place for place in asked["env"].get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[1:1] = [place for place in path if place not in sys.path]
    if (launching := sys.modules.get("rlctl.launch.local.child_processes")) and (nursery := shared()):
        launching.subprocess = standing_in(nursery)  # type: ignore[attr-defined]
    if sys.argv[0] in MODULES:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

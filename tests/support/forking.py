"""Engines and trainers that are forked from a process in which torch and transformers are imported already.

Importing them takes five seconds of a core, several times what most tests do with an engine, and the suites start
hundreds. So a launcher inside of a test gets its ranks from here: processes of their own, with the arguments,
environment, standard streams and process group that they would have had. What rlctl starts from processes of its own
(``rlctl up``, ``rlctl demo``) begins with an interpreter, as does whatever needs another environment before it imports.

Run as a program it is that one process: it takes requests from a socket, and ends with whoever holds the other end.
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
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import IO, Any

IMPORTED = ("rlctl.cli.main", "rlctl_torch.engine", "transformers.models.qwen2.modeling_qwen2")
EARLY = ("HF_", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TRANSFORMERS_")
"""Beginnings of the names of variables that are read when something is imported."""
COMMAND = "rlctl"
MOST_BYTES = 1 << 18


class Forked:
    """What :class:`subprocess.Popen` would have been."""

    def __init__(self, nursery: Nursery, argv: Sequence[str], stderr: IO[bytes], env: Mapping[str, str]) -> None:
        """``argv``: a script and its arguments, or ``rlctl`` and those of the command."""
        stdin, self_stdin = os.pipe()
        self_stdout, stdout = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(self_stdin, "wb", 0)
        self.stdout: IO[bytes] = os.fdopen(self_stdout, "rb")
        self.returncode: int | None = None
        self._ended = threading.Event()
        self._handle: int | None = None
        self._using = threading.Lock()
        try:
            nursery.fork(self, argv, (stdin, stdout, stderr.fileno()), env)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(stdin)
            os.close(stdout)

    def born(self, pid: int) -> None:
        """It runs under this id, and its end has not been told."""
        self.pid, self._handle = pid, os.pidfd_open(pid)

    def ended(self, returncode: int) -> None:
        """It has, and was waited for."""
        with self._using:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None
        self.returncode = returncode
        self._ended.set()

    def close(self) -> None:
        """Close this end of its streams."""
        self.stdin.close()
        self.stdout.close()

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired([], timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with self._using, contextlib.suppress(ProcessLookupError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks, from the first time that it is needed on."""

    def __init__(self, program: str = __file__) -> None:
        self._program = program
        self._env: dict[str, str] = {}
        """What the process that forks was started with."""
        self._lock = threading.Lock()
        self._children: dict[int, Forked] = {}
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._awaited: Forked | None = None
        self._gone = False
        self._said = threading.Condition()

    def popen(self, command: list[str], **options: Any) -> Any:
        """A process for a launcher: forked, where it may be."""
        python, dash_m, module, *arguments = command
        env = options["env"]
        forks = (python, dash_m, module) == (sys.executable, "-m", COMMAND) and _torch(arguments)
        ours = self._env or _own()
        if not forks or any(env.get(name) != ours.get(name) for name in {*env, *ours} if name.startswith(EARLY)):
            return subprocess.Popen(command, **options)
        return Forked(self, [COMMAND, *arguments], options["stderr"], env)

    def script(self, argv: Sequence[str], stderr: IO[bytes]) -> Forked:
        """A process that runs a script with its arguments."""
        return Forked(self, argv, stderr, _own())

    def fork(self, child: Forked, argv: Sequence[str], streams: Sequence[int], env: Mapping[str, str]) -> None:
        """Start a process; ``child`` is told that it is born, and later that it has ended.

        Raises RuntimeError if the process that forks is gone, and OSError.
        """
        with self._lock:
            control = self._socket or self._start()
            asked = json.dumps({"argv": list(argv), "env": dict(env), "cwd": os.getcwd()}).encode()
            with self._said, contextlib.suppress(BrokenPipeError):
                self._awaited = child
                socket.send_fds(control, [asked], list(streams))
                self._said.wait_for(lambda: self._awaited is None or self._gone)
                control.send(b"go")
            if self._awaited is not None:
                raise RuntimeError("the process that forks is gone; it said why on the standard error")

    def close(self) -> None:
        """End it, and whatever it has forked that still runs."""
        if self._socket is not None and self._process is not None:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._process.wait()
            self._socket.close()

    def _start(self) -> socket.socket:
        self._env = _own()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, self._program, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], process_group=0, env=self._env)
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
                for child in self._children.values():  # nobody can wait for them any more
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


def standing_in() -> SimpleNamespace:
    """The module ``subprocess`` as far as launchers use it."""
    return SimpleNamespace(
        Popen=NURSERY.popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired, DEVNULL=subprocess.DEVNULL
    )


def _torch(arguments: Sequence[str]) -> bool:
    """Whether it is a rank of the torch engine on a CPU: what has used a GPU must not be forked."""
    if arguments[0] not in ("stage", "worker"):
        return False
    engine, device = (arguments[arguments.index(flag) + 1] for flag in ("--engine", "--device"))
    return (engine, device) == ("torch", "cpu")


def _own() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **os.environ}


def main() -> None:
    """Fork whenever it is asked for; in the child, be ``rlctl``."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("something that was imported has started a thread: what is forked would lack it")
    gc.collect()
    gc.freeze()
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([control, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _reap(control)
        if control in ready:
            asked, streams, _, _ = socket.recv_fds(control, MOST_BYTES, 3)
            if not asked:
                return
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (woken, wake, control.detach()):
                    os.close(each)
                become(json.loads(asked), streams)
                return
            for each in streams:
                os.close(each)
            control.send(json.dumps({"pid": pid}).encode())
            control.recv(MOST_BYTES)  # it is known: its end may be told


def _reap(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            control.send(json.dumps({"pid": ended[0], "status": ended[1]}).encode())


def become(asked: dict[str, Any], streams: Sequence[int]) -> None:
    """Be what was asked for, to the end."""
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = asked["argv"]
    if sys.argv[0] == COMMAND:
        runpy.run_module(COMMAND, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

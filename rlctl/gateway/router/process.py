"""The Rust gateway ``sglang-router`` (PyPI) as a child process, and its worker list."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rlctl.contract.errors import Reason
from rlctl.runtime.kills import kill
from rlctl.runtime.server_process import dying_with_parent
from rlctl.transport.channel import bearer

log = logging.getLogger(__name__)

NAME = "sglang-router"
STDERR = 2
"""Of this process: the log, if this process is a server."""
START_S = 30.0
CALL_S = 10.0
LOOK_S = 0.02
ADD_S = 10.0
"""Seconds until an addition of a worker is requested again."""
_PROXIES = {"http_proxy", "https_proxy", "all_proxy"}
"""Variables removed from the router's environment: a web proxy does not reach the workers, which are local."""
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
_KEY = "RLCTL_ROUTER_KEY"
_GUARDED = f"""
import os, runpy, sys
sys.argv = [*sys.argv[1:], "--control-plane-api-keys", "rlctl:rlctl:admin:" + os.environ.pop("{_KEY}")]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Starts the router with a key. The router takes the key only as an argument; this keeps it out of process lists."""
REGULAR, PREFILL, DECODE = "regular", "prefill", "decode"
"""Types of router workers."""


class SglangRouter:
    """``with SglangRouter(policy="cache_aware") as router``: the router runs inside the block. Calls block.

    Attributes:
        url: listening URL.
        pairs: the workers are prefill and decode workers.
    """

    def __init__(
        self,
        *,
        policy: str = "cache_aware",
        host: str = "127.0.0.1",
        port: int = 0,
        log: Path | None = None,
        pairs: bool = False,
        token: str | None = None,
    ) -> None:
        """``log``: file of the output; None for stderr. ``pairs``: use prefill and decode workers. The router sends
        both halves of a request at the same time.
        ``token``: required of callers that read or change the list.

        The router ends with this process, and with the thread that started the router.
        """
        self._policy = policy
        self._host = host
        self._port = port or _free_port(host)
        self._arguments = ["--pd-disaggregation"] if pairs else []
        self.pairs = pairs
        self._log = log
        self._token = token
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: dict[str, float] = {}
        self.url = f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def ended(self) -> bool:
        """True if the router has ended, and not by :meth:`stop`."""
        return self._process is not None and self._process.poll() is not None

    def start(self) -> None:
        """Start the router and wait until it answers. Raises UNSUPPORTED if it is not installed, ENGINE_FAILED."""
        launch = [
            *(*self._program(), "launch", "--host", self._host, "--port", str(self._port), "--policy", self._policy),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(_free_port("127.0.0.1"))),
            # Circuit breakers count refused requests as failures. The list alone decides the serving workers.
            *("--log-level", "warn", "--disable-circuit-breaker", *self._arguments),
        ]
        with contextlib.ExitStack() as stack:
            output: Any = stack.enter_context(self._log.open("ab")) if self._log else STDERR
            self._process = subprocess.Popen(
                dying_with_parent(launch),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # Ctrl-C goes to the gateway, which drains before it ends the router
                env={
                    **{name: value for name, value in os.environ.items() if name.lower() not in _PROXIES},
                    **({_KEY: self._token} if self._token else {}),
                },
            )
        self._asked.clear()
        until = time.monotonic() + START_S
        while True:
            try:
                self.workers()
            except OSError as error:
                if self._process.poll() is not None:
                    log_hint = f"; see {self._log}" if self._log else ""
                    raise Reason.ENGINE_FAILED.error(
                        f"sglang-router ended with {self._process.returncode}{log_hint}"
                    ) from error
                if time.monotonic() >= until:
                    failure = Reason.ENGINE_FAILED.error(f"sglang-router did not answer in {START_S:g} s")
                    raise (kill(self._process, NAME, self._log) or failure) from error
                time.sleep(LOOK_S)
            else:
                return

    def _program(self) -> list[str]:
        path = program()
        if not self._token:
            return [path]
        python = Path(path).resolve().parent / "python"  # perhaps a different environment than rlctl's
        return [str(python if python.exists() else sys.executable), "-c", _GUARDED, path]

    def stop(self, drain_s: float = 0.0) -> None:
        """End the router. It takes no more requests, and its running requests have ``drain_s`` seconds."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(drain_s + CALL_S)
        except subprocess.TimeoutExpired:
            if error := kill(process, NAME, self._log):
                log.warning("%s", error)

    def workers(self) -> dict[str, str]:
        """Return the ids of the workers by URL. Raises OSError."""
        return {worker["url"]: worker["id"] for worker in self._listed()}

    def towards(self, wanted: Mapping[str, str]) -> tuple[frozenset[str], frozenset[str]]:
        """Take one step towards the wanted workers, types by URL. Return (present workers, workers being added).

        The router adds a worker only after the worker has answered /health, and removes a worker at once. A router
        without workers of a type refuses all requests. So the last worker of a type is removed only after a wanted
        worker is present. Raises OSError.
        """
        present = {worker["url"]: worker for worker in self._listed()}
        now = time.monotonic()
        self._asked = {url: at for url, at in self._asked.items() if url not in present and now - at < ADD_S}
        for url in wanted.keys() - present.keys() - self._asked.keys():
            self._call("POST", "/workers", {"url": url, "worker_type": wanted[url]})
            self._asked[url] = now
        present_types = {kind for url, kind in wanted.items() if url in present}
        for url in present.keys() - wanted.keys():
            if not wanted or present[url]["worker_type"] in present_types:
                self._call("DELETE", f"/workers/{present[url]['id']}")
        return frozenset(present), frozenset(self._asked)

    def _listed(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self._call("GET", "/workers")["workers"]
        return workers

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **dict(bearer(self._token))}
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
        try:
            with _open(request, timeout=CALL_S) as response:
                return json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            if error.code == 404 and method == "DELETE":
                return None
            raise
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"the router's answer broke off: {error!r}") from error


def installed() -> str:
    """Return the program, beside this interpreter or on the path; "" if not installed."""
    path = Path(sys.executable).parent / "sglang-router"
    return str(path) if path.exists() else shutil.which("sglang-router") or ""


def program() -> str:
    """Return the program. Raises UNSUPPORTED if it is not installed."""
    path = installed()
    if not path:
        raise Reason.UNSUPPORTED.error(
            "sglang-router is not installed", field="router.backend", next_step="pip install 'rlctl[router]'"
        )
    return path


def _free_port(host: str) -> int:
    """Return a TCP port that is free now: the router accepts neither a socket nor port 0."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port

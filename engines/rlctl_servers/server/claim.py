"""The claim of a stage server on the engine server that it attaches to."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from rlctl.contract.errors import Reason

log = logging.getLogger(__name__)

_OWN: set[Path] = set()
"""Claims of this process. A pid does not tell: it can be the same in two containers that share the directory."""


def place_id(url: str) -> str:
    """Return a short id of the server at a URL. A loopback address means another server in another namespace."""
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    where = ""
    if host.startswith("127.") or host == "::1":
        where = "@".join(_here())
    return hashlib.sha256(f"{host} {port} {parts.path} {where}".encode()).hexdigest()[:16]


def _here() -> list[str]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, str(os.stat("/proc/self/ns/net").st_ino)]
    except OSError:  # not Linux
        return [os.uname().nodename]


class Claim:
    """The claim of this process, which ends with the process at the latest.

    A locked directory: the kernel drops the lock with the process. Stage servers on other hosts, or of other users, do
    not see the claim.
    """

    def __init__(self, product: str, url: str) -> None:
        """Raises OPERATION_CONFLICT if the stage server of another process has the server."""
        self._path = Path(tempfile.gettempdir()) / f"rlctl-attached-{os.getuid()}-{place_id(url)}"
        self._lock = -1
        holder = "0"
        try:
            while self._lock < 0 and holder == "0":
                holder = self._take()
        except OSError as error:
            log.warning("another stage server at %s at %s would not be noticed: %s", product, url, error)
            return
        if self._lock < 0 and self._path not in _OWN:
            raise Reason.OPERATION_CONFLICT.error(
                f"{product} at {url} has another stage server (pid {holder})",
                field="options.url",
                next_step="End that stage server first: an attached server has one stage server at a time.",
            )

    def release(self) -> None:
        """Release the claim. A repeat has no effect."""
        if self._lock >= 0:
            shutil.rmtree(self._path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1
            _OWN.discard(self._path)

    def _take(self) -> str:
        """Lock the directory, or return the pid of its holder; "0" if the directory was removed meanwhile."""
        self._path.mkdir(mode=0o700, exist_ok=True)
        pid = self._path / "pid"
        with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
            lock = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, lock)
            if os.fstat(lock).st_uid != os.getuid():
                raise PermissionError(f"{self._path} belongs to another user")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return pid.read_text() if pid.exists() else "not known yet"
            if os.fstat(lock).st_ino == self._path.stat().st_ino:
                pid.write_text(str(os.getpid()))
                self._lock = lock
                _OWN.add(self._path)
                stack.pop_all()
        return "0"

"""Failures of the operating system as typed errors."""

from __future__ import annotations

import errno
import os

from rlctl.contract.errors import Reason, RlctlError

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TOO_MANY_FILES = {errno.EMFILE, errno.ENFILE}


def exhausted(error: BaseException, action: str, field: str = "") -> RlctlError | None:
    """Return DISK_FULL (space, quota or the maximum file size) or TOO_MANY_FILES for such an OSError; else None.

    ``action``: the failed action, for example "PATH cannot be written".
    """
    number = error.errno if isinstance(error, OSError) else None
    if number not in _DISK_FULL | _TOO_MANY_FILES:
        return None
    reason = Reason.DISK_FULL if number in _DISK_FULL else Reason.TOO_MANY_FILES
    return reason.error(f"{action}: {os.strerror(number)}", field=field)


def unbound(listen: str, error: OSError, field: str = "listen") -> RlctlError:
    """Return the error of a failed bind. ``field``: the field and option with the address."""
    in_use = error.errno == errno.EADDRINUSE
    return Reason.FIELD_INVALID.error(
        f"{listen} is in use by another process" if in_use else f"{listen} cannot be bound: {error.strerror}",
        field=field,
        next_step=f"Choose another --{field}; port 0 takes any that is free." if in_use else "",
    )

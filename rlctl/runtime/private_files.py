"""Files and directories of one user: journals, state and logs name prompts' models, paths and hosts."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILE = 0o600
DIRECTORY = 0o700


def opener(path: str, flags: int) -> int:
    """What ``open`` takes as its ``opener``: a file that is made, or was readable by others, is this user's alone."""
    descriptor = os.open(path, flags, FILE)
    with contextlib.suppress(OSError):  # another user's, or no file: a pipe, say
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, FILE)
    return descriptor


def write_text(path: Path, text: str) -> None:
    """Write a file of this user's alone."""
    with open(path, "w", opener=opener) as file:
        file.write(text)


def make_directory(path: Path, *, own: bool = False) -> None:
    """Make a directory of this user's alone where there is none. ``own``: so is the one that is there."""
    path.mkdir(mode=DIRECTORY, parents=True, exist_ok=True)
    if own:
        tighten(path, DIRECTORY)


def tighten(path: Path, mode: int = FILE) -> None:
    """Let nobody else read what is there; nothing where it is another user's or not there."""
    with contextlib.suppress(OSError):
        path.chmod(mode)

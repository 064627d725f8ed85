"""The directories that an engine reads checkpoints from and pulls them into; every other path is refused.

A path in a request comes over the network. What it resolves to counts, symbolic links followed, not how it is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rlctl.errors import Reason, RlctlError


class Roots:
    """Directories and all that is below them.

    Attributes:
        directories: the directories, resolved.
    """

    def __init__(self, directories: Iterable[str | Path]) -> None:
        self.directories = sorted({Path(os.path.realpath(directory)) for directory in directories})

    @classmethod
    def around(cls, checkpoint: str, given: Iterable[str] = ()) -> Roots:
        """The roots of an engine that was started with a checkpoint.

        By default that is the directory which the checkpoint lies in: successive checkpoints of one run lie side by
        side, and whoever started the engine named that place. ``given`` replaces it. The checkpoint itself is always
        allowed, and the directories that its files are linked from (the Hugging Face cache keeps the contents apart):
        a stage must be able to go back to what it was started with.
        """
        start = Path(os.path.realpath(checkpoint))
        roots = {start, *_linked(start)}
        if given := [directory for directory in given if directory]:
            roots.update(Path(directory) for directory in given)
        elif start.parent != Path(start.anchor):
            roots.add(start.parent)
        return cls(roots)

    def resolve(self, path: str, *, field: str) -> str:
        """The path without links. Raises PATH_NOT_ALLOWED, with ``field``, when it leads out of the directories."""
        if "\0" in path:
            raise Reason.FIELD_INVALID.error(f"{field} holds a NUL character", field=field)
        real = Path(os.path.realpath(path))
        if not any(real.is_relative_to(directory) for directory in self.directories):
            raise self._outside(path, real, field)
        return str(real)

    def resolve_checkpoint(self, path: str, *, field: str) -> str:
        """As :meth:`resolve`, of a directory whose files are going to be read: none may be a link that leads out."""
        resolved = self.resolve(path, field=field)
        try:
            with os.scandir(resolved) as entries:
                links = [entry.path for entry in entries if entry.is_symlink()]
        except OSError:
            return resolved  # whoever opens it says what is wrong with it
        for link in links:
            self.resolve(link, field=field)
        return resolved

    def __str__(self) -> str:
        return os.pathsep.join(map(str, self.directories))

    def _outside(self, path: str, real: Path, field: str) -> RlctlError:
        where = path if str(real) == path else f"{path} (which is {real})"
        return Reason.PATH_NOT_ALLOWED.error(
            f"{where} lies outside of the directories that this engine may use: {self}", field=field
        )


def _linked(directory: Path) -> set[Path]:
    """Directories that hold what links in this one stand for."""
    if not directory.is_dir():
        return set()
    return {Path(os.path.realpath(entry)).parent for entry in directory.iterdir() if entry.is_symlink()}

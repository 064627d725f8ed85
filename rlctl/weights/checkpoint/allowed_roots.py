"""The directories that an engine reads checkpoints from and pulls them into; every other path is refused.

A path in a request comes over the network. What it resolves to counts, symbolic links followed, not how it is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rlctl.contract.errors import Reason, RlctlError


class Roots:
    """Directories and all that is below them.

    Attributes:
        directories: the directories, resolved.
    """

    def __init__(self, directories: Iterable[str | Path], *, also: Iterable[Path] = ()) -> None:
        """``also``: resolved paths that are allowed by themselves, without what is below or beside them."""
        self.directories = sorted({Path(os.path.realpath(directory)) for directory in directories})
        self._also = frozenset(also)

    @classmethod
    def around(cls, checkpoint: str, given: Iterable[str] = ()) -> Roots:
        """The roots of an engine that was started with a checkpoint.

        By default that is the directory which the checkpoint lies in: successive checkpoints of one run lie side by
        side, and whoever started the engine named that place. ``given`` replaces it. The checkpoint itself is always
        allowed, and what its files are links to: a stage must be able to go back to what it was started with. What else
        lies there is not, but for the Hugging Face cache, where the contents of all snapshots of a repository are.
        """
        start = Path(os.path.realpath(checkpoint))
        linked = _linked(start)
        roots = {start, *_blobs(start, linked)}
        if given := [directory for directory in given if directory]:
            roots.update(Path(directory) for directory in given)
        elif start.parent != Path(start.anchor):
            roots.add(start.parent)
        return cls(roots, also=linked)

    def resolve(self, path: str, *, field: str) -> str:
        """The path without links. Raises PATH_NOT_ALLOWED, with ``field``, when it leads out of the directories."""
        if "\0" in path:
            raise Reason.FIELD_INVALID.error(f"{field} holds a NUL character", field=field)
        real = Path(os.path.realpath(path))
        if real not in self._also and not any(real.is_relative_to(directory) for directory in self.directories):
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
    """What links in a directory stand for; the root of the file system is no part of any checkpoint."""
    if not directory.is_dir():
        return set()
    targets = {Path(os.path.realpath(entry)) for entry in directory.iterdir() if entry.is_symlink()}
    return targets - {Path(directory.anchor)}


def _blobs(snapshot: Path, linked: set[Path]) -> set[Path]:
    """The directory with the contents of a repository in the Hugging Face cache, if this is a snapshot of one.

    A snapshot is ``<repository>/snapshots/<revision>``; its files are links to ``<repository>/blobs/<hash>``.
    """
    blobs = Path(os.path.realpath(snapshot.parent.parent / "blobs"))
    inside = snapshot.parent.name == "snapshots" and any(target.parent == blobs for target in linked)
    return {blobs} - {Path(blobs.anchor)} if inside else set()

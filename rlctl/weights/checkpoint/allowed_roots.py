"""The directories from which an engine reads checkpoints and into which it pulls; every other path is refused.

A path in a request comes over the network. The check applies to the resolved path, with symbolic links followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rlctl.contract.errors import Reason, RlctlError


class Roots:
    """Directories with all contents below.

    Attributes:
        directories: the directories, resolved.
    """

    def __init__(self, directories: Iterable[str | Path], *, also: Iterable[Path] = ()) -> None:
        """Create roots; ``also`` has single paths, resolved, allowed without their surroundings or contents."""
        self.directories = sorted({Path(os.path.realpath(directory)) for directory in directories})
        self._also = frozenset(also)

    @classmethod
    def around(cls, checkpoint: str, directories: Iterable[str] = ()) -> Roots:
        """Return the roots of an engine that was started with a checkpoint.

        The default is the parent directory of the checkpoint: successive checkpoints of a run are neighbours, and the
        start of the engine named that place. ``directories`` replaces the default. The checkpoint itself and the
        targets of its links are always allowed, so that a stage can return to its first checkpoint. The surroundings of
        a link's target are not allowed. An exception is the Hugging Face cache, with the contents of all snapshots of a
        repository.
        """
        start = Path(os.path.realpath(checkpoint))
        linked = _linked(start)
        roots = {start, *_blobs(start, linked)}
        if directories := [directory for directory in directories if directory]:
            roots.update(Path(directory) for directory in directories)
        elif start.parent != Path(start.anchor):
            roots.add(start.parent)
        return cls(roots, also=linked)

    def resolve(self, path: str, *, field: str) -> str:
        """Return the path without links.

        Raises PATH_NOT_ALLOWED, with ``field``, for a path outside the directories, FIELD_INVALID for a NUL character.
        """
        if "\0" in path:
            raise Reason.FIELD_INVALID.error(f"{field} holds a NUL character", field=field)
        real = Path(os.path.realpath(path))
        if real not in self._also and not any(real.is_relative_to(directory) for directory in self.directories):
            raise self._outside(path, real, field)
        return str(real)

    def resolve_checkpoint(self, path: str, *, field: str) -> str:
        """Resolve a directory for reading, as :meth:`resolve`; none of its files may be a link to the outside."""
        resolved = self.resolve(path, field=field)
        try:
            with os.scandir(resolved) as entries:
                links = [entry.path for entry in entries if entry.is_symlink()]
        except OSError:
            return resolved  # the error is reported when the directory is opened
        for link in links:
            self.resolve(link, field=field)
        return resolved

    def __str__(self) -> str:
        return os.pathsep.join(map(str, self.directories))

    def _outside(self, path: str, real: Path, field: str) -> RlctlError:
        location = path if str(real) == path else f"{path} (which is {real})"
        return Reason.PATH_NOT_ALLOWED.error(
            f"{location} lies outside of the directories that this engine may use: {self}", field=field
        )


def _linked(directory: Path) -> set[Path]:
    """Return the targets of a directory's links, without the root of the file system, which no checkpoint contains."""
    if not directory.is_dir():
        return set()
    targets = {Path(os.path.realpath(entry)) for entry in directory.iterdir() if entry.is_symlink()}
    return targets - {Path(directory.anchor)}


def _blobs(snapshot: Path, linked: set[Path]) -> set[Path]:
    """Return the blobs directory of a repository in the Hugging Face cache, if ``snapshot`` is a snapshot there.

    A snapshot is ``<repository>/snapshots/<revision>``; its files are links to ``<repository>/blobs/<hash>``.
    """
    blobs = Path(os.path.realpath(snapshot.parent.parent / "blobs"))
    inside = snapshot.parent.name == "snapshots" and any(target.parent == blobs for target in linked)
    return {blobs} - {Path(blobs.anchor)} if inside else set()

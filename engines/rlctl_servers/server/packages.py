"""rlctl's packages on the path of an engine with an environment that lacks them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import rlctl
import rlctl_servers
from rlctl.version import __version__

_SHARED = (Path(rlctl.__file__).parent, Path(rlctl_servers.__file__).parent)


def link_packages(directory: Path, package: Path, entry_points: Mapping[str, str] | None = None) -> Path:
    """Make a folder for PYTHONPATH with only rlctl, rlctl_servers and an engine's ``package``.

    ``entry_points``: group → "name = module:function", visible to ``importlib.metadata`` as from an installed rlctl.
    """
    path = directory / "packages"
    path.mkdir(exist_ok=True)
    for source in (*_SHARED, package):
        link = path / source.name
        if not link.exists():
            link.symlink_to(source, target_is_directory=True)
    if entry_points:
        metadata = path / f"rlctl-{__version__}.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rlctl\nVersion: {__version__}\n")
        sections = (f"[{group}]\n{entry}\n" for group, entry in entry_points.items())
        (metadata / "entry_points.txt").write_text("\n".join(sections))
    return path

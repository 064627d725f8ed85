"""Environments with an installed wheel and its declared dependencies only.

pip installs the wheel. Its dependencies are links to distributions in the tests' environment: the requirements in the
wheel's metadata, and their requirements in turn. Nothing is downloaded, and a few gigabytes of torch are not copied. An
undeclared dependency is missing, as for a user.
"""

from __future__ import annotations

import collections
import csv
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(sysconfig.get_path("purelib"))


def install(wheel: Path, directory: Path, *, extras: Sequence[str] = ()) -> Path:
    """Make an environment with the wheel; return the directory of its commands."""
    venv.create(directory, symlinks=True)
    python = directory / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True)
    (site,) = directory.glob("lib/python*/site-packages")
    (about,) = metadata.distributions(name="rlctl", path=[str(site)])
    _link(_closure(about.requires or [], extras), site)
    return python.parent


def _closure(requirements: Sequence[str], extras: Sequence[str]) -> list[metadata.Distribution]:
    """Return the installed distributions that satisfy requirements. Raises AssertionError for a wrong version."""
    found: dict[str, metadata.Distribution] = {}
    done: set[tuple[str, str]] = set()
    own = list(requirements)
    due = collections.deque((each, extra) for each in requirements for extra in ("", *extras))
    while due:
        text, extra = due.popleft()
        requirement = Requirement(text)
        if (text, extra) in done or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        done.add((text, extra))
        name = canonicalize_name(requirement.name)
        if name == "rlctl":  # an extra that combines extras
            due.extend((each, more) for each in own for more in requirement.extras)
            continue
        distribution = found.setdefault(name, metadata.distribution(name))
        assert requirement.specifier.contains(distribution.version, prereleases=True), f"{text}: {distribution.version}"
        due.extend((each, more) for each in distribution.requires or [] for more in ("", *requirement.extras))
    return list(found.values())


def _link(distributions: Sequence[metadata.Distribution], site: Path) -> None:
    wanted = {distribution.name for distribution in distributions}
    owners: dict[str, set[str]] = collections.defaultdict(set)
    for distribution in metadata.distributions(path=[str(HERE)]):
        name = distribution.name  # parsed at each access
        for place in _places(distribution):
            owners[place].add(name)
    linked: set[str] = set()
    for place, names in sorted(owners.items()):
        # A folder shared with an unwanted distribution, for example `google`, is linked by its content.
        if names <= wanted and not any(place.startswith(f"{above}/") for above in linked):
            linked.add(place)
            (site / place).parent.mkdir(parents=True, exist_ok=True)
            (site / place).symlink_to(HERE / place)


def _places(distribution: metadata.Distribution) -> set[str]:
    """Return files and folders of a distribution below site-packages, at most three folders deep."""
    record = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    parts = [path.split("/")[:4] for path, *_ in record if not path.startswith(("/", "..", "__pycache__"))]
    return {"/".join(each[:depth]) for each in parts for depth in range(1, len(each) + 1)}

"""The modules of the tests themselves."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_one_pytest_can_collect_all_modules() -> None:
    """Folders without ``__init__.py`` share one namespace: ``tools/test -k NAME`` needs a name for each module."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in TESTS.rglob("test_*.py"):
        places[path.name].append(str(path.relative_to(TESTS)))
    assert [paths for paths in places.values() if len(paths) > 1] == []

"""Lets launchers in processes of tests fork engines: see :mod:`tests.support.forking`.

The folder is on PYTHONPATH, so Python runs this module at the start of every process.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_LAUNCHING = "rlctl.launch.local.child_processes"


class _Forks(Loader):
    """Loads the module that starts processes, and lets it fork engines."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        spec = importlib.util.spec_from_file_location("forking", Path(__file__).parents[1] / "forking.py")
        assert spec is not None
        assert spec.loader is not None
        forking: Any = importlib.util.module_from_spec(spec)
        sys.modules["forking"] = forking
        spec.loader.exec_module(forking)
        if (nursery := forking.shared()) is not None:
            module.subprocess = forking.standing_in(nursery)  # type: ignore[attr-defined]


class _Launching(MetaPathFinder):
    """Finds the module that starts processes."""

    def find_spec(self, name: str, path: Any = None, _target: object = None) -> ModuleSpec | None:
        if name != _LAUNCHING or (spec := PathFinder.find_spec(name, path)) is None:
            return None
        assert spec.loader is not None
        spec.loader = _Forks(spec.loader)
        return spec


if "RLCTL_TESTS_FORKING" in os.environ:
    sys.meta_path.insert(0, _Launching())

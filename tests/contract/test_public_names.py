"""The names that `import rlctl` offers."""

from __future__ import annotations

import inspect

import pytest

import rlctl


def test_every_public_name_can_be_imported() -> None:

    for name in rlctl.__all__:
        assert getattr(rlctl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = rlctl.conect


def test_the_blocking_fleet_has_every_method_of_the_asyncio_fleet() -> None:
    methods = {
        name
        for name, method in inspect.getmembers(rlctl.aio.AsyncFleet, inspect.isfunction)
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    }
    missing = {name for name in methods if not name.startswith("_")} - {"committed"} - set(dir(rlctl.Fleet))
    assert not missing, f"add {sorted(missing)} to Fleet in rlctl/sdk/blocking.py"

"""A real SGLang in which the method that rlctl hooks has another name, as the next version may have it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from own_sglang import own_sglang
from rlctl_sglang import SGLangEngine
from rlctl_sglang.ranks.channel import TARGET
from server_stage import Driver

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

RENAMED = """
def register():
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as manager

    manager.check_all_weights = manager.check_weights
    del manager.check_weights
    manager.__getattr__ = renamed


def renamed(manager, name):
    if name == "check_weights":  # SGLang itself calls it by its new name
        return manager.check_all_weights
    raise AttributeError(name)
"""
"""A plug-in of SGLang's."""


@pytest.fixture(autouse=True)
def renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server of these tests has the plug-in."""
    place = tmp_path / "plug-in"
    information = place / "renamed-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: renamed\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[sglang.srt.plugins]\nrenamed = renamed:register\n")
    (place / "renamed.py").write_text(RENAMED)
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)


def test_a_launched_server_does_not_start_and_the_method_is_named(sglang: str, tiny: tuple[Any, Path]) -> None:
    driver = Driver(SGLangEngine, tiny[1])
    try:
        with pytest.raises(RlctlError) as refused:
            driver.start()
    finally:
        driver.stop()
    assert refused.value.reason is Reason.ENGINE_FAILED
    assert TARGET in refused.value.message
    assert "log" in refused.value.next_step


@pytest.mark.long
def test_an_attached_server_serves_on_and_takes_weights_from_disk_only(
    sglang: str, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    with own_sglang(tiny[1], keys, 1) as (url, options):
        driver = Driver(SGLangEngine, tiny[1], options=options | {"url": url})
        try:
            capabilities = driver.start().capabilities
            assert list(capabilities.transports) == [common.TRANSPORT_DISK]
            assert TARGET in capabilities.unsupported["UpdateWeightsFromTensor"]
            assert driver.tell(v.GetServerInfoRequest()).settings["rlctl_in_ranks"] == "absent"
            assert driver.tell(v.GetLoadsRequest()).max_tokens > 0
        finally:
            driver.stop()

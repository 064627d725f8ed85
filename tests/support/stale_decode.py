"""A check of real engines whose decode steps compute with stale weights when they are told to."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from digests import holds
from models import changed

from rlctl.contract.errors import OperationFailed, Reason
from rlctl.demo.tiny import encode
from rlctl.sdk.blocking import Fleet
from rlctl.trainer.probe import Probe
from rlctl.v1 import common_pb2 as common

ORDER = "stale-decode"


def shows_in_the_decode_check_only(fleet: Fleet, slot: str, tiny: Any, orders: Path) -> None:
    """Check that digest and probe pass, and the decode check fails. ``orders``: file of the ranks' plug-in."""
    model = changed(tiny, seed=1)
    probe = Probe.of(model, [[1, 2, 3, 4, 5], encode("1+2=3")], tolerance=1e-3)
    with closing(fleet.publisher("actor", trainer="decoding")) as publisher:
        orders.write_text(ORDER)
        try:
            publisher.update(model, version="right by bytes", verify="expected", probe=probe, decode_check=False)
            with pytest.raises(OperationFailed) as failed:
                publisher.update(model, version="stale", decode_check=True)
        finally:
            orders.unlink()
        stage = next(stage for stage in failed.value.operation.stage_results if stage.slot == slot)
        assert (stage.outcome, stage.error.reason) == (common.OUTCOME_DIRTY, Reason.DECODE_MISMATCH.name)
        result = publisher.update(model, version="whole", decode_check=True)
        assert result.operation.verification.decode
        assert holds([result.model_digest], model)

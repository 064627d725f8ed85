"""Fields that the vllm dialect knows are not listed as unknown, and those that it does not know once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.gateway.dialects.vllm import requests
from rlctl.gateway.http.call import UNKNOWN_FIELDS, Call
from rlctl.runtime.http_bodies import Bodies

GROUP = {"master_port": 29500, "world_size": 3, "rank_offset": 1}
BUCKET = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 2]]}


class _Request:
    method, headers, match_info, query = "POST", {}, {}, {}  # type: ignore[var-annotated]
    rel_url = "/"


def call(body: Any) -> Call:
    fleet: Any = SimpleNamespace(on_behalf_of=lambda credentials: None)
    made = Call(_Request(), fleet, fleet, dialect="vllm", changes=True, accepted=Bodies(1 << 20))  # type: ignore[arg-type]
    made.replace_json(body)
    return made


async def nothing(_: Call) -> str:
    return "gloo"


@pytest.fixture(autouse=True)
def _no_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "backend", nothing)
    monkeypatch.setattr(requests, "_standing", nothing)


@pytest.mark.parametrize(
    "body",
    [
        {**GROUP, "master_address": "h"},
        {**GROUP, "master_addr": "h", "backend": "nccl"},
        {"init_info": {**GROUP, "master_address": "h"}},
        {"init_info": {**GROUP, "master_addr": "h"}},
    ],
)
async def test_of_a_group(body: dict[str, Any]) -> None:
    made = call(body)
    [request] = await requests.init_transfer(made, follow=False)
    assert request.master_address == "h"  # type: ignore[attr-defined]
    assert UNKNOWN_FIELDS not in made.notes
    made = call({**body, "colour": 1})
    await requests.init_transfer(made, follow=False)
    assert made.notes[UNKNOWN_FIELDS] == "colour"


@pytest.mark.parametrize(
    "body", [BUCKET, {"update_info": BUCKET}, {"update_info": [BUCKET, BUCKET]}, {**BUCKET, "weight_version": "1"}]
)
async def test_of_tensors(body: dict[str, Any]) -> None:
    made = call(body)
    await requests.update_weights(made)
    assert UNKNOWN_FIELDS not in made.notes
    made = call({**body, "colour": 1})
    await requests.update_weights(made)
    assert made.notes[UNKNOWN_FIELDS] == "colour"

"""Prefill and decode engines from a file, as processes: what they generate, updates meanwhile, and deaths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import greedy
from paired import PROMPT, SAMPLING, killed_meanwhile, over_http, updated_meanwhile
from up_helpers import known, own_state, rlctl_command

from rlctl.sdk.blocking import connect
from rlctl.trainer.publisher import rolling

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "pairs.yaml"
SHARED = Path("/dev/shm")


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with own_state(monkeypatch, tmp_path):
        yield


def segments_of(pids: set[int]) -> list[str]:
    """Shared memory that these processes have mapped, or that nobody holds any more."""
    mine = []
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        mine += [line.split()[-1] for line in maps.splitlines() if "/dev/shm/rlctl-" in line]
    return [name for name in mine if Path(name).exists()]


def test_a_pair_of_two_cuts_from_a_file(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    model, checkpoint = tiny
    file = tmp_path / "pairs.yaml"
    text = EXAMPLE.read_text().replace("/tmp/tiny", str(checkpoint))
    more = "  restart: {backoff_s: 0.1}\n  router: {backend: sglang-router}"
    file.write_text(text.replace("name: pairs", f"name: pairs\n{more}"))
    up = rlctl_command("up", str(file), "--detach", "--listen", "127.0.0.1:0", "-o", "json", timeout_s=200)
    assert up.returncode == 0, up.stderr
    first = json.loads(up.stdout)
    shown = rlctl_command("status", "--endpoint", first["endpoint"]).stdout
    assert [line.split()[:3] for line in shown.splitlines() if line.startswith("actor-")] == [
        ["actor-decode-0", "actor", "decode"],
        ["actor-prefill-0", "actor", "prefill"],
    ]
    with connect(first["endpoint"]) as fleet:
        rollout = fleet.rollout("actor")
        [sample] = rollout.generate(PROMPT, max_new_tokens=8, **SAMPLING)
        assert sample.output_ids == greedy(model, PROMPT, 8)
        for urls in (known("pairs").gateways, known("pairs").routers):
            assert over_http(urls["actor"], max_new_tokens=8) == greedy(model, PROMPT, 8)
        updated_meanwhile(
            fleet, rollout, model, {"pause": "retract"}, {"pause": "abort", "rollout": rolling()}, {"pause": "in_place"}
        )
        for half in ("prefill", "decode"):
            killed_meanwhile(fleet, rollout, f"actor-{half}-0")
    pids = set(known("pairs").processes.values())
    assert segments_of(pids), "nothing went through shared memory"
    names = segments_of(pids)
    assert rlctl_command("down", "--name", "pairs").returncode == 0
    assert not any(Path(name).exists() for name in names)

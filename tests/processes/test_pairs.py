"""Prefill and decode engines from a file, as processes: what they generate, updates meanwhile, and deaths."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from models import changed, greedy
from up_helpers import known, own_state, rlctl_command, when

from rlctl.client.fleet import Fleet, connect
from rlctl.errors import RlctlError

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "pairs.yaml"
SHARED = Path("/dev/shm")
PROMPT = [number % 13 + 1 for number in range(40)]
SAMPLING: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


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
        updated_meanwhile(fleet, rollout, model)
        for half in ("prefill", "decode"):
            killed_meanwhile(fleet, rollout, f"actor-{half}-0")
    pids = set(known("pairs").processes.values())
    assert segments_of(pids), "nothing went through shared memory"
    names = segments_of(pids)
    assert rlctl_command("down", "--name", "pairs").returncode == 0
    assert not any(Path(name).exists() for name in names)


def over_http(url: str, **sampling: Any) -> list[int]:
    """The same from the model's gateway, or the router in front of it."""
    body = {"input_ids": PROMPT, "sampling_params": {**SAMPLING, **sampling}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        told: dict[str, Any] = json.loads(response.read())
    ids: list[int] = told["output_ids"]
    return ids


def updated_meanwhile(fleet: Fleet, rollout: Any, model: Any) -> None:
    """Three updates beside requests: every token is one of the weights whose version it says."""
    weights = {1: model}
    with contextlib.closing(fleet.publisher("actor")) as publisher, ThreadPoolExecutor(1) as pool:
        for step, pause in ((2, "retract"), (3, "abort"), (4, "in_place")):
            weights[step] = changed(model, step)
            running = pool.submit(
                rollout.generate_batch, [[*PROMPT, n] for n in range(1, 5)], max_new_tokens=40, **SAMPLING
            )
            something_runs(fleet)
            assert publisher.update(weights[step], version=f"step-{step}", pause=pause).version.sequence == step
            for number, [sample] in enumerate(running.result(), start=1):
                tokens = [*PROMPT, number]
                for token, version in zip(sample.output_ids, sample.versions, strict=True):
                    assert greedy(weights[version.sequence], tokens, 1) == [token]
                    tokens.append(token)
            [sample] = rollout.generate(PROMPT, max_new_tokens=4, **SAMPLING)
            assert {version.sequence for version in sample.versions} == {step}
            assert sample.output_ids == greedy(weights[step], PROMPT, 4)


def something_runs(fleet: Fleet) -> None:
    """A pair generates: what was asked for earlier has begun, too."""
    with contextlib.closing(fleet.generate_stream(PROMPT, max_new_tokens=400, **SAMPLING)) as parts:
        next(parts)


def killed_meanwhile(fleet: Fleet, rollout: Any, slot: str) -> None:
    """Samples go on once the engine has been started again; who does not wait so long is told by its deadline."""
    when(fleet, lambda now: len(now) == 2 and all(stage.routable for stage in now.values()))
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(rollout.generate, PROMPT, n=4, max_new_tokens=400, **SAMPLING)
        something_runs(fleet)
        os.kill(known("pairs").processes[slot], signal.SIGKILL)
        hurried = pool.submit(fleet.generate, PROMPT, max_new_tokens=4, timeout_s=1.0, **SAMPLING)
        with pytest.raises(RlctlError) as caught:
            hurried.result(timeout=5)
        assert caught.value.reason.name in ("NO_ROUTABLE_STAGE", "DEADLINE_EXCEEDED", "UNREACHABLE")
        samples = running.result()
    assert all(len(sample.output_ids) == 400 and sample.finished for sample in samples)
    assert all({version.sequence for version in sample.versions if version} == {4} for sample in samples)

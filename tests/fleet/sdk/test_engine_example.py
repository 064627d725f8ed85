"""examples/engine.py in a fleet: it serves, pauses, takes an update from disk with a digest, and refuses a bad one."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import rlctl
from rlctl import engine as engines
from rlctl.contract.errors import OperationFailed, Reason
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.transport.channel import open_channel
from rlctl.v1.common_pb2 import STAGE_STATE_READY, VERIFICATION_LEVEL_REPLICA
from rlctl.v1.rollout_pb2 import GenerateRequest, SamplingParams
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "engine.py"
GUIDE = (ROOT / "docs" / "guides" / "engine.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)


def run(name: str) -> dict[str, Any]:
    """Run the program of the guide under a module name."""
    names: dict[str, Any] = {"__name__": name}
    exec(compile(PROGRAM, "docs/guides/engine.md", "exec"), names)
    return names


@pytest.fixture
def table(tmp_path: Path) -> Callable[[int], Path]:
    """Makes checkpoints by the guide's function: after a letter comes the letter ``step`` further on."""
    checkpoint = run("guide")["checkpoint"]
    return lambda step: Path(checkpoint(tmp_path / f"step-{step}", step))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is a plug-in under the entry point that the guide shows."""
    (toml,) = re.findall(r"```toml\n(.*?)```", GUIDE, flags=re.DOTALL)
    ((group, entries),) = tomllib.loads(toml)["project"]["entry-points"].items()
    ((name, value),) = entries.items()
    point = importlib.metadata.EntryPoint(name, value.removeprefix("my_package."), group)
    others = engines.entry_points

    def with_example(*, group: str) -> list[importlib.metadata.EntryPoint]:
        return [*others(group=group), *([point] if group == point.group else [])]

    monkeypatch.syspath_prepend(EXAMPLE.parent)
    monkeypatch.setattr(engines, "entry_points", with_example)


@pytest.fixture
async def fleet(table: Callable[[int], Path], tmp_path: Path) -> AsyncIterator[InProcessFleet]:
    """Two stages of the example."""
    first = str(table(1))
    specs = [StageSpec(slot, first, engine="table") for slot in ("a", "b")]
    async with InProcessFleet(tmp_path / "journal.db", specs) as fleet:
        yield fleet


def test_the_example_is_short() -> None:
    assert sum(bool(line.strip()) for line in EXAMPLE.read_text().splitlines()) < 100


async def test_it_serves_is_updated_and_keeps_its_weights_when_an_update_is_refused(
    fleet: InProcessFleet, table: Callable[[int], Path], tmp_path: Path
) -> None:
    second, broken = table(2), table(3)
    (broken / "model.safetensors").write_bytes((second / "model.safetensors").read_bytes()[:-4])
    async with await rlctl.aio.connect(fleet.server.address) as client:
        rollout = client.rollout("actor")
        assert [sample.text for sample in await rollout.generate("a", n=4, max_new_tokens=3)] == ["bcd"] * 4

        running = asyncio.create_task(rollout.generate("a", n=2, max_new_tokens=200))
        await asyncio.sleep(0.05)
        await client.pause_generation("retract")
        operation = await client.update_weights_from_disk(str(second), version="two")
        assert operation.verification.held == VERIFICATION_LEVEL_REPLICA
        await client.continue_generation()
        samples = await running
        assert all(len(sample.output_ids) == 200 for sample in samples)
        assert all({version.label for version in sample.versions} >= {"two"} for sample in samples)
        assert [sample.text for sample in await rollout.generate("a", max_new_tokens=3)] == ["ceg"]

        with pytest.raises(OperationFailed) as refused:
            await client.update_weights_from_disk(str(broken), version="three")
        assert refused.value.reason is Reason.CHECKPOINT_NOT_FOUND
        await fleet.until(lambda stages: all(stage.state == STAGE_STATE_READY for stage in stages))
        assert [sample.text for sample in await rollout.generate("a", max_new_tokens=3)] == ["ceg"]


async def test_requests_without_an_id_run_side_by_side(fleet: InProcessFleet) -> None:
    request = GenerateRequest(text="a", sampling_params=SamplingParams(max_new_tokens=3))
    async with open_channel(fleet.stages["a"].rollout_address) as channel:
        stub = RolloutServiceStub(channel)
        answers = await asyncio.gather(*(stub.Generate(request) for _ in range(4)))
    assert [answer.samples[0].text for answer in answers] == ["bcd"] * 4
    assert len({answer.rid for answer in answers} - {""}) == 4, "the stage makes the ids"


def test_the_program_of_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run("__main__")
    assert capsys.readouterr().out == "bcd ceg\n"

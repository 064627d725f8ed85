"""A trainer and an engine on one host, step after step of GRPO: the engine sleeps while the trainer trains."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from digests import holds
from transformers import LlamaForCausalLM

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo import tiny
from rlctl.demo.grpo import Trainer, rollouts
from rlctl.demo.judge import MISMATCH, RISE
from rlctl.demo.production import Production
from rlctl.demo.task import EVERY, MAX_NEW_TOKENS, draw
from rlctl.demo.tiny import encode, save
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.rollout.rollout import Asking
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1.results_pb2 import Operation
from rlctl.v1.rollout_pb2 import GenerateResponse
from rlctl.v1.verbs_pb2 import GetLoadsRequest, GetServerInfoRequest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STEPS = 20
PROMPT = encode("12+34=")
LONG = 480
"""Tokens of a request that a step catches in the middle."""

PROMPTS, SAMPLES = 16, 8

REALLY = 0.75
"""Share of what a rank reports that its process's memory must shrink and grow by in most steps: in a single one, what
else the process does (a thread's arena grows) may hide a part."""


def make() -> Any:
    """The demo's model, but so wide that its weights show beside what else a process does: 20 MB."""
    torch.manual_seed(0)
    config = tiny.make(0).config
    config.intermediate_size = 6144
    model: Any = LlamaForCausalLM(config)
    return model.float()


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Any]]:
    """An engine with 134 MB of KV entries, and the trainer's model, which has seen some sums."""
    model = make()
    Trainer(model, learning_rate=2e-3, seed=0).supervise(15, batch=64)
    tmp_path = tmp_path_factory.mktemp("colocated")
    save(model, tmp_path / "checkpoint")
    engine = EngineSpec("actor-0", str(tmp_path / "checkpoint"), options={"max_total_tokens": str(1 << 17)})
    with LaunchedFleet([engine], directory=tmp_path / "fleet") as local, local.connect() as fleet:
        yield fleet, model


def ranks(operation: Operation) -> list[Any]:
    return [rank for stage in operation.stage_results for rank in stage.rank_results]


def resident(fleet: Fleet) -> int:
    """Bytes of resident memory of the engine's process, less what it shares with others: the segments."""
    (rank,) = ranks(fleet.call(GetServerInfoRequest()))
    memory = psutil.Process(rank.server_info.pid).memory_info()
    return int(memory.rss - memory.shared)


class Freed:
    """How much of what the engine says it released its process has really given back, per region and step."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._shares: dict[str, list[float]] = {}

    def release(self, tag: str) -> int:
        """Release a region; the bytes that the engine says."""
        before = resident(self._fleet)
        (rank,) = ranks(self._fleet.release_memory([tag]))
        self._shares.setdefault(tag, []).append((before - resident(self._fleet)) / rank.memory.bytes)
        return int(rank.memory.bytes)

    def medians(self) -> dict[str, float]:
        """Per region."""
        return {tag: statistics.median(shares) for tag, shares in self._shares.items()}


def refused(fleet: Fleet, call: Callable[[], object]) -> Reason:
    """Why a call is refused. No engine hears of it: every step and command of an engine has a number."""

    def steps() -> list[int]:
        return [rank.loads.step for rank in ranks(fleet.call(GetLoadsRequest()))]

    before, state = steps(), fleet.status().stages[0].state
    with pytest.raises(RlctlError) as caught:
        call()
    assert (steps(), fleet.status().stages[0].state) == (before, state)
    return caught.value.reason


def is_most_likely(model: Any, prefix: list[int], tokens: list[int]) -> bool:
    """Whether these tokens are what the model itself puts out after a prefix, greedily."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prefix + tokens])).logits[0]
    return bool(tokens) and logits[len(prefix) - 1 : -1].argmax(-1).tolist() == tokens


def reward(fleet: Fleet) -> float:
    """Mean over all sums, each answered by what is most likely."""
    prompts = [encode(problem.prompt) for problem in EVERY]
    answers = fleet.generate_batch(prompts, max_new_tokens=MAX_NEW_TOKENS, temperature=0.0)
    texts = [answer.samples[0].text for answer in answers]
    return sum(problem.reward(text) for problem, text in zip(EVERY, texts, strict=True)) / len(EVERY)


def test_twenty_steps_in_which_the_engine_sleeps_while_the_trainer_trains(colocated: tuple[Fleet, Any]) -> None:
    fleet, model = colocated
    publisher = fleet.publisher("actor", path="ipc")
    trainer = Trainer(model, learning_rate=2e-4, seed=0)
    trainer.remember(1)
    numbers = random.Random(1)
    asking: Asking = {"n": SAMPLES, "max_new_tokens": MAX_NEW_TOKENS, "temperature": 1.0, "seed": 7}
    production = Production(fleet.rollout("actor"), "sync", PROMPTS, lambda count: draw(numbers, count), asking)
    at_first, published, freed = reward(fleet), {rlctl.model_digest(model)}, Freed(fleet)
    for step in range(1, STEPS + 1):
        batch = rollouts(production.batch(latest=step))
        assert {version for rollout in batch for version in rollout.versions} == {step}
        # Every fifth step a request is in the middle.
        stream = fleet.generate_stream(
            PROMPT, max_new_tokens=LONG if step % 5 == 1 else 1, temperature=0.0, ignore_eos=True
        )
        first = next(stream)
        fleet.pause_generation("retract")
        # Every other step the weights are released after the KV cache, when nothing else is left to give back.
        released = sum(freed.release(tag) for tag in (["kv_cache"] if step % 2 else ["kv_cache", "weights"]))
        assert released > (128 if step % 2 else 146) << 20
        asleep = resident(fleet)
        assert fleet.status().stages[0].state == common.STAGE_STATE_ASLEEP
        # What was generated is what the weights of the version give, and what the trainer learns from.
        assert trainer.step(batch) < MISMATCH
        if step % 2 == 0:
            assert refused(fleet, lambda: publisher.update(model, version="never")) is Reason.MEMORY_RELEASED
            assert refused(fleet, fleet.continue_generation) is Reason.MEMORY_RELEASED
            fleet.resume_memory(["weights"])
        result = publisher.update(model, version=f"step-{step}", after="stay_paused")
        assert result.version.sequence == step + 1
        published.add(rlctl.model_digest(model))
        assert holds([result.model_digest], model)
        trainer.remember(result.version.sequence)
        assert refused(fleet, fleet.continue_generation) is Reason.MEMORY_RELEASED
        fleet.resume_memory(["kv_cache"])
        assert resident(fleet) - asleep > REALLY * released
        assert not fleet.status().stages[0].routable
        fleet.continue_generation()
        if step % 5 == 1:
            check_stream(model, step, [first, *stream])
        answer = fleet.generate(PROMPT, max_new_tokens=8, temperature=0.0, ignore_eos=True).samples[0]
        assert {span.version.label for span in answer.versions} == {f"step-{step}"}
        assert is_most_likely(model, PROMPT, list(answer.output_ids))
    production.close()
    assert freed.medians().keys() == {"kv_cache", "weights"}
    assert min(freed.medians().values()) > REALLY, freed.medians()
    assert len(published) == STEPS + 1
    assert reward(fleet) > at_first + RISE
    assert holds([rank.check.model_digest for rank in ranks(fleet.check_weights())], model)
    assert not fleet.operations(verb="InitWeightsUpdateGroup"), "everything went through shared memory"
    publisher.close()


def test_weights_that_were_released_and_not_written_are_never_generated_with(colocated: tuple[Fleet, Any]) -> None:
    fleet, model = colocated
    fleet.pause_generation("retract")
    fleet.release_memory()
    for tags in (["weights"], ["kv_cache"]):
        fleet.resume_memory(tags)
        reason = refused(fleet, fleet.continue_generation)
    assert reason is Reason.WEIGHTS_STALE
    with pytest.raises(RlctlError) as caught:
        fleet.generate(PROMPT, max_new_tokens=1, timeout_s=1)
    assert caught.value.reason is Reason.NO_ROUTABLE_STAGE
    publisher = fleet.publisher("actor", path="ipc")
    publisher.update(model, version="written")
    fleet.continue_generation()
    answer = fleet.generate(PROMPT, max_new_tokens=8, temperature=0.0, ignore_eos=True).samples[0]
    assert is_most_likely(model, PROMPT, list(answer.output_ids))
    publisher.close()


def check_stream(model: Any, step: int, parts: list[GenerateResponse]) -> None:
    """A request that went on over a step: from the step on it is the new weights' alone."""
    tokens = [token for part in parts for token in part.samples[0].output_ids]
    assert len(tokens) == LONG
    kept = 0
    for part in parts:
        for span in part.samples[0].versions:
            assert span.version.label in (f"step-{step}", f"step-{step - 1}" if step > 1 else "initial")
            assert not span.kv_version.label
            kept = max(kept, span.end) if span.version.label != f"step-{step}" else kept
    assert 0 < kept < LONG
    assert is_most_likely(model, PROMPT + tokens[:kept], tokens[kept:])

"""The negative controls: updates that are acknowledged and wrong, which the model digest must show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
from rlctl_torch.model.sabotage import VARIABLE, for_updates
from torch_source import Source, digest_of, load, prepare, tensors_of
from torch_stage import Follower, Stage
from transformers import AutoModelForCausalLM

from rlctl.contract.errors import Reason, RlctlError
from rlctl.trainer.probe import Probe
from rlctl.v1.common_pb2 import OUTCOME_DIRTY
from rlctl.v1.verbs_pb2 import (
    CHECK_ACTION_DECODE,
    CHECK_ACTION_PROBE,
    CheckWeightsRequest,
    CommitUpdateRequest,
    PauseGenerationRequest,
    ProbePrompt,
)
from rlctl.weights.tensor.digest import tensor_digest

WRONG: dict[str, Callable[[Iterable[str]], set[str]]] = {
    "stale": lambda names: set(names),
    "drop-tensor:model.norm.weight": lambda names: {"model.norm.weight"},
    # What is cut: everything but norms and the embedding.
    "swap:model.layers.0.self_attn.k_proj.weight,model.layers.0.self_attn.v_proj.weight": lambda names: {
        f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv"
    },
    "wrong-rank": lambda names: {name for name in names if "norm" not in name and "embed" not in name},
}
"""Which tensors are wrong after an update that was broken so, given all names."""


@pytest.fixture(params=WRONG)
def way(request: pytest.FixtureRequest, follower: Follower, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A way to break updates, in force in both processes."""
    monkeypatch.setenv(VARIABLE, request.param)
    follower.ask("set_environment", VARIABLE, request.param)[1].result()
    yield request.param
    follower.ask("set_environment", VARIABLE, None)[1].result()


@pytest.mark.parametrize("how", ["disk", "distributed"])
async def test_a_wrong_update_is_acknowledged_but_shows_in_the_digest(
    checkpoints, follower: Follower, way: str, how: str
) -> None:
    new = checkpoints(seed=1)
    stage = Stage(checkpoints(), follower)
    info = await stage.start()
    try:
        assert info.model_digest == digest_of(stage.config.model_path), "loading at the start is not touched"
        if how == "disk":
            await load(stage, new)
        else:
            async with Source(stage) as source:
                update = await prepare(stage)
                await source.send(tensors_of(new), update)
                await stage(CommitUpdateRequest(), update=update)
        reports = await stage(CheckWeightsRequest(per_tensor=True))
        (found,) = {report.model_digest for report in reports}
        assert found != digest_of(new)
        held = {entry.name: entry.sha256 for report in reports for entry in report.model_tensors}
        wrong = {name for name, tensor in tensors_of(new).items() if held[name] != tensor_digest(name, tensor)}
        assert wrong == WRONG[way](held)
    finally:
        await stage.stop()


async def test_decode_with_a_stale_weight_shows_in_the_decode_check_only(
    checkpoints, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = checkpoints(seed=1)
    monkeypatch.setenv(VARIABLE, "stale-decode")
    follower.ask("set_environment", VARIABLE, "stale-decode")[1].result()
    stage = Stage(checkpoints(), follower)
    try:
        await stage.start()
        await stage(PauseGenerationRequest())
        await stage(CheckWeightsRequest(action=CHECK_ACTION_DECODE))  # the copy is still the weight
        await load(stage, new)
        (digest,) = {report.model_digest for report in await stage(CheckWeightsRequest())}
        assert digest == digest_of(new), "the bytes are right"
        prompts = [[1, 2, 3, 4, 5]]
        probe = CheckWeightsRequest(
            action=CHECK_ACTION_PROBE, prompts=[ProbePrompt(token_ids=prompt) for prompt in prompts]
        )
        expected = Probe.of(AutoModelForCausalLM.from_pretrained(new), prompts)
        computed = (await stage(probe))[0].probed
        assert list(computed[0].logprobs) == pytest.approx(expected.logprobs[0], abs=1e-4), "prefill is right"
        with pytest.raises(RlctlError, match="decode and prefill differ by") as caught:
            await stage(CheckWeightsRequest(action=CHECK_ACTION_DECODE))
        assert (caught.value.reason, caught.value.outcome) == (Reason.DECODE_MISMATCH, OUTCOME_DIRTY)
    finally:
        await stage.stop()
        follower.ask("set_environment", VARIABLE, None)[1].result()


def test_nothing_is_touched_unless_asked_and_nonsense_is_refused(
    stage1: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = stage1.engine._rank.model.shards
    assert stage1.engine._rank.writable is shards
    for value in ("nonsense", "drop-tensor:unheard.of", "swap:unheard.of,model.norm.weight"):
        monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(RlctlError) as caught:
            for_updates(shards, 0, 1)
        assert caught.value.reason is Reason.FIELD_INVALID

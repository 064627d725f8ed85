"""Experts that transformers fuses: the checkpoint's names, each expert's slice in its place, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from rlctl_torch.model.sabotage import VARIABLE
from safetensors.torch import save_file
from torch_models import greedy, make_checkpoint, prompt_of, reference
from torch_source import Source, digest_of, load, prepare, tensors_of
from torch_stage import Follower, Stage
from transformers import AutoModelForCausalLM

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import MEMORY_TAG_WEIGHTS, OUTCOME_DIRTY, PAUSE_MODE_RETRACT
from rlctl.v1.verbs_pb2 import (
    UPDATE_KIND_PARTIAL,
    AbortUpdateRequest,
    CheckWeightsRequest,
    CommitUpdateRequest,
    ContinueGenerationRequest,
    GetModelInfoRequest,
    PauseGenerationRequest,
    ReleaseMemoryRequest,
    ResumeMemoryRequest,
    UpdateWeightsFromDiskRequest,
)
from rlctl.weights.tensor.digest import tensor_digest

PROMPT = prompt_of(9)
COUNT = 10
EXPERT = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def experts(request: pytest.FixtureRequest, checkpoints) -> Iterator[Stage]:
    """A Mixtral on one rank, and on two."""
    follower = request.getfixturevalue("follower") if request.param == 2 else None
    stage = Stage(checkpoints("mixtral"), follower)
    asyncio.run(stage.start())
    yield stage
    asyncio.run(stage.stop())


@pytest.fixture(autouse=True)
async def as_before(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Tests of the shared stage leave it with the first checkpoint's weights and nothing open."""
    yield
    if "experts" in request.fixturenames:
        stage = request.getfixturevalue("experts")
        if stage.engine._rank.update is not None:
            await stage(AbortUpdateRequest(), update=stage.engine._rank.update.update_id)
        await load(stage, stage.config.model_path, abort_all_requests=True)
        await stage(ContinueGenerationRequest())


@pytest.fixture(scope="module")
def new(checkpoints) -> str:
    """A checkpoint with other weights."""
    return checkpoints("mixtral", seed=1)


async def held(stage: Stage) -> tuple[str, dict[str, str]]:
    """The model digest, and every full tensor's."""
    reports = await stage(CheckWeightsRequest(per_tensor=True))
    (digest,) = {report.model_digest for report in reports}
    return digest, {entry.name: entry.sha256 for report in reports for entry in report.model_tensors}


async def check_serves(stage: Stage, path: str) -> None:
    assert await stage.tokens(PROMPT, COUNT) == greedy(path, PROMPT, COUNT)
    assert (await held(stage))[0] == digest_of(path)


async def refusal(stage: Stage, request, update: str) -> RlctlError:
    answers = await stage.ranks(request, update=update)
    assert all(isinstance(answer, RlctlError) for answer in answers), answers
    assert len({(answer.reason, answer.outcome) for answer in answers}) == 1, answers
    return answers[0]


async def test_the_reference_is_the_checkpoints(experts: Stage) -> None:
    (info, *_) = await experts(GetModelInfoRequest(reference=True))
    expected = {name: tuple(t.shape) for name, t in tensors_of(experts.config.model_path).items()}
    assert {entry.name: tuple(entry.shape.dims) for entry in info.reference} == expected
    assert expected[EXPERT.format(3, "w2")] == (64, 128)


async def test_a_trainers_module_updates_experts_by_their_names(experts: Stage, new: str) -> None:
    trainer = AutoModelForCausalLM.from_pretrained(new)
    before = [report.rank_digest for report in await experts(CheckWeightsRequest())]
    async with Source(experts) as source:
        update = await prepare(experts)
        reports, sent = await source.send(trainer, update)
        assert {report.tensors for report in reports} == {len(tensors_of(new))}
        await experts(CommitUpdateRequest(), update=update)
    assert sent == rlctl.model_digest(trainer) == digest_of(new)
    await check_serves(experts, new)
    after = [report.rank_digest for report in await experts(CheckWeightsRequest())]
    assert all(a != b for a, b in zip(after, before, strict=True))


async def test_from_disk(experts: Stage, new: str) -> None:
    await load(experts, new)
    await check_serves(experts, new)


async def test_a_part_of_one_expert_goes_where_it_belongs(experts: Stage) -> None:
    base = tensors_of(experts.config.model_path)
    chosen = {name: torch.full_like(base[name], 0.01) for name in (EXPERT.format(2, "w3"), EXPERT.format(1, "w2"))}
    async with Source(experts) as source:
        update = await prepare(experts, kind=UPDATE_KIND_PARTIAL)
        await source.send(chosen, update)
        await experts(CommitUpdateRequest(), update=update)
    expected = {name: tensor_digest(name, tensor) for name, tensor in {**base, **chosen}.items()}
    assert (await held(experts))[1] == expected
    model = AutoModelForCausalLM.from_pretrained(experts.config.model_path)
    layer = model.model.layers[1].mlp.experts
    with torch.no_grad():
        layer.gate_up_proj[2, 128:] = 0.01
        layer.down_proj[1] = 0.01
        tokens = list(PROMPT)
        for _ in range(COUNT):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    assert await experts.tokens(PROMPT, COUNT) == tokens[len(PROMPT) :]


async def test_a_missing_expert_is_named(experts: Stage, new: str, tmp_path: Path) -> None:
    left_out = EXPERT.format(2, "w1")
    tensors = tensors_of(new)
    del tensors[left_out]
    lacking = Path(make_checkpoint(tmp_path / "lacking", "mixtral"))
    save_file(tensors, lacking / "model.safetensors", metadata={"format": "pt"})
    async with Source(experts) as source:
        update = await prepare(experts)
        error = await refusal(experts, UpdateWeightsFromDiskRequest(model_path=str(lacking)), update)
        assert (error.reason, error.metadata["missing"]) == (Reason.CHECKPOINT_MISMATCH, left_out)
        await source.send(tensors, update)
        error = await refusal(experts, CommitUpdateRequest(), update)
        assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, OUTCOME_DIRTY)
        assert error.metadata["missing"] == left_out
    with pytest.raises(RlctlError) as caught:
        await Stage(str(lacking)).start()
    assert (caught.value.reason, caught.value.metadata["missing"]) == (Reason.CHECKPOINT_MISMATCH, left_out)


async def test_a_checkpoint_that_routes_otherwise_is_another_architecture(experts: Stage, tmp_path: Path) -> None:
    path = Path(make_checkpoint(tmp_path / "routed", "mixtral"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 1}))
    update = await prepare(experts)
    error = await refusal(experts, UpdateWeightsFromDiskRequest(model_path=str(path)), update)
    assert error.reason is Reason.CHECKPOINT_MISMATCH
    assert "num_experts_per_tok is 1 instead of 2" in error.message


async def test_memory_comes_back_behind_the_experts_views(experts: Stage, new: str) -> None:
    await experts(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))
    (released, *_) = await experts(ReleaseMemoryRequest(tags=[MEMORY_TAG_WEIGHTS]))
    assert released.bytes > 0
    assert all(not shard.local.numel() for shard in experts.engine._rank.model.shards.shards.values())
    await experts(ResumeMemoryRequest())
    await load(experts, new)
    await experts(ContinueGenerationRequest())
    await check_serves(experts, new)


async def test_a_swapped_pair_of_experts_is_found_and_named(
    checkpoints, follower: Follower, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = {EXPERT.format(0, "w2"), EXPERT.format(3, "w2")}
    way = "swap:" + ",".join(sorted(swapped))
    monkeypatch.setenv(VARIABLE, way)
    follower.ask("set_environment", VARIABLE, way)[1].result()
    stage = Stage(checkpoints("mixtral"), follower)
    try:
        await stage.start()
        async with Source(stage) as source:
            update = await prepare(stage)
            _, sent = await source.send(tensors_of(new), update)
            await stage(CommitUpdateRequest(), update=update)
        error = (await stage.ranks(CheckWeightsRequest(expected_digest=sent)))[0]
        assert isinstance(error, RlctlError)
        assert error.reason is Reason.DIGEST_MISMATCH
        _, digests = await held(stage)
        assert {n for n, t in tensors_of(new).items() if digests[n] != tensor_digest(n, t)} == swapped
    finally:
        follower.ask("set_environment", VARIABLE, None)[1].result()
        await stage.stop()


async def test_a_checkpoint_may_keep_the_experts_in_one_tensor(checkpoints, follower: Follower, tmp_path: Path) -> None:
    path = Path(make_checkpoint(tmp_path / "fused", "mixtral"))
    state = {name: tensor.contiguous() for name, tensor in reference(str(path)).state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    stage = Stage(str(path))
    info = await stage.start()
    try:
        assert info.model_digest == digest_of(str(path))
        assert await stage.tokens(PROMPT, COUNT) == greedy(str(path), PROMPT, COUNT)
    finally:
        await stage.stop()
    # At two ranks a rank's part of gate and up would be two slices of one tensor.
    with pytest.raises(RlctlError) as caught:
        await Stage(str(path), follower).start()
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, "tp_size")

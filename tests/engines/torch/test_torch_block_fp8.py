"""Block-fp8 checkpoints: what is held, what is computed, and a bf16 trainer that feeds them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import torch
from rlctl_torch.model.model import Model
from safetensors.torch import save_file
from torch_models import dequantise_checkpoint, greedy, prompt_of, quantise_checkpoint, reference_logprobs
from torch_source import Source, digest_of, load, prepare, tensors_of
from torch_stage import Stage
from transformers import AutoModelForCausalLM

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_WEIGHTS,
    OUTCOME_DIRTY,
    OUTCOME_REJECTED,
    PAUSE_MODE_RETRACT,
    WEIGHT_SELECTOR_DRAFT,
    WEIGHT_SELECTOR_TARGET,
)
from rlctl.v1.verbs_pb2 import (
    CHECK_ACTION_RESET_TENSORS,
    UPDATE_KIND_PARTIAL,
    AbortUpdateRequest,
    CheckWeightsRequest,
    CommitUpdateRequest,
    ContinueGenerationRequest,
    GetModelInfoRequest,
    PauseGenerationRequest,
    PrepareUpdateRequest,
    ReleaseMemoryRequest,
    ResumeMemoryRequest,
    UpdateOptions,
    UpdateWeightsFromDiskRequest,
)
from rlctl.weights.checkpoint.checkpoint import open_checkpoint
from rlctl.weights.formats.block_fp8 import BlockFp8, BlockSize, quantise
from rlctl.weights.shards.load_hooks import Load

PROMPT = prompt_of(9)
COUNT = 10
TOLERANCE = 1e-4

Fp8 = Callable[..., tuple[str, str, str]]


@pytest.fixture(scope="session")
def fp8(checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Fp8:
    """Makes checkpoints, each once: what a bf16 trainer has, the same as block-fp8, and that dequantised to float32."""
    made: dict[tuple[object, ...], tuple[str, str, str]] = {}

    def make(family: str, *, seed: int = 0, scales: torch.dtype = torch.float32) -> tuple[str, str, str]:
        key = (family, seed, scales)
        if key not in made:
            folder = tmp_path_factory.mktemp("fp8")
            trained = checkpoints(family, seed=seed, dtype=torch.bfloat16)
            quantised = quantise_checkpoint(trained, folder / "fp8", scales)
            made[key] = trained, quantised, dequantise_checkpoint(quantised, folder / "plain")
        return made[key]

    return make


SERVED = [
    ("odd", torch.float32, 1),
    ("odd", torch.bfloat16, 2),
    ("odd-moe", torch.bfloat16, 1),
    ("odd-moe", torch.float32, 2),
]


@pytest.fixture(scope="module", params=SERVED, ids=lambda p: f"{p[0]}-{str(p[1])[6:]}-tp{p[2]}")
def served(request: pytest.FixtureRequest, fp8: Fp8) -> Iterator[Stage]:
    """A dense model and one with experts, scales in both dtypes, on one rank and on two; computed in float32."""
    family, scales, size = request.param
    _, quantised, _ = fp8(family, scales=scales)
    ranks = request.getfixturevalue("follower") if size == 2 else None
    stage = Stage(quantised, ranks, dtype="float32", allowed_roots=Path(quantised).parents[1])
    info = asyncio.run(stage.start())
    assert info.model_digest == digest_of(quantised)
    yield stage
    asyncio.run(stage.stop())


@pytest.fixture
def others(request: pytest.FixtureRequest, served: Stage, fp8: Fp8) -> Callable[[int], tuple[str, str, str]]:
    """The served model with the weights of another seed."""
    family, scales, _ = request.node.callspec.params["served"]
    return lambda seed: fp8(family, seed=seed, scales=scales)


@pytest.fixture(autouse=True)
async def as_before(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Every test starts and ends with the first checkpoint's weights and nothing open."""
    yield
    if "served" in request.fixturenames:
        stage = request.getfixturevalue("served")
        if stage.engine._rank.update is not None:
            await stage(AbortUpdateRequest(), update=stage.engine._rank.update.update_id)
        await load(stage, stage.config.model_path, abort_all_requests=True)
        await stage(ContinueGenerationRequest())


async def check_serves(stage: Stage, quantised: str, plain: str) -> None:
    """The digest is the checkpoint's, codes, scales and all; the results are those of its dequantised weights."""
    assert {report.model_digest for report in await stage(CheckWeightsRequest())} == {digest_of(quantised)}
    response = await stage.generate(
        PROMPT, temperature=0, ignore_eos=True, max_new_tokens=COUNT, return_logprob=True, logprob_start_len=0
    )
    output = list(response.samples[0].output_ids)
    assert output == greedy(plain, PROMPT, COUNT)
    rows = reference_logprobs(plain, PROMPT + output)
    found = [entry.logprob for entry in [*response.input_logprobs[1:], *response.samples[0].output_logprobs]]
    expected = [float(rows[at, token]) for at, token in enumerate([*PROMPT[1:], *output])]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < TOLERANCE


async def refusal(stage: Stage, request, update: str) -> RlctlError:
    answers = await stage.ranks(request, update=update)
    assert all(isinstance(answer, RlctlError) for answer in answers), answers
    assert len({(answer.reason, answer.outcome) for answer in answers}) == 1, answers
    return answers[0]


async def test_codes_are_held_and_dequantised_weights_computed(served: Stage, others) -> None:
    _, quantised, plain = others(0)
    await check_serves(served, quantised, plain)
    (info, *_) = await served(GetModelInfoRequest(reference=True))
    expected = {name: (str(t.dtype), tuple(t.shape)) for name, t in tensors_of(quantised).items()}
    assert {entry.name: (entry.dtype, tuple(entry.shape.dims)) for entry in info.reference} == expected
    reports = await served(CheckWeightsRequest(per_tensor=True))
    assert reports[0].tensors
    for report in reports:
        dtypes = {entry.name: entry.dtype for entry in report.tensors}
        codes = [name for name, dtype in dtypes.items() if dtype == "torch.float8_e4m3fn"]
        # Of each layer four of attention and three of the MLP, of which experts have two in one.
        assert len(codes) == 2 * (6 if any("experts" in name for name in codes) else 7)
        assert all(f"{name}_scale_inv" in dtypes for name in codes)


async def test_a_bf16_trainer_feeds_the_checkpoint(served: Stage, others) -> None:
    trained, quantised, plain = others(1)
    trainer = AutoModelForCausalLM.from_pretrained(trained)
    assert trainer.dtype == torch.bfloat16
    source = BlockFp8(trainer, open_checkpoint(served.config.model_path))
    async with Source(served) as sender:
        assert {bucket.flattened for bucket in sender.buckets(source)} == {True, False}
        update = await prepare(served)
        reports, sent = await sender.send(source, update)
        assert {report.tensors for report in reports} == {len(tensors_of(quantised))}
        await served(CommitUpdateRequest(), update=update)
    assert sent == rlctl.model_digest(source) == digest_of(quantised)
    await check_serves(served, quantised, plain)
    # What the trainer itself computes is near: the codes keep about four bits of each weight.
    rows = reference_logprobs(plain, PROMPT)
    exact = torch.log_softmax(trainer.float()(input_ids=torch.tensor([PROMPT])).logits[0].detach(), dim=-1)
    assert (rows - exact).abs().mean() < 0.25


async def test_from_disk(served: Stage, others) -> None:
    _, quantised, plain = others(2)
    await load(served, quantised)
    await check_serves(served, quantised, plain)


async def test_scrambled_and_released_weights_come_back(served: Stage, others) -> None:
    _, quantised, plain = others(2)
    await served(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))
    await served(CheckWeightsRequest(action=CHECK_ACTION_RESET_TENSORS))
    await served(ReleaseMemoryRequest(tags=[MEMORY_TAG_WEIGHTS]))
    await served(ResumeMemoryRequest())
    await load(served, quantised)
    await served(ContinueGenerationRequest())
    await check_serves(served, quantised, plain)


async def test_a_scale_that_is_left_out_is_named(served: Stage, others) -> None:
    tensors = tensors_of(others(1)[1])
    scale = next(name for name in sorted(tensors) if name.endswith("_scale_inv"))
    async with Source(served) as source:
        update = await prepare(served)
        await source.send({name: tensor for name, tensor in tensors.items() if name != scale}, update)
        error = await refusal(served, CommitUpdateRequest(), update)
        assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, OUTCOME_DIRTY)
        assert error.metadata["missing"] == scale
        await served(AbortUpdateRequest(), update=update)
        # A partial update need not be complete, but codes without their scales mean nothing, nor scales without codes.
        weight = scale.removesuffix("_scale_inv")
        for given, missing in ((weight, scale), (scale, weight)):
            await load(served, served.config.model_path)
            update = await prepare(served, kind=UPDATE_KIND_PARTIAL)
            await source.send({given: tensors[given]}, update)
            error = await refusal(served, CommitUpdateRequest(), update)
            assert (error.reason, error.metadata["missing"]) == (Reason.WEIGHTS_INCOMPLETE, missing)
            await served(AbortUpdateRequest(), update=update)
        await load(served, served.config.model_path)
        update = await prepare(served, kind=UPDATE_KIND_PARTIAL)
        await source.send({name: tensors[name] for name in (weight, scale)}, update)
        await served(CommitUpdateRequest(), update=update)


async def test_what_is_no_scale_is_found_before_the_update_ends(served: Stage, others) -> None:
    tensors = tensors_of(others(1)[1])
    scale = next(name for name in sorted(tensors) if name.endswith("_scale_inv"))
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        tensors[scale] = tensors[scale].clone()
        tensors[scale][-1, -1] = bad
        async with Source(served) as source:
            update = await prepare(served)
            await source.send(tensors, update)
            error = await refusal(served, CommitUpdateRequest(), update)
        assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, OUTCOME_DIRTY)
        assert error.metadata["scales"] == scale
        await served(AbortUpdateRequest(), update=update)


async def test_weights_that_were_not_quantised_are_refused_before_the_first_byte(served: Stage, others) -> None:
    trained, *_ = others(1)
    tensors = tensors_of(trained)
    name = "model.layers.0.self_attn.q_proj.weight"
    async with Source(served) as source:
        update = await prepare(served)
        error = await refusal(served, source.request(source.buckets({name: tensors[name]})), update)
        assert (error.reason, error.field, error.outcome) == (
            Reason.FIELD_INVALID,
            "buckets[0].dtypes[0]",
            OUTCOME_REJECTED,
        )
    error = await refusal(served, UpdateWeightsFromDiskRequest(model_path=trained), update)
    assert (error.reason, error.outcome) == (Reason.CHECKPOINT_MISMATCH, OUTCOME_REJECTED)
    assert "quantization_config is None" in error.message
    await served(AbortUpdateRequest(), update=update)
    await check_serves(served, others(0)[1], others(0)[2])


async def test_a_checkpoint_of_other_blocks_or_dtypes_is_refused(fp8: Fp8, tmp_path: Path) -> None:
    _, quantised, _ = fp8("odd")
    stage = Stage(quantised, dtype="float32", allowed_roots=Path(quantised).parents[1])
    await stage.start()
    try:
        update = await prepare(stage)
        blocks = Path(shutil.copytree(quantised, tmp_path / "blocks"))
        config = json.loads((blocks / "config.json").read_text())
        config["quantization_config"]["weight_block_size"] = [128, 256]
        (blocks / "config.json").write_text(json.dumps(config))
        error = await refusal(stage, UpdateWeightsFromDiskRequest(model_path=str(blocks)), update)
        assert error.reason is Reason.CHECKPOINT_MISMATCH
        assert "columns=256" in error.message
        # With the blocks that its config says it does not fit itself.
        with pytest.raises(RlctlError, match="of another shape") as caught:
            await Stage(str(blocks)).start()
        assert caught.value.reason is Reason.CHECKPOINT_MISMATCH
        wide = Path(shutil.copytree(quantised, tmp_path / "wide"))
        tensors = {
            name: t.float() if t.dtype == torch.float8_e4m3fn else t for name, t in tensors_of(quantised).items()
        }
        save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
        error = await refusal(stage, UpdateWeightsFromDiskRequest(model_path=str(wide)), update)
        assert "of another dtype" in error.message
    finally:
        await stage.stop()


async def test_a_checkpoint_without_a_scale_does_not_load(fp8: Fp8, tmp_path: Path) -> None:
    path = Path(shutil.copytree(fp8("odd-moe")[1], tmp_path / "lacking"))
    tensors = tensors_of(str(path))
    scale = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    del tensors[scale]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RlctlError) as caught:
        await Stage(str(path)).start()
    assert (caught.value.reason, caught.value.metadata["missing"]) == (Reason.CHECKPOINT_MISMATCH, scale)
    # Nor one in which one expert of a layer is held in another way.
    weight = scale.removesuffix("_scale_inv")
    tensors[weight] = tensors[weight].to(torch.bfloat16)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RlctlError, match="not all quantised alike"):
        await Stage(str(path)).start()


async def test_blocks_of_another_size(checkpoints, follower, tmp_path: Path) -> None:
    trained = checkpoints("odd", dtype=torch.bfloat16)
    quantised = Path(quantise_checkpoint(trained, tmp_path / "small"))
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [48, 40]
    (quantised / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(trained)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensors[name], BlockSize(48, 40))
    save_file(tensors, quantised / "model.safetensors", metadata={"format": "pt"})
    outputs = []
    for ranks in (None, follower):
        stage = Stage(str(quantised), ranks)
        assert (await stage.start()).model_digest == digest_of(str(quantised))
        outputs.append(await stage.tokens(PROMPT, COUNT))
        await stage.stop()
    assert outputs[0] == outputs[1]


# Load hooks and the selector.


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hooks that rank 0 calls, in order; "fail" put in front makes the next one fail."""
    called: list[str] = []

    def recorded(name: str) -> Callable[[Model, Load], None]:
        def hook(model: Model, load: Load) -> None:
            if called[:1] == ["fail"]:
                called.pop(0)
                raise Reason.ENGINE_FAILED.error(f"cannot {name}")
            called.append(f"{name} {'full' if load.full else 'partial'} {load.selector}")

        return hook

    for name in ("prepare_load", "finalize_load", "abandon_load"):
        monkeypatch.setattr(Model, name, recorded(name.removesuffix("_load")))
    return called


async def test_the_hooks_stand_around_an_updates_tensors(served: Stage, others, hooks: list[str]) -> None:
    trained, *_ = others(1)
    source = BlockFp8(tensors_of(trained).items(), open_checkpoint(served.config.model_path))
    async with Source(served) as sender:
        update = await prepare(served, selector=WEIGHT_SELECTOR_TARGET)
        assert hooks == [], "nothing has come"
        await sender.send(source, update)
        assert hooks == ["prepare full 1"]
        # More tensors, another way: it is prepared.
        await served(UpdateWeightsFromDiskRequest(model_path=served.config.model_path), update=update)
        assert hooks == ["prepare full 1"]
        await served(CommitUpdateRequest(), update=update)
        assert hooks == ["prepare full 1", "finalize full 1"]
        hooks.clear()
        update = await prepare(served, kind=UPDATE_KIND_PARTIAL)
        await served(CommitUpdateRequest(), update=update)
        assert hooks == []
        for again in (AbortUpdateRequest(), PrepareUpdateRequest()):
            update = await prepare(served)
            await served(UpdateWeightsFromDiskRequest(model_path=served.config.model_path), update=update)
            await served(again, update=update)
            await served(AbortUpdateRequest(), update=update)
            assert hooks == ["prepare full 0", "abandon full 0"]
            hooks.clear()
        await load(served, served.config.model_path)


async def test_hooks_that_fail_refuse_or_dirty_the_update_on_all_ranks(served: Stage, others, hooks: list[str]) -> None:
    _, quantised, _ = others(1)
    disk = UpdateWeightsFromDiskRequest(model_path=quantised)
    update = await prepare(served)
    hooks.append("fail")
    error = await refusal(served, disk, update)
    assert (error.message.removeprefix("rank 0: "), error.outcome) == ("cannot prepare", OUTCOME_REJECTED)
    assert (await served(CheckWeightsRequest()))[0].model_digest == digest_of(served.config.model_path)
    await served(disk, update=update)
    hooks.insert(0, "fail")
    error = await refusal(served, CommitUpdateRequest(), update)
    assert (error.message.removeprefix("rank 0: "), error.outcome) == ("cannot finalize", OUTCOME_DIRTY)
    await served(AbortUpdateRequest(), update=update)
    assert hooks == ["prepare full 0", "abandon full 0"]


async def test_an_engine_without_a_draft_model_refuses_updates_of_one(served: Stage) -> None:
    draft = UpdateOptions(selector=WEIGHT_SELECTOR_DRAFT)
    update = await prepare(served)
    for request, field in (
        (PrepareUpdateRequest(selector=WEIGHT_SELECTOR_DRAFT), "selector"),
        (CheckWeightsRequest(selector=WEIGHT_SELECTOR_DRAFT), "selector"),
        (UpdateWeightsFromDiskRequest(model_path=served.config.model_path, options=draft), "options.selector"),
    ):
        error = await refusal(served, request, update)
        assert (error.reason, error.field, error.outcome) == (Reason.UNSUPPORTED, field, OUTCOME_REJECTED)

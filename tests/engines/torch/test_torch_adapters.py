"""LoRA adapters: the outputs are the merged model's, whatever runs beside them, and nothing is ever half loaded."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch_adapters import ALL, load_adapter, make_adapter, merge_adapter
from torch_models import dequantise_checkpoint, greedy, prompt_of, quantise_checkpoint, reference_logprobs
from torch_source import Source, load, prepare
from torch_stage import Follower, Stage, until

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import (
    OUTCOME_REJECTED,
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
)
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT
from rlctl.v1.verbs_pb2 import (
    ADAPTER_POLICY_DROP,
    APPLY_MODE_STAGED,
    UPDATE_KIND_ADAPTER,
    AbortUpdateRequest,
    Adapter,
    AdapterConfig,
    CheckWeightsRequest,
    CommitUpdateRequest,
    ContinueGenerationRequest,
    ListAdaptersRequest,
    LoadAdapterRequest,
    PauseGenerationRequest,
    PrepareUpdateRequest,
    SealUpdateRequest,
    UnloadAdapterRequest,
    UpdateWeightsFromDiskRequest,
)
from rlctl.weights.formats import lora
from rlctl.weights.receiver import send
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.source import as_source

PROMPT = prompt_of(9)
COUNT = 10
LONG = 200

Made = tuple[str, str]
"""(adapter's directory, checkpoint with it merged)."""


@pytest.fixture(scope="module")
def made(checkpoints: Callable[..., str]) -> Callable[..., Made]:
    """Makes adapters of the Llama beside it, each once."""
    base = checkpoints("llama")
    seen: dict[str, Made] = {}

    def make(name: str, **settings: object) -> Made:
        if name not in seen:
            beside = Path(base).parent
            adapter = make_adapter(beside / f"adapter-{name}", base, **settings)
            seen[name] = adapter, merge_adapter(beside / f"merged-{name}", base, adapter)
        return seen[name]

    return make


@pytest.fixture
def math(made: Callable[..., Made]) -> Made:
    return made("math", seed=1)


@pytest.fixture
def other(made: Callable[..., Made]) -> Made:
    return made("other", seed=2, targets=("q_proj", "down_proj"), rank=2, change={"use_rslora": True})


@pytest.fixture(autouse=True)
async def as_before(stage: Stage) -> AsyncIterator[None]:
    """Every test ends with the first checkpoint's weights, no adapters and nothing open."""
    yield
    rank = stage.engine._rank
    if rank.update is not None:
        await stage(AbortUpdateRequest(), update=rank.update.update_id)
    for name in list(rank.adapters.loaded):
        await stage(UnloadAdapterRequest(name=name, abort_requests=True))
    await stage(ContinueGenerationRequest())


async def names(stage: Stage) -> list[tuple[str, str]]:
    """(name, version) of what is loaded; all ranks agree."""
    lists = await stage(ListAdaptersRequest())
    assert all(listed == lists[0] for listed in lists)
    return [(adapter.name, adapter.version) for adapter in lists[0].adapters]


async def all_refuse(stage: Stage, request: object, *, update: str = "") -> RlctlError:
    answers = await stage.ranks(request, update=update)
    assert all(isinstance(answer, RlctlError) for answer in answers), answers
    assert {(answer.reason, answer.outcome) for answer in answers} == {(answers[0].reason, OUTCOME_REJECTED)}
    return answers[0]


def opening(name: str, version: str = "one", **fields: object) -> PrepareUpdateRequest:
    return PrepareUpdateRequest(kind=UPDATE_KIND_ADAPTER, adapter=Adapter(name=name, version=version), **fields)


async def test_a_mixed_batch_gives_what_the_merged_models_give(stage: Stage, math: Made, other: Made) -> None:
    base = stage.config.model_path
    await load_adapter(stage, "math", math[0])
    await load_adapter(stage, "other", other[0], version="two")
    assert await names(stage) == [("math", "one"), ("other", "two")]
    prompts = [prompt_of(length) for length in (3, 9, 20)]
    asked = [(prompt, name) for prompt in prompts for name in ("", "math", "other")]
    found = await asyncio.gather(*(stage.tokens(prompt, COUNT, adapter=name) for prompt, name in asked))
    paths = {"": base, "math": math[1], "other": other[1]}
    for (prompt, name), tokens in zip(asked, found, strict=True):
        assert tokens == greedy(paths[name], prompt, COUNT), name
    assert len({tuple(greedy(path, PROMPT, COUNT)) for path in paths.values()}) == 3, "they tell the adapters apart"


async def test_log_probabilities_are_the_merged_models(stage: Stage, math: Made) -> None:
    await load_adapter(stage, "math", math[0], version="seven")
    scored = await stage.generate(PROMPT, max_new_tokens=0, logprob_start_len=0, return_logprob=True, adapter="math")
    wanted = reference_logprobs(math[1], PROMPT)
    for position, entry in enumerate(scored.input_logprobs[1:]):
        assert entry.logprob == pytest.approx(float(wanted[position, PROMPT[position + 1]]), abs=2e-3)
    answer = await stage.generate(PROMPT, max_new_tokens=3, adapter="math")
    assert [span.adapter_version for span in answer.samples[0].versions] == ["seven"]
    plain = await stage.generate(PROMPT, max_new_tokens=3)
    assert [span.adapter_version for span in plain.samples[0].versions] == [""]


async def test_tensors_come_over_a_group(stage: Stage, math: Made, other: Made) -> None:
    await load_adapter(stage, "math", other[0], version="old")
    tensors = load_file(Path(math[0]) / "adapter_model.safetensors")
    config = AdapterConfig(lora_rank=4, lora_alpha=8, target_modules=ALL, dtype="torch.float32")
    async with Source(stage) as source:
        await stage(opening("math", "new", adapter_config=config), update="u1")
        incomplete = await all_refuse(stage, CommitUpdateRequest(), update="u1")
        assert incomplete.reason is Reason.WEIGHTS_INCOMPLETE
        _, sent = await source.send(tensors, "u1")
        reports = await stage(CheckWeightsRequest(adapter="math"), update="u1")
        assert {report.model_digest for report in reports} == {sent}, "the staged one"
        assert {report.adapter_scale for report in reports} == {2.0}
        assert await names(stage) == [("math", "old")], "nothing is served before the commit"
        await stage(CommitUpdateRequest(), update="u1")
    assert await names(stage) == [("math", "new")]
    assert {report.model_digest for report in await stage(CheckWeightsRequest(adapter="math"))} == {sent}
    other_digest = CheckWeightsRequest(adapter="math", expected_digest="0" * 64)
    assert (await all_refuse(stage, other_digest)).reason is Reason.DIGEST_MISMATCH
    assert await stage.tokens(PROMPT, COUNT, adapter="math") == greedy(math[1], PROMPT, COUNT)
    assert await stage.tokens(PROMPT, COUNT) == greedy(stage.config.model_path, PROMPT, COUNT)


async def test_an_abort_leaves_the_previous_one(stage: Stage, math: Made, other: Made) -> None:
    await load_adapter(stage, "math", math[0])
    await stage(opening("math", "two"), update="u2")
    await stage(LoadAdapterRequest(name="math", path=other[0], version="two"), update="u2")
    await stage(AbortUpdateRequest(), update="u2")
    assert await names(stage) == [("math", "one")]
    assert await stage.tokens(PROMPT, COUNT, adapter="math") == greedy(math[1], PROMPT, COUNT)


async def test_ranks_check_alike_while_one_of_them_opens_the_files(
    stage: Stage, math: Made, other: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check is a read: anybody may send it at any time. Ranks that take different paths would wait for each other."""
    await load_adapter(stage, "math", math[0])
    await stage(opening("math", "two"), update="u2")
    opens, may_open = lora.open_adapter, threading.Event()

    def late(path: str, **options: Any) -> Any:
        may_open.wait(30)
        return opens(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(lora, "open_adapter", late)
        loading = asyncio.create_task(stage(LoadAdapterRequest(name="math", path=other[0], version="two"), update="u2"))
        await asyncio.sleep(0.5)  # the other rank has opened them
        error = await all_refuse(stage, CheckWeightsRequest(adapter="math"))
        assert error.reason is Reason.WEIGHTS_INCOMPLETE
        may_open.set()
        await loading
    for report in await stage(CheckWeightsRequest(adapter="math")):
        assert report.model_digest
    await stage(AbortUpdateRequest(), update="u2")
    assert await stage.tokens(PROMPT, COUNT, adapter="math") == greedy(math[1], PROMPT, COUNT)


async def test_ranks_that_read_different_configs_refuse_the_adapter(
    stage: Stage, math: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host has an older copy, or the config is replaced while the ranks open it."""
    older = make_adapter(tmp_path / "older", stage.config.model_path, seed=1, alpha=4)
    opens = lora.open_adapter
    await stage(opening("math"), update="u5")
    with monkeypatch.context() as patch:
        patch.setattr(lora, "open_adapter", lambda _, **options: opens(older, **options))  # at rank 0
        request = LoadAdapterRequest(name="math", path=math[0], version="one")
        if stage.config.tp_size == 1:
            await stage(request, update="u5")
            return
        error = await all_refuse(stage, request, update="u5")
    assert (error.reason, error.field) == (Reason.CHECKPOINT_MISMATCH, "path")
    assert "rank 1" in error.message
    assert (await all_refuse(stage, SealUpdateRequest(), update="u5")).reason is Reason.WEIGHTS_INCOMPLETE
    await stage(LoadAdapterRequest(name="math", path=math[0], version="one"), update="u5")
    await stage(CommitUpdateRequest(), update="u5")
    assert await stage.tokens(PROMPT, COUNT, adapter="math") == greedy(math[1], PROMPT, COUNT)


async def test_what_is_replaced_under_requests_is_computed_anew(stage: Stage, math: Made, other: Made) -> None:
    await load_adapter(stage, "math", math[0])
    stream = stage.stream(PROMPT, adapter="math", temperature=0, ignore_eos=True, max_new_tokens=LONG)
    parts = [await anext(stream)]
    beside = asyncio.create_task(stage.tokens(PROMPT, LONG))
    busy = await all_refuse(stage, opening("math", "two"), update="u3")
    assert busy.reason is Reason.ACTIVE_REQUESTS
    assert (await all_refuse(stage, UnloadAdapterRequest(name="math"))).reason is Reason.ACTIVE_REQUESTS
    await stage(PauseGenerationRequest(mode=PAUSE_MODE_IN_PLACE))
    await load_adapter(stage, "math", other[0], version="two")
    await stage(ContinueGenerationRequest())
    parts += [part async for part in stream]
    spans = [span for part in parts for sample in part.samples for span in sample.versions]
    tokens = [token for part in parts for sample in part.samples for token in sample.output_ids]
    kept = max(span.end for span in spans if span.adapter_version == "one")
    assert 0 < kept < LONG
    assert tokens[:kept] == greedy(math[1], PROMPT, kept)
    assert tokens[kept : kept + COUNT] == greedy(other[1], PROMPT + tokens[:kept], COUNT), "no KV entry of the old one"
    assert (await beside)[:COUNT] == greedy(stage.config.model_path, PROMPT, COUNT)


async def test_tensors_that_are_on_their_way_stop_no_request(stage: Stage, math: Made, other: Made) -> None:
    await load_adapter(stage, "math", math[0], version="old")
    await load_adapter(stage, "other", other[0])
    tensors = load_file(Path(other[0]) / "adapter_model.safetensors")
    targets = ["q_proj", "down_proj"]
    config = AdapterConfig(lora_rank=2, lora_alpha=8, rslora=True, target_modules=targets, dtype="torch.float32")
    base = stage.config.model_path
    async with Source(stage) as source:
        await stage(opening("math", "new", adapter_config=config, pause=PAUSE_MODE_RETRACT), update="u4")
        buckets = source.buckets(tensors)
        receiving = asyncio.create_task(stage(source.request(buckets), update="u4"))
        # The source has sent nothing yet: every rank waits for it.
        for name, path in {"": base, "math": math[1], "other": other[1]}.items():
            assert await stage.tokens(PROMPT, COUNT, adapter=name) == greedy(path, PROMPT, COUNT), name
        assert not receiving.done()
        assert source.group is not None
        await asyncio.to_thread(send, as_source(tensors.items()), buckets, source.group, ModelDigest())
        await receiving
        await stage(SealUpdateRequest(), update="u4")
        waiting = asyncio.create_task(stage.tokens(PROMPT, COUNT, adapter="math"))
        for name, path in {"": base, "other": other[1]}.items():
            assert await stage.tokens(PROMPT, COUNT, adapter=name) == greedy(path, PROMPT, COUNT), name
        assert not waiting.done()
        await stage(CommitUpdateRequest(), update="u4")
    assert await waiting == greedy(other[1], PROMPT, COUNT)


@pytest.mark.parametrize("ends", [CommitUpdateRequest, AbortUpdateRequest])
@pytest.mark.parametrize("mode", [PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE])
async def test_requests_that_a_seal_has_stopped_go_on_with_what_is_there_then(
    stage: Stage, math: Made, other: Made, mode: int, ends: type
) -> None:
    await load_adapter(stage, "math", math[0])
    stream = stage.stream(PROMPT, adapter="math", temperature=0, ignore_eos=True, max_new_tokens=LONG)
    parts = [await anext(stream)]
    await stage(opening("math", "two", pause=mode), update="u5")
    await stage(LoadAdapterRequest(name="math", path=other[0], version="two"), update="u5")
    await stage(SealUpdateRequest(), update="u5")
    assert await stage.tokens(PROMPT, COUNT) == greedy(stage.config.model_path, PROMPT, COUNT)
    await stage(ends(), update="u5")
    parts += [part async for part in stream]
    spans = [span for part in parts for sample in part.samples for span in sample.versions]
    tokens = [token for part in parts for sample in part.samples for token in sample.output_ids]
    kept = max(span.end for span in spans if span.adapter_version == "one")
    assert tokens[: min(kept, COUNT)] == greedy(math[1], PROMPT, min(kept, COUNT))
    assert len(tokens) == LONG
    if ends is CommitUpdateRequest:
        assert 0 < kept < LONG
        after = tokens[kept : kept + COUNT]
        assert after == greedy(other[1], PROMPT + tokens[:kept], len(after)), "no KV entry of the old one"
    else:
        assert kept == LONG


async def test_a_seal_ends_the_requests_with_its_adapter_or_waits_for_them(
    stage: Stage, math: Made, other: Made
) -> None:
    await load_adapter(stage, "math", math[0])
    for number, mode in enumerate((PAUSE_MODE_ABORT, PAUSE_MODE_DRAIN)):
        update, length = f"u6-{number}", 60
        stream = stage.stream(PROMPT, adapter="math", temperature=0, ignore_eos=True, max_new_tokens=length)
        parts = [await anext(stream)]
        beside = asyncio.create_task(stage.tokens(PROMPT, length))
        await stage(opening("math", "two", pause=mode), update=update)
        await stage(LoadAdapterRequest(name="math", path=other[0], version="two"), update=update)
        _, rest = await asyncio.gather(stage(SealUpdateRequest(), update=update), _all_of(stream))
        samples = [part.samples[0] for part in parts + rest]
        assert {span.adapter_version for sample in samples for span in sample.versions} == {"one"}
        drained = mode == PAUSE_MODE_DRAIN
        assert (samples[-1].finish_reason.type == FINISH_TYPE_ABORT) is not drained
        await stage(AbortUpdateRequest(), update=update)
        assert await beside == greedy(stage.config.model_path, PROMPT, length)
        assert await stage.tokens(PROMPT, COUNT, adapter="math") == greedy(math[1], PROMPT, COUNT)


async def _all_of(stream: AsyncIterator[Any]) -> list[Any]:
    return [part async for part in stream]


async def test_a_seal_of_an_adapter_that_is_not_whole_stops_no_request(stage: Stage, math: Made) -> None:
    await load_adapter(stage, "math", math[0])
    await stage(opening("math", "two", pause=PAUSE_MODE_RETRACT), update="u7")
    assert (await all_refuse(stage, SealUpdateRequest(), update="u7")).reason is Reason.WEIGHTS_INCOMPLETE
    assert await stage.tokens(PROMPT, COUNT, adapter="math") == greedy(math[1], PROMPT, COUNT)


async def test_an_update_in_between_holds_others_and_spoils_nothing(stage: Stage, math: Made) -> None:
    beside = asyncio.create_task(stage.tokens(PROMPT, 60))
    await until(lambda: stage.engine._rank.scheduler.running)
    await load_adapter(stage, "math", math[0])
    assert await beside == greedy(stage.config.model_path, PROMPT, 60)


async def test_unloading_ends_what_uses_it_when_asked(stage: Stage, math: Made) -> None:
    await load_adapter(stage, "math", math[0])
    stream = stage.stream(PROMPT, adapter="math", temperature=0, ignore_eos=True, max_new_tokens=LONG)
    parts = [await anext(stream)]
    await stage(UnloadAdapterRequest(name="math", abort_requests=True))
    parts += [part async for part in stream]
    assert parts[-1].samples[0].finish_reason.type == FINISH_TYPE_ABORT
    with pytest.raises(RlctlError) as caught:
        await stage.generate(PROMPT, adapter="math")
    assert (caught.value.reason, caught.value.field) == (Reason.ADAPTER_NOT_FOUND, "adapter")
    assert (await all_refuse(stage, UnloadAdapterRequest(name="math"))).reason is Reason.ADAPTER_NOT_FOUND


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("drop", [False, True])
async def test_a_base_update_keeps_or_drops(stage: Stage, math: Made, checkpoints, drop: bool, staged: bool) -> None:
    await load_adapter(stage, "math", math[0])
    new = checkpoints(seed=1)
    update = await prepare(stage, apply=APPLY_MODE_STAGED if staged else 0)
    await stage(UpdateWeightsFromDiskRequest(model_path=new), update=update)
    if staged:
        assert await stage.tokens(PROMPT, COUNT, adapter="math") == greedy(math[1], PROMPT, COUNT)
        await stage(SealUpdateRequest(), update=update)
    await stage(CommitUpdateRequest(adapters=ADAPTER_POLICY_DROP if drop else 0), update=update)
    assert await names(stage) == ([] if drop else [("math", "one")])
    if not drop:
        merged = Path(new).parent / "merged-onto-new"
        if not merged.exists():
            merge_adapter(merged, new, math[0])
        assert await stage.tokens(PROMPT, COUNT, adapter="math") == greedy(str(merged), PROMPT, COUNT)
    await load(stage, stage.config.model_path)


REFUSED = {
    "dora": ({"change": {"use_dora": True}}, Reason.UNSUPPORTED, "use_dora"),
    "saved": ({"change": {"modules_to_save": ["lm_head"]}}, Reason.UNSUPPORTED, "modules_to_save"),
    "bias": ({"change": {"bias": "all"}}, Reason.UNSUPPORTED, "bias"),
    "ia3": ({"change": {"peft_type": "IA3"}}, Reason.UNSUPPORTED, "IA3"),
    "pissa": ({"change": {"init_lora_weights": "pissa"}}, Reason.UNSUPPORTED, "init_lora_weights"),
    "ranks": ({"change": {"rank_pattern": {"q_proj": 8}}}, Reason.UNSUPPORTED, "rank_pattern"),
    "pattern": ({"change": {"target_modules": ".*q_proj"}}, Reason.UNSUPPORTED, "target_modules"),
    "embedding": ({"change": {"target_modules": ["embed_tokens"]}}, Reason.CHECKPOINT_MISMATCH, "embed_tokens"),
    "head": ({"change": {"target_modules": ["lm_head"]}}, Reason.CHECKPOINT_MISMATCH, "lm_head"),
    "stranger": ({"change": {"target_modules": ["w_pack"]}}, Reason.CHECKPOINT_MISMATCH, "w_pack"),
    "rank": ({"change": {"r": 8}}, Reason.CHECKPOINT_MISMATCH, "lora_A"),
    "rankless": ({"change": {"r": 0}}, Reason.FIELD_INVALID, "r is 0"),
    "beyond": ({"change": {"lora_alpha": 10**400}}, Reason.FIELD_INVALID, "too large"),
    "huge": ({"change": {"r": 2**31}}, Reason.FIELD_INVALID, "larger than layer"),
    "missing": (
        {"change": {"target_modules": [*ALL[:2]]}, "targets": ["q_proj"]},
        Reason.CHECKPOINT_MISMATCH,
        "k_proj",
    ),
    "extra": ({"change": {"target_modules": ["q_proj"]}}, Reason.CHECKPOINT_MISMATCH, "24 extra"),
    "integers": (
        {"targets": ["q_proj"], "tensors": {"base_model.model.x": torch.zeros(2, dtype=torch.int32)}},
        Reason.CHECKPOINT_MISMATCH,
        "base_model.model.x",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_cannot_be_applied_is_refused_by_name(stage: Stage, math: Made, what: str) -> None:
    settings, reason, named = REFUSED[what]
    directory = Path(stage.config.model_path).parent / f"refused-{what}"
    if not directory.exists():
        make_adapter(directory, stage.config.model_path, **settings)
    await load_adapter(stage, "math", math[0])
    await stage(opening("math", "two"), update="u4")
    error = await all_refuse(stage, LoadAdapterRequest(name="math", path=str(directory)), update="u4")
    assert (error.reason, error.field) == (reason, "path" if error.field else ""), error
    assert named in error.message
    await stage(AbortUpdateRequest(), update="u4")
    assert await names(stage) == [("math", "one")]
    assert await stage.tokens(PROMPT, 3, adapter="math") == greedy(math[1], PROMPT, 3)


async def test_paths_outside_of_the_roots_are_refused(stage: Stage) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        path = make_adapter(Path(elsewhere) / "adapter", stage.config.model_path)
        await stage(opening("math"), update="u5")
        error = await all_refuse(stage, LoadAdapterRequest(name="math", path=path), update="u5")
    assert (error.reason, error.field) == (Reason.PATH_NOT_ALLOWED, "path")
    nowhere = str(Path(stage.config.model_path).parent / "nowhere")
    error = await all_refuse(stage, LoadAdapterRequest(name="math", path=nowhere), update="u5")
    assert error.reason is Reason.CHECKPOINT_NOT_FOUND


async def test_base_and_adapter_updates_do_not_mix(stage: Stage, math: Made) -> None:
    await stage(opening("math"), update="u6")
    base = UpdateWeightsFromDiskRequest(model_path=stage.config.model_path)
    assert (await all_refuse(stage, base, update="u6")).reason is Reason.FIELD_CONFLICT
    wrong = await all_refuse(stage, LoadAdapterRequest(name="other", path=math[0]), update="u6")
    assert (wrong.reason, wrong.field) == (Reason.FIELD_CONFLICT, "name")
    await stage(AbortUpdateRequest(), update="u6")
    staged = await all_refuse(stage, opening("math", apply=APPLY_MODE_STAGED), update="u7")
    assert (staged.reason, staged.field) == (Reason.FIELD_CONFLICT, "apply")
    update = await prepare(stage)
    error = await all_refuse(stage, LoadAdapterRequest(name="math", path=math[0]), update=update)
    assert (error.reason, error.field) == (Reason.FIELD_CONFLICT, "name")


@pytest.mark.parametrize("family", ["llama-biases", "qwen2-moe", "fp8"])
async def test_layers_of_every_kind(checkpoints, follower: Follower, tmp_path: Path, family: str) -> None:
    served = plain = checkpoints("odd" if family == "fp8" else family)
    if family == "fp8":
        served = quantise_checkpoint(plain, tmp_path / "codes")
        plain = dequantise_checkpoint(served, tmp_path / "plain")
    adapter = make_adapter(tmp_path / "adapter", plain, targets=("q_proj", "o_proj", "down_proj", "gate_proj"))
    merged = merge_adapter(tmp_path / "merged", plain, adapter)
    stage = Stage(served, follower)
    await stage.start()
    try:
        await load_adapter(stage, "math", adapter)
        found = await asyncio.gather(*(stage.tokens(PROMPT, 6, adapter=name) for name in ("", "math")))
        assert found == [greedy(plain, PROMPT, 6), greedy(merged, PROMPT, 6)]
        assert found[0] != found[1]
    finally:
        await stage.stop()

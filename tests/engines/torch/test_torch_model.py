"""Which models and settings are taken, and which are refused with the cause."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from rlctl_torch import TorchEngine
from rlctl_torch.info import capabilities
from safetensors.torch import load_file, save_file
from torch_models import greedy, make_checkpoint, prompt_of
from torch_source import digest_of, load
from torch_stage import Follower, Stage
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DiffLlamaConfig,
    DogeConfig,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    Qwen3MoeConfig,
    T5Config,
)

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import EngineConfig, engine_class
from rlctl.v1.common_pb2 import (
    TRANSPORT_CUDA_IPC,
    TRANSPORT_DISK,
    TRANSPORT_SHARED_MEMORY,
    TRANSPORT_TORCH_GLOO,
    TRANSPORT_TORCH_NCCL,
    VERIFICATION_LEVEL_EXPECTED,
    VERIFICATION_LEVEL_NONE,
    VERIFICATION_LEVEL_PROBE,
    VERIFICATION_LEVEL_RECEIVED,
    VERIFICATION_LEVEL_REPLICA,
)
from rlctl.weights.tensor.placement import host_id

SMALL = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {**SMALL, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


def save(path: Path, config: object) -> str:
    """A checkpoint of any architecture with random weights."""
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return str(path)


async def refusal(path: str, follower: Follower | None = None, **options: object) -> RlctlError:
    """Why the engine does not start; every rank says so."""
    stage = Stage(path, follower, **options)
    with pytest.raises(RlctlError) as caught:
        await stage.start()
    return caught.value


def test_the_plug_in_is_found_by_its_name() -> None:
    assert engine_class("torch") is TorchEngine


async def test_capabilities_say_what_there_is(checkpoints) -> None:
    fresh = Stage(checkpoints())
    info = await fresh.start()
    await fresh.stop()
    found = info.capabilities
    assert list(found.transports) == [TRANSPORT_TORCH_GLOO, TRANSPORT_DISK, TRANSPORT_SHARED_MEMORY]
    assert list(found.verification) == [
        VERIFICATION_LEVEL_NONE,
        VERIFICATION_LEVEL_PROBE,
        VERIFICATION_LEVEL_RECEIVED,
        VERIFICATION_LEVEL_REPLICA,
        VERIFICATION_LEVEL_EXPECTED,
    ]
    assert {"UpdateWeightsFromDistributed", "UpdateWeightsFromTensor"} <= set(found.verbs)
    assert not found.unsupported
    assert found.fenced
    assert found.staged_apply
    assert not found.experimental
    assert info.model_digest == digest_of(fresh.config.model_path)


async def test_what_has_never_run_on_a_gpu_is_called_experimental(checkpoints) -> None:
    stage = Stage(checkpoints())
    await stage.start()
    stage.engine._rank.device = torch.device("cuda")
    found = capabilities(stage.engine._rank, [])
    stage.engine._rank.device = torch.device("cpu")
    await stage.stop()
    assert list(found.experimental) == ["transport.torch_nccl"]
    assert {TRANSPORT_TORCH_NCCL, TRANSPORT_CUDA_IPC} <= set(found.transports)


async def test_the_layout_names_every_rank(checkpoints, follower: Follower) -> None:
    stage = Stage(checkpoints(), follower)
    info = await stage.start()
    await stage.stop()
    assert info.layout.tp_size == 2
    assert [(w.rank, w.tp, w.node, w.device, w.host_id) for w in info.layout.workers] == [
        (0, 0, "localhost", "cpu", host_id()),
        (1, 1, "localhost", "cpu", host_id()),
    ]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
async def test_weights_may_be_held_wider_than_the_checkpoint_has_them(checkpoints, dtype: str) -> None:
    path = checkpoints(dtype="bfloat16")
    stage = Stage(path, dtype=dtype)
    info = await stage.start()
    try:
        assert info.model_digest == digest_of(path)
        assert VERIFICATION_LEVEL_EXPECTED in info.capabilities.verification
        held = stage.engine._rank.model.dtype
        assert held == (torch.bfloat16 if dtype == "auto" else torch.float32)
        assert len(await stage.tokens(prompt_of(9), 5)) == 5
    finally:
        await stage.stop()


async def test_weights_held_narrower_cannot_be_verified_against_what_was_sent(checkpoints) -> None:
    stage = Stage(checkpoints(), dtype="bfloat16", kv_dtype="float32")
    info = await stage.start()
    try:
        assert info.model_digest != digest_of(stage.config.model_path)
        assert VERIFICATION_LEVEL_EXPECTED not in info.capabilities.verification
        assert stage.engine._rank.cache.keys[0].dtype == torch.float32
        assert len(await stage.tokens(prompt_of(9), 5)) == 5
    finally:
        await stage.stop()


@pytest.mark.parametrize("size", [1, 2])
async def test_tied_weights_are_updated_once_and_stay_tied(checkpoints, follower: Follower, size: int) -> None:
    first, second = checkpoints("llama-tied"), checkpoints("llama-tied", seed=1)
    stage = Stage(first, follower if size == 2 else None)
    await stage.start()
    try:
        module = stage.engine._rank.model.module
        assert "lm_head.weight" not in stage.engine._rank.model.shards.shards
        await load(stage, second)
        assert module.lm_head.weight is module.model.embed_tokens.weight
        assert await stage.tokens(prompt_of(9), 8) == greedy(second, prompt_of(9), 8)
    finally:
        await stage.stop()


async def test_a_tied_checkpoint_may_hold_both_copies_unless_they_differ(tmp_path: Path) -> None:
    path = Path(make_checkpoint(tmp_path, "llama-tied"))
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    stage = Stage(str(path))
    info = await stage.start()
    await stage.stop()
    assert info.model_digest == digest_of(str(path))
    tensors["lm_head.weight"] += 1
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    error = await refusal(str(path))
    assert error.reason is Reason.CHECKPOINT_MISMATCH
    assert "ties lm_head.weight" in error.message


async def test_a_tied_checkpoint_may_hold_only_the_output_head(tmp_path: Path) -> None:
    path = Path(make_checkpoint(tmp_path, "llama-tied"))
    expected = greedy(str(path), prompt_of(9), 5)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    stage = Stage(str(path))
    info = await stage.start()
    try:
        assert info.model_digest == digest_of(str(path))
        assert await stage.tokens(prompt_of(9), 5) == expected
    finally:
        await stage.stop()


async def test_checkpoints_that_are_not_there_or_do_not_fit_are_refused(tmp_path: Path) -> None:
    assert (await refusal(str(tmp_path / "nowhere"))).reason is Reason.CHECKPOINT_NOT_FOUND
    path = Path(make_checkpoint(tmp_path / "model", "llama"))
    tensors = load_file(path / "model.safetensors")
    without = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    save_file(without, path / "model.safetensors", {"format": "pt"})
    error = await refusal(str(path))
    assert (error.reason, error.metadata) == (Reason.CHECKPOINT_MISMATCH, {"missing": "model.norm.weight"})
    save_file({**tensors, "stray": torch.zeros(2)}, path / "model.safetensors", {"format": "pt"})
    error = await refusal(str(path))
    assert (error.reason, error.metadata) == (Reason.CHECKPOINT_MISMATCH, {"extra": "stray"})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MambaConfig(**SMALL, state_size=4), "linear_attention"),
        (BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=2), "AttentionInterface"),
        (
            Gemma2Config(**HEADS, head_dim=16, pad_token_id=0),
            "softcap",
        ),
        (DiffLlamaConfig(**HEADS), "every time that it is called"),
        (DogeConfig(**HEADS), "a mask of its own kind"),
    ],
    ids=["mamba", "bloom", "gemma2", "diffllama", "doge"],
)
async def test_models_that_cannot_be_served_are_refused(tmp_path: Path, config: object, words: str) -> None:
    error = await refusal(save(tmp_path, config))
    assert error.reason is Reason.UNSUPPORTED
    assert words in error.message


async def test_configs_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    path = Path(make_checkpoint(tmp_path, "llama"))
    config = json.loads((path / "config.json").read_text())
    for changes, words in (
        ({"model_type": "unheard-of"}, "unheard-of"),
        (T5Config().to_dict(), "encoder-decoder"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ):
        (path / "config.json").write_text(json.dumps({**config, **changes}))
        error = await refusal(str(path))
        assert error.reason is Reason.UNSUPPORTED, error
        assert words in error.message, error


async def test_models_that_cannot_be_cut_are_refused_by_all_ranks(tmp_path: Path, follower: Follower) -> None:
    heads = {**SMALL, "intermediate_size": 64, "head_dim": 16}
    cases = (
        (LlamaConfig(**heads, num_attention_heads=2, num_key_value_heads=1), "num_key_value_heads"),
        (
            LlamaConfig(**{**heads, "hidden_size": 48}, num_attention_heads=3, num_key_value_heads=3),
            "num_attention_heads",
        ),
        (
            LlamaConfig(**{**heads, "intermediate_size": 63}, num_attention_heads=2, num_key_value_heads=2),
            "mlp.gate_proj",
        ),
    )
    for number, (config, words) in enumerate(cases):
        error = await refusal(save(tmp_path / str(number), config), follower)
        assert (error.reason, error.field) == (Reason.UNSUPPORTED, "tp_size")
        assert words in error.message


async def test_an_unknown_style_of_cutting_is_refused(
    checkpoints, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    for style, words in (("rowwise_split_input", "rowwise_split_input"), ("moe_tp_experts", "no weights of its own")):
        plan = {**LlamaConfig.base_model_tp_plan, "layers.*.mlp": style}
        monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", plan)
        error = await refusal(checkpoints(), follower)
        assert (error.reason, error.field) == (Reason.UNSUPPORTED, "tp_size")
        assert words in error.message


async def test_experts_that_cannot_be_cut_are_refused_by_all_ranks(
    tmp_path: Path, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    odd = save(tmp_path / "odd", Qwen3MoeConfig(**SMALL, **settings, moe_intermediate_size=31))
    error = await refusal(odd, follower)
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "tp_size")
    assert "experts.gate_up_proj has 31 features" in error.message
    even = save(tmp_path / "even", Qwen3MoeConfig(**SMALL, **settings, moe_intermediate_size=32))
    plan = {**Qwen3MoeConfig.base_model_tp_plan, "layers.*.mlp.experts.down_proj": "packed_rowwise"}
    monkeypatch.setattr(Qwen3MoeConfig, "base_model_tp_plan", plan)
    error = await refusal(even, follower)
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "tp_size")
    assert "experts.down_proj as 'packed_rowwise'" in error.message


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"options": {"max_runing": "4"}}, "options.max_runing"),
        ({"options": {"max_running": "many"}}, "options.max_running"),
        ({"options": {"max_running": "0"}}, "options.max_running"),
        ({"options": {"max_total_tokens": "-5"}}, "options.max_total_tokens"),
        ({"options": {"kv_dtype": "int8"}}, "options.kv_dtype"),
        ({"dtype": "float8_e4m3fn"}, "dtype"),
        ({"rank": 2, "tp_size": 2}, "rank"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_wrong_settings_are_refused_at_once(config: dict[str, object], field: str) -> None:
    with pytest.raises(RlctlError) as caught:
        TorchEngine(EngineConfig("/anywhere", **config), print)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, field)


async def test_a_context_longer_than_the_model_has_positions_for_is_refused(checkpoints) -> None:
    error = await refusal(checkpoints(), context_length=257)
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "options.context_length")


async def test_a_longrope_model_is_served_as_far_as_its_first_frequencies_go(tmp_path: Path) -> None:
    """Beyond, one long sequence changes what is computed of all others of the pass."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 16,
    }
    path = save(tmp_path, LlamaConfig(**HEADS, max_position_embeddings=256, rope_parameters=rope, eos_token_id=0))
    error = await refusal(path, context_length=17)
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "options.context_length")
    assert "longrope" in error.message
    stage = Stage(path)
    await stage.start()
    prompts = [prompt_of(10), prompt_of(4)]
    assert await asyncio.gather(*(stage.tokens(prompt, 6) for prompt in prompts)) == [
        greedy(path, prompt, 6) for prompt in prompts
    ]
    with pytest.raises(RlctlError) as caught:
        await stage.tokens(prompt_of(16), 1)
    assert caught.value.reason is Reason.PROMPT_TOO_LONG
    await stage.stop()


async def test_several_engines_live_in_one_process(checkpoints) -> None:
    paths = [checkpoints(), checkpoints("qwen3")]
    stages = [Stage(path) for path in paths]
    await asyncio.gather(*(stage.start() for stage in stages))
    outputs = await asyncio.gather(*(stage.tokens(prompt_of(7), 20) for stage in stages))
    assert outputs == [greedy(path, prompt_of(7), 20) for path in paths]
    for stage in stages:
        await stage.stop()

"""Tiny checkpoints, made on the spot, and what plain transformers says about them."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlctl.weights.formats.block_fp8 import dequantise, quantise

VOCAB = 320
EOS = "<eos>"

TEXTS = [
    "The quick brown fox jumps over the lazy dog. ",
    "Weights are published last, after every rank has them. ",
    "Größe, naïve, façade, 你好世界, 🙂🙃 and other characters. ",
    "one two three four five six seven eight nine ten ",
]

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Far from zero, so that outputs vary and the most likely token is never a close call.
    "initializer_range": 0.25,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}

FAMILIES = {
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "llama-biases": LlamaConfig(**_SHAPE, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "llama-tied": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_SHAPE, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True),
    # 70 MB of weights, to see them go.
    "wide": LlamaConfig(
        **{**_SHAPE, "hidden_size": 768, "intermediate_size": 3072, "initializer_range": 0.05},
        tie_word_embeddings=False,
    ),
    "mistral": MistralConfig(**_SHAPE, tie_word_embeddings=False, sliding_window=6),
    "mixtral": MixtralConfig(**_SHAPE, tie_word_embeddings=False, num_local_experts=4, num_experts_per_tok=2),
    # A dense first layer, then experts beside a shared one; tied, too.
    "qwen2-moe": Qwen2MoeConfig(
        **_SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        mlp_only_layers=[0],
        tie_word_embeddings=True,
    ),
    # The last layer sees a window, which only its mask says.
    "qwen2-moe-window": Qwen2MoeConfig(
        **_SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        tie_word_embeddings=False,
    ),
    "qwen3-moe": Qwen3MoeConfig(
        **_SHAPE,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    # No multiples of 128, and at two ranks cuts on block boundaries (heads) and inside of blocks (all others).
    "odd": LlamaConfig(
        **{**_SHAPE, "hidden_size": 192, "intermediate_size": 320, "head_dim": 64, "initializer_range": 0.1},
        tie_word_embeddings=False,
    ),
    "odd-moe": Qwen3MoeConfig(
        **{**_SHAPE, "hidden_size": 192, "initializer_range": 0.1},
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=160,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    ),
}


@functools.cache
def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


def make_checkpoint(
    path: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, tokenizer: bool = True
) -> str:
    """Save a checkpoint with random weights; returns its directory."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
        elif "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    model.save_pretrained(path)
    if tokenizer:
        _tokenizer().save_pretrained(path)
    return str(path)


def quantise_checkpoint(path: str, to: Path, scale_dtype: torch.dtype = torch.float32) -> str:
    """Save a checkpoint again as block-fp8 the way such are published; returns its directory."""
    shutil.copytree(path, to)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(to / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensor, scale_dtype=scale_dtype)
        else:
            tensors[name] = tensor
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    (to / "config.json").write_text(json.dumps(config))
    return str(to)


def dequantise_checkpoint(path: str, to: Path) -> str:
    """Save a block-fp8 checkpoint again as plain float32, for transformers to compute with; returns its directory."""
    shutil.copytree(path, to)
    tensors = load_file(to / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        tensors[weight] = dequantise(tensors[weight], tensors.pop(name))
    plain = {name: tensor.float() for name, tensor in tensors.items()}
    save_file(plain, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    del config["quantization_config"]
    (to / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return str(to)


@functools.cache
def reference(path: str) -> torch.nn.Module:
    """The checkpoint as plain transformers loads it, with its own attention."""
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_logprobs(path: str, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """``[tokens, vocabulary]``: row i are the log probabilities of the token after tokens[i]."""
    logits = reference(path)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return torch.log_softmax(logits / temperature, dim=-1)


@functools.lru_cache(maxsize=256)
def _greedy(path: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logprobs(path, tokens)[-1].argmax()))
    return tuple(tokens[len(prompt) :])


def greedy(path: str, prompt: list[int], count: int) -> list[int]:
    """The most likely tokens after a prompt, end-of-sequence tokens ignored."""
    return list(_greedy(path, tuple(prompt), count))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Some token ids."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()

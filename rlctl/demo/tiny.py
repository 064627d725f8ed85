"""A tiny Llama or Mixtral, and a tokenizer of single characters, made locally: no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from rlctl.demo.task import CHARACTERS

PAD, BOS, EOS = 0, 1, 2
VOCABULARY = ["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS]
"""16 tokens: an even number, divisible by two tensor-parallel ranks."""

_SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "dtype": "float32",
}


def encode(text: str) -> list[int]:
    """Return token ids of a text, after the beginning-of-sequence token."""
    return [BOS, *(VOCABULARY.index(character) for character in text)]


def make(seed: int) -> Any:
    """Make a 2-layer Llama of width 128 (4 heads, 2 KV heads, float32), with weights drawn from the seed."""
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**_SHAPE))
    return model.float()


def make_experts(seed: int) -> Any:
    """Make a Mixtral with the shape of ``make`` and 4 experts, of which 2 compute each token."""
    torch.manual_seed(seed)
    model: Any = MixtralForCausalLM(MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2))
    return model.float()


def save(model: Any, directory: Path) -> None:
    """Write the engines' initial checkpoint."""
    quiet: Any = disable_progress_bar
    quiet()
    model.save_pretrained(directory, safe_serialization=True)
    _tokenizer().save_pretrained(directory)


def _tokenizer() -> Any:
    vocabulary = {token: number for number, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")

"""A module's tensors under the names of its checkpoint: experts that transformers fused, renamed and tied tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Placement
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen2MoeConfig
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

from rlctl.contract.errors import InvalidRequest, Unsupported
from rlctl.weights.tensor.checkpoint_names import ModuleSource, checkpoint_parts
from rlctl.weights.tensor.source import as_source

SHAPE = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}

MIXTRAL = MixtralConfig(**SHAPE, num_local_experts=4, tie_word_embeddings=False)
QWEN = Qwen2MoeConfig(
    **SHAPE,
    num_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=10,
    shared_expert_intermediate_size=6,
    mlp_only_layers=[0],
    tie_word_embeddings=True,
)


def saved(module: PreTrainedModel, path: Path) -> dict[str, torch.Tensor]:
    """What transformers itself writes."""
    module.save_pretrained(path)
    return load_file(path / "model.safetensors")


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("config", [MIXTRAL, QWEN], ids=["mixtral", "qwen2-moe"])
def test_a_module_gives_what_save_pretrained_writes(config, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config)
    expected = saved(model, tmp_path)
    assert len([name for name in expected if ".experts.2." in name]) in (3, 6)
    source = as_source(model)
    assert {meta.name: meta.shape for meta in source.metas()} == {n: tuple(t.shape) for n, t in expected.items()}
    check_same(dict(source.tensors()), expected)
    assert [meta.name for meta in source.metas()] == [name for name, _ in source.tensors()]
    # The same of a model that was loaded, and after its weights changed.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    source = as_source(loaded)
    check_same(dict(source.tensors()), expected)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(1)
    check_same(dict(source.tensors()), saved(loaded, tmp_path / "changed"))


def test_experts_are_parts_of_their_parameter_and_share_its_memory() -> None:
    model = AutoModelForCausalLM.from_config(MIXTRAL)
    fused = model.model.layers[1].mlp.experts.gate_up_proj
    parts = checkpoint_parts(model)
    up = parts["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    assert up.source == "model.layers.1.mlp.experts.gate_up_proj"
    view = up.of(fused.detach())
    assert torch.equal(view, fused[2, 12:])
    view.fill_(7)
    assert fused[2, 12:].eq(7).all()
    assert not fused[2, :12].eq(7).any()
    assert not fused[1].eq(7).any()


def test_an_existing_checkpoint_decides_about_names() -> None:
    model = AutoModelForCausalLM.from_config(QWEN)
    plain = {meta.name for meta in as_source(model).metas()}
    assert ("model.embed_tokens.weight" in plain, "lm_head.weight" in plain) == (True, False)
    both = ModuleSource(model, plain | {"lm_head.weight"})
    assert {meta.name for meta in both.metas()} == plain | {"lm_head.weight"}
    tensors = dict(both.tensors())
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    only = ModuleSource(model, (plain - {"model.embed_tokens.weight"}) | {"lm_head.weight"})
    assert "model.embed_tokens.weight" not in {meta.name for meta in only.metas()}
    # A checkpoint that keeps the experts in one tensor.
    fused = ModuleSource(model, model.state_dict().keys())
    check_same(dict(fused.tensors()), dict(model.state_dict()))


def test_a_source_that_is_kept_gives_the_tensors_that_its_module_has_by_now() -> None:
    model = AutoModelForCausalLM.from_config(MIXTRAL)
    source = as_source(model)
    # A trainer that goes back to an earlier checkpoint: other parameters take the place of the old ones.
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True)
    check_same(dict(source.tensors()), dict(as_source(model).tensors()))
    model.lm_head.weight = nn.Parameter(torch.zeros(32, 16))
    for again in (source.metas, lambda: list(source.tensors())):
        with pytest.raises(InvalidRequest, match=r"has shape \(32, 16\) by now, and had \(24, 16\)"):
            again()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_tensor_without_contents_is_refused_by_name_when_it_is_described(device: str) -> None:
    module = nn.Linear(2, 3)
    module.weight = nn.Parameter(torch.eye(3, 2, device=device) if device == "meta" else torch.eye(3, 2).to_sparse())
    with pytest.raises(InvalidRequest, match=r"weight is o(n the meta device|f layout torch\.sparse_coo): it has no"):
        as_source(module).metas()
    with pytest.raises(InvalidRequest, match=r"weight is o(n the meta device|f layout torch\.sparse_coo): it has no"):
        as_source(module.named_parameters())


def test_a_module_of_another_kind_keeps_its_names() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert [meta.name for meta in as_source(module).metas()] == [
        *(name for name, _ in module.named_parameters()),
        *(name for name, _ in module.named_buffers()),
    ]


def test_a_part_of_a_tensor_that_is_not_contiguous_is_cut_out_of_a_copy() -> None:
    model = AutoModelForCausalLM.from_config(MIXTRAL)
    part = checkpoint_parts(model)["model.layers.0.block_sparse_moe.experts.3.w1.weight"]
    fused = torch.randn(16, 24, 4).permute(2, 1, 0)
    assert torch.equal(part.of(fused), fused[3, :12])


@pytest.fixture
def mapping():
    """Makes the model's checkpoint be something else, for one test."""
    import transformers.conversion_mapping as mappings

    def register(converter: WeightConverter) -> None:
        register_checkpoint_conversion_mapping("MixtralForCausalLM", [converter])

    yield register
    mappings._checkpoint_conversion_mapping_cache.pop("MixtralForCausalLM", None)
    mappings.USER_REGISTERED_MAPPINGS.discard("MixtralForCausalLM")


def test_a_transposed_tensor_is_a_part_too(mapping, tmp_path: Path) -> None:
    mapping(WeightConverter("lm_head.kernel", "lm_head.weight", operations=[Transpose(0, 1)]))
    model = AutoModelForCausalLM.from_config(MIXTRAL)
    check_same(dict(as_source(model).tensors()), saved(model, tmp_path))
    assert dict(as_source(model).tensors())["lm_head.kernel"].shape == (16, 24)


def test_a_parameter_that_is_spread_over_trainer_ranks_is_gathered_before_it_is_cut(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(MIXTRAL)
    expected = saved(model, tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            spread = distribute_tensor(layer.mlp.experts.gate_up_proj.detach(), mesh, [Placement(1)])
            layer.mlp.experts.gate_up_proj = nn.Parameter(spread)
        check_same(dict(as_source(model).tensors()), expected)
    finally:
        dist.destroy_process_group()


def test_what_is_put_together_on_its_way_is_refused_by_name(mapping) -> None:
    # The checkpoint has q and k in one: it is no part of any parameter.
    mapping(
        WeightConverter(
            "self_attn.qk.weight",
            ["self_attn.q_proj.weight", "self_attn.k_proj.weight"],
            operations=[Concatenate(dim=0).reverse_op],
        )
    )
    model = AutoModelForCausalLM.from_config(MIXTRAL)
    with pytest.raises(Unsupported, match=r"self_attn\.qk\.weight is computed from several"):
        as_source(model)


def test_the_mode_that_keeps_views_ends_with_the_mapping() -> None:
    checkpoint_parts(AutoModelForCausalLM.from_config(MIXTRAL))
    strided = torch.zeros(4, 4).t()
    assert strided.contiguous().is_contiguous()
    assert torch.overrides._get_current_function_mode_stack() == []

"""A bf16 trainer and engines of different layout that serve another wire form: block-fp8, experts by their names."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import of_each
from digests import holds
from models import changed
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo.tiny import VOCABULARY, encode, save
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.trainer.publisher import Publisher
from rlctl.v1 import common_pb2 as common
from rlctl.weights.checkpoint.checkpoint import open_checkpoint
from rlctl.weights.formats.block_fp8 import BlockFp8, dequantise, quantise
from rlctl.weights.tensor.source import as_source

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

PROMPT = "12+34=46"


@pytest.fixture(scope="module")
def trainer() -> Any:
    """Four experts in each layer, in bfloat16; no dimension is a multiple of 128."""
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=192,
        intermediate_size=320,
        moe_intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def checkpoint(trainer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the engines start from: projections as block-fp8, everything else in float32."""
    directory = tmp_path_factory.mktemp("wire") / "checkpoint"
    save(copy.deepcopy(trainer).float(), directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensors[name])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def fleet(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    engines = [EngineSpec("actor-0", str(checkpoint), tp_size=2), EngineSpec("actor-1", str(checkpoint))]
    with LaunchedFleet(engines, directory=tmp_path_factory.mktemp("fleet")) as local, local.connect() as fleet:
        yield fleet


@pytest.fixture(scope="module")
def publisher(fleet: Fleet) -> Iterator[Publisher]:
    publisher = fleet.publisher("actor")
    yield publisher
    publisher.close()


def sent(source: BlockFp8, checkpoint: Path) -> dict[str, torch.Tensor]:
    """What goes over the wire: in the checkpoint's dtypes."""
    metas = open_checkpoint(str(checkpoint)).metas
    return {name: tensor.to(metas[name].dtype) for name, tensor in source.tensors()}


def dequantised(model: Any, wire: dict[str, torch.Tensor], directory: Path) -> Any:
    """The model that the engines should compute, as transformers loads it."""
    model.save_pretrained(directory)
    plain = dict(wire)
    for name in [name for name in wire if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        plain[weight] = dequantise(plain[weight], plain.pop(name))
    save_file(plain, directory / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def test_a_bf16_trainer_feeds_fp8_experts_on_every_layout(
    fleet: Fleet, publisher: Publisher, trainer: Any, checkpoint: Path, tmp_path: Path
) -> None:
    model = changed(trainer, seed=1)
    source = BlockFp8(model, open_checkpoint(str(checkpoint)))
    result = publisher.update(source, version="fp8")
    wire = sent(source, checkpoint)
    assert len([name for name in wire if ".experts.3." in name]) == 2 * 3 * 2
    assert holds([result.model_digest], wire.items())
    assert {stage.verified for stage in result.operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
    check = fleet.check_weights()
    digests = {rank.check.model_digest for stage in check.stage_results for rank in stage.rank_results}
    assert [len(stage.rank_results) for stage in check.stage_results] == [2, 1]
    assert digests == {result.model_digest}
    reference = dequantised(model, wire, tmp_path / "reference")
    prompt = encode(PROMPT)
    with torch.no_grad():
        rows = torch.log_softmax(reference(input_ids=torch.tensor([prompt])).logits[0], -1)
    expected = [float(rows[i, prompt[i + 1]]) for i in range(len(prompt) - 1)]
    for response in of_each(fleet, prompt, max_new_tokens=0, return_logprob=True, logprob_start_len=0):
        assert [token.logprob for token in response.input_logprobs[1:]] == pytest.approx(expected, abs=1e-4)


def test_weights_that_are_not_in_wire_form_are_refused_and_named(
    fleet: Fleet, publisher: Publisher, trainer: Any, checkpoint: Path
) -> None:
    version = fleet.status().models[0].latest
    with pytest.raises(RlctlError, match=r"_proj\.weight is torch\.bfloat16") as caught:
        publisher.update(trainer, version="not quantised")
    assert caught.value.reason is Reason.FIELD_INVALID
    assert "BlockFp8" in caught.value.next_step
    wire = sent(BlockFp8(changed(trainer, seed=2), open_checkpoint(str(checkpoint))), checkpoint)
    without_scales = {name: tensor for name, tensor in wire.items() if not name.endswith("_scale_inv")}
    with pytest.raises(RlctlError, match="_scale_inv") as caught:
        publisher.update(without_scales.items(), version="without scales")
    assert caught.value.reason is Reason.WEIGHTS_INCOMPLETE
    expert = "model.layers.1.mlp.experts.2.up_proj.weight"
    with pytest.raises(RlctlError, match=expert) as caught:
        publisher.update({n: t for n, t in wire.items() if not n.startswith(expert)}.items(), version="no expert")
    assert caught.value.reason is Reason.WEIGHTS_INCOMPLETE
    assert fleet.status().models[0].latest == version
    result = publisher.update(wire.items(), version="whole")
    assert holds([result.model_digest], wire.items())


def test_what_no_engine_can_take_is_refused(fleet: Fleet, publisher: Publisher, trainer: Any, checkpoint: Path) -> None:
    version = fleet.status().models[0].latest
    source = BlockFp8(trainer, open_checkpoint(str(checkpoint)))
    with pytest.raises(RlctlError, match="draft") as caught:
        publisher.update(source, version="draft", selector="draft")
    assert caught.value.reason is Reason.UNSUPPORTED
    between_gpus = fleet.publisher("actor", backend="nccl")
    with pytest.raises(RlctlError, match="actor-0 joins no nccl group") as caught:
        between_gpus.update(source, version="nccl")
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, "transports")
    between_gpus.close()
    with pytest.raises(RlctlError) as caught:
        fleet.publisher("actor", backend="mpi")
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "backend")
    assert fleet.status().models[0].latest == version
    assert all(stage.routable for stage in fleet.status().stages)


@pytest.mark.parametrize("how", ["module", "state_dict", "copied"])
def test_a_checkpoint_that_keeps_the_head_of_a_tied_model_gets_it(
    tied_fleet: tuple[Fleet, Path], trainer: Any, how: str
) -> None:
    fleet, path = tied_fleet
    model = changed(trainer, seed=["module", "state_dict", "copied"].index(how) + 40)
    state = model.state_dict()
    if how == "copied":
        state = {name: tensor.clone() for name, tensor in state.items()}
    weights = model if how == "module" else as_the_checkpoint(model, state)
    with fleet.publisher("actor") as publisher:
        result = publisher.update(weights, version=f"tied-{how}")
    held = {rank.check.model_digest for stage in fleet.check_weights().stage_results for rank in stage.rank_results}
    assert held == {result.model_digest}
    assert holds(held, model, checkpoint=str(path))


def as_the_checkpoint(model: Any, state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Experts by their names, and everything that is tied twice."""
    return [*as_source(model).tensors(), ("lm_head.weight", state["lm_head.weight"])]


@pytest.fixture(scope="module", params=["kept", "left-out"])
def tied_fleet(
    request: pytest.FixtureRequest, trainer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Fleet, Path]]:
    """An engine whose checkpoint keeps the head that is tied to the embedding, or leaves it out."""
    directory = tmp_path_factory.mktemp("tied")
    path = directory / "checkpoint"
    save(copy.deepcopy(trainer), path)
    if request.param == "kept":
        tensors = load_file(path / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with (
        LaunchedFleet([EngineSpec("actor-0", str(path))], directory=directory / "fleet") as local,
        local.connect() as fleet,
    ):
        yield fleet, path

"""Co-located trainers in front of torch engines of two ranks and of one: unmodified, with SGLang's own serialiser."""

from __future__ import annotations

import base64
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pickle_assembler import assemble, cuda_tensor, encoded, metadata, shared_tensor
from pickle_mutations import mutated
from rlctl_sglang.options import Options, interpreter
from safetensors.torch import load_file
from sglang_suite import Server
from trainer_scripts import ended

from rlctl.contract.errors import RlctlError
from rlctl.weights.tensor.digest import combine, tensor_digest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
TRAINER = ROOT / "tests" / "support" / "colocated_trainer.py"
STUBS = ROOT / "engines" / "rlctl_sglang" / "cpu"


def serialiser(name: str) -> dict[str, str]:
    """How a trainer runs: in a Python with SGLang, or with classes of the same names."""
    if name == "torch":
        return {"STAND_IN": "1"}
    try:
        return {"python": interpreter(Options()), "PYTHONPATH": str(STUBS)}
    except RlctlError as error:
        pytest.skip(f"SGLang is not installed: {error.next_step}")


async def train(
    server: Server, output: Path, trainer: str, seeds: str, library: str = "torch", places: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], str]:
    """The lines of a trainer, and what it says when it fails. ``places``: addresses with ranks, instead of all."""
    places = places or [f"{url}={ranks}" for url, ranks in zip(server.engines, server.ranks, strict=True)]
    arguments = [str(server.tiny[1]), str(output), trainer, seeds, *places]
    trained = await ended(TRAINER, *arguments, **serialiser(library))
    lines = [json.loads(line) for line in trained.stdout.splitlines() if line.startswith("{")]
    return lines, "" if trained.returncode == 0 else trained.stderr


async def digests(server: Server) -> set[str]:
    """The digests that the ranks of every engine have."""
    checked = [body["model_digest"] for _, body in await server.every("POST", "/weights_checker", {})]
    return {digest for each in checked for digest in each.values()}


def expected(path: Path) -> str:
    return combine({name: tensor_digest(name, tensor) for name, tensor in load_file(path).items()})


@pytest.mark.parametrize(
    ("trainer", "library"),
    [
        ("slime", "torch"),  # as Miles, without its session
        ("miles", "sglang"),
        ("verl", "sglang"),
        pytest.param("slime", "sglang", marks=pytest.mark.long),
        pytest.param("miles", "torch", marks=pytest.mark.long),
        pytest.param("verl", "torch", marks=pytest.mark.long),
    ],
)
async def test_every_engine_has_the_trainers_weights(
    server: Server, tmp_path: Path, trainer: str, library: str
) -> None:
    lines, errors = await train(server, tmp_path, trainer, "1,2", library)
    assert errors == ""
    # Every rank has dropped the reference that the trainer counted for it, and nothing else of the trainer's.
    assert [line["left"] for line in lines] == [[], []]
    assert await digests(server) == {expected(tmp_path / "2.safetensors")}
    assert expected(tmp_path / "1.safetensors") != expected(tmp_path / "2.safetensors")
    if trainer != "verl":
        assert [body["weight_version"] for _, body in await server.every("GET", "/get_weight_version")] == ["2", "2"]


async def test_at_the_root_the_fleet_is_one_server(server: Server, tmp_path: Path) -> None:
    lines, errors = await train(server, tmp_path, "slime", "4", places=[f"{server.root}=3"])
    assert errors == ""
    assert [line["left"] for line in lines] == [[]]
    assert await digests(server) == {expected(tmp_path / "4.safetensors")}


GONE = shared_tensor(64, 64, nbytes=64 * 64 * 4, name="/torch_1_2_3")
"""A tensor in memory that no trainer has any more."""


async def write(server: Server, engine: int, *payloads: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"serialized_named_tensors": list(payloads), "flush_cache": False, **fields}
    status, told = await server.ask("POST", "/update_weights_from_tensor", body, engine=engine)
    assert isinstance(told, dict)
    return status, told


async def test_an_engine_that_got_nothing_is_named_and_nothing_is_published(server: Server, tmp_path: Path) -> None:
    before = await server.version()
    lines, errors = await train(server, tmp_path, "slime", "1", places=[f"{server.engines[0]}=2"])
    assert lines == []
    assert "/continue_generation: 400" in errors
    assert "was written to actor-0 and not to actor-1" in errors
    assert await server.version() == {*before, ""}  # actor-0 is DIRTY and has no version, actor-1 is as before


async def test_outside_of_a_pause_the_tensors_of_one_engine_are_no_update_of_two(server: Server) -> None:
    status, told = await write(server, 1, encoded([("w", GONE)]))
    assert (status, told["success"], told["error"]["reason"]) == (400, False, "ILLEGAL_STATE")
    assert "Pause generation" in told["error"]["next_step"]


@pytest.mark.parametrize(("engine", "count"), [(0, 1), (0, 3), (1, 0), (1, 2)])
async def test_another_number_of_payloads_than_ranks(server: Server, engine: int, count: int) -> None:
    status, told = await write(server, engine, *[encoded([("w", GONE)])] * count)
    assert (status, told["error"]["reason"]) == (400, "LENGTH_MISMATCH")
    assert told["error"]["field"] == "serialized_named_tensors"


async def test_tensors_on_a_gpu_that_no_rank_is_on(server: Server) -> None:
    bucket = {"flattened_tensor": cuda_tensor(32), "metadata": [metadata("w", "bfloat16", (2, 8), 0, 32)]}
    status, told = await write(server, 1, encoded(bucket), load_format="flattened_bucket")
    assert (status, told["error"]["reason"]) == (400, "NOT_COLOCATED")
    assert told["error"]["field"] == "serialized_named_tensors[0]"


async def test_payloads_without_tensors_change_nothing(server: Server) -> None:
    before = await digests(server)
    bucket = {"flattened_tensor": cuda_tensor(0, handle=None), "metadata": []}
    status, told = await write(server, 0, encoded(bucket), encoded(bucket), load_format="flattened_bucket")
    assert (status, told["success"]) == (200, True)
    assert await digests(server) == before


async def test_memory_that_the_trainer_has_freed(server: Server) -> None:
    before = await digests(server)
    await server.every("POST", "/pause_generation", {})
    status, told = await write(server, 1, encoded([("model.embed_tokens.weight", GONE)]))
    assert (status, told["success"]) == (400, False)
    assert told["error"]["reason"] in ("SEGMENT_NOT_FOUND", "FIELD_INVALID")
    assert [status for status, _ in await server.every("POST", "/continue_generation", {})] == [200, 200]
    assert await digests(server) == before


async def test_two_hundred_mutated_payloads_change_nothing(server: Server) -> None:
    random_ = random.Random(36)
    before = await digests(server)
    flat = {"flattened_tensor": cuda_tensor(32), "metadata": [metadata("w", "bfloat16", (2, 8), 0, 32)]}
    seeds = [
        (assemble(flat), "flattened_bucket"),
        (assemble([("model.norm.weight", shared_tensor(4, nbytes=16)), ("b", cuda_tensor(4))]), None),
        (assemble([("model.embed_tokens.weight", GONE)]), None),
    ]
    await server.every("POST", "/pause_generation", {})
    for _ in range(200):
        data, load_format = random_.choice(seeds)
        payload = base64.b64encode(mutated(random_, data)).decode()
        started = time.monotonic()
        status, told = await write(server, 1, payload, load_format=load_format)
        assert time.monotonic() - started < 10.0
        assert (status, told["success"]) == (400, False), told
        assert told["error"]["reason"] in REFUSALS
    assert [status for status, _ in await server.every("POST", "/continue_generation", {})] == [200, 200]
    assert await digests(server) == before
    assert [status for status, _ in await server.every("GET", "/ready")] == [200, 200]


REFUSALS = ("FIELD_INVALID", "UNSUPPORTED", "NOT_COLOCATED", "SEGMENT_NOT_FOUND")

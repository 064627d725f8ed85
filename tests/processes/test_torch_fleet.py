"""Trainer, coordinator and torch engines of different TP as real processes: weights over gloo and from disk."""

from __future__ import annotations

import copy
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import of_each
from digests import holds
from interrupted_weights import Interrupted
from models import Halfway, changed, greedy
from shared_memory import mapped_by

import rlctl
from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.demo.tiny import EOS, encode, save
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.trainer.publisher import Publisher
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v
from rlctl.weights.group.rendezvous import GroupStore
from rlctl.weights.tensor.placement import SHARED_MEMORY

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]


LONG = 400
"""Tokens of a request that an update catches in flight."""


@pytest.fixture(scope="module")
def fleet(torch_fleet: LaunchedFleet) -> Iterator[Fleet]:
    with torch_fleet.connect() as fleet:
        yield fleet


@pytest.fixture(scope="module")
def publisher(fleet: Fleet) -> Iterator[Publisher]:
    publisher = fleet.publisher("actor", trainer="test")
    yield publisher
    publisher.close()


def digests(fleet: Fleet) -> set[str]:
    operation = fleet.check_weights()
    return {rank.check.model_digest for stage in operation.stage_results for rank in stage.rank_results}


def all_generate_like(fleet: Fleet, model: Any) -> None:
    for prompt in (encode(text) for text in ("1+2=", "7+", "9")):
        expected = greedy(model, prompt, 8)
        for response in of_each(fleet, prompt, max_new_tokens=8, temperature=0.0, ignore_eos=True):
            assert list(response.samples[0].output_ids) == expected


def test_an_update_reaches_every_rank_of_every_layout(
    fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path]
) -> None:
    model = changed(tiny[0], seed=1)
    result = publisher.update(model, version="one")
    assert holds([result.model_digest], model)
    assert digests(fleet) == {result.model_digest}
    assert [len(stage.rank_results) for stage in result.operation.stage_results] == [2, 1]
    assert {stage.verified for stage in result.operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
    assert result.bytes_sent >= sum(p.numel() * 4 for p in model.parameters())
    assert result.pause_s > 0
    all_generate_like(fleet, model)
    response = fleet.generate(encode("1+1="), max_new_tokens=2)
    assert response.samples[0].versions[0].version == result.version


def test_the_groups_of_one_update_serve_the_next(fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path]) -> None:
    for number in range(3):
        model = changed(tiny[0], seed=10 + number)
        result = publisher.update(model, version=f"again-{number}")
        assert holds(digests(fleet), model)
    made = [o for o in fleet.operations(page_size=200) if o.verb == "InitWeightsUpdateGroup"]
    assert len(made) == 1
    assert fleet.status().models[0].latest == result.version


def test_what_one_update_had_time_for_limits_no_later_one_over_its_groups(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    with fleet.publisher("actor", trainer="test") as publisher:
        started = time.monotonic()
        publisher.update(changed(tiny[0], seed=29), version="timed")
        limit_s = max(2.0, 10 * (time.monotonic() - started))  # a busy machine needs more
        publisher.update(changed(tiny[0], seed=30), version="quick", deadline_s=limit_s)
        # Longer than the limit of the update before.
        slow = Halfway(changed(tiny[0], seed=31), lambda: time.sleep(limit_s + 0.5))
        result = publisher.update(slow, version="slow")
    assert digests(fleet) == {result.model_digest}


def test_small_buckets_and_pairs_give_the_same_weights(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    model = changed(tiny[0], seed=2)
    publisher = fleet.publisher("actor", bucket_bytes=64 << 10)
    pairs = ((name, parameter.detach()) for name, parameter in reversed(list(model.named_parameters())))
    publisher.update(pairs, version="pairs")
    publisher.close()
    assert holds(digests(fleet), model)


@pytest.mark.parametrize("mode", ["retract", "in_place", "in_place, entries kept", "abort"])
def test_requests_in_flight_meet_an_update_as_the_mode_says(
    fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path], mode: str
) -> None:
    pause, _, keeps = mode.partition(", ")
    for turn in range(5):  # beside much other work it may have ended before the update comes
        publisher.update(changed(tiny[0], seed=19), version="before")  # the groups stand: the pause comes at once
        model, label = changed(tiny[0], seed=20), f"in-flight-{mode}-{turn}"
        stream = fleet.generate_stream(encode("5+"), max_new_tokens=LONG, temperature=0.0, ignore_eos=True)
        parts = [next(stream)]
        publisher.update(model, version=label, pause=pause, flush=False if keeps else None)
        parts += stream
        tokens = [token for part in parts for token in part.samples[0].output_ids]
        finish = parts[-1].samples[0].finish_reason.type
        versions = {span.version.label for part in parts for span in part.samples[0].versions}
        if finish == 3 or label in versions:
            break
    if mode == "abort":
        assert finish == 3
        assert len(tokens) < LONG
    else:
        assert finish == 1
        assert len(tokens) == LONG
        assert label in versions
        kept = len(
            [
                t
                for part in parts
                for s in part.samples[0].versions
                if s.version.label != label
                for t in range(s.start, s.end)
            ]
        )
        entries = {s.kv_version.label for part in parts for sample in part.samples for s in sample.versions}
        if keeps:
            assert entries == {"", "before"}, "the response says what it was computed from"
        else:
            assert entries == {""}
            clean = greedy(model, encode("5+") + tokens[:kept], LONG - kept)
            assert tokens[kept:] == clean, "no KV entry of old weights"


def test_from_disk(fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    model = changed(tiny[0], seed=4)
    model.save_pretrained(tmp_path / "saved")
    operation = fleet.update_weights_from_disk(str(tmp_path / "saved"), version="disk")
    assert operation.model_digest == rlctl.model_digest(model)
    assert digests(fleet) == {operation.model_digest}
    all_generate_like(fleet, model)
    other = changed(tiny[0], seed=5)
    with pytest.raises(OperationFailed) as caught:
        publisher.update(other, version="wrong", checkpoint=str(tmp_path / "saved"))
    assert "DIGEST_MISMATCH" in {r.error.reason for r in caught.value.operation.stage_results}
    publisher.update(other, version="healed")
    all_generate_like(fleet, other)


def bad_checkpoints(model: Any, directory: Path) -> dict[str, tuple[Path, str]]:
    """Directories that must not load, and what their refusal must name."""
    from safetensors.torch import load_file, save_file

    def saved(name: str) -> Path:
        model.save_pretrained(directory / name)
        return directory / name

    missing = saved("missing")
    tensors = load_file(missing / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, missing / "model.safetensors")
    extra = saved("extra")
    tensors = load_file(extra / "model.safetensors")
    save_file(tensors | {"model.stranger": torch.zeros(3)}, extra / "model.safetensors")
    shaped = saved("shaped")
    tensors = load_file(shaped / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.zeros(7)}, shaped / "model.safetensors")
    architecture = saved("architecture")
    config = json.loads((architecture / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (architecture / "config.json").write_text(json.dumps(config))
    truncated = saved("truncated")
    content = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(content[: len(content) // 2])
    return {
        "CHECKPOINT_MISMATCH missing": (missing, "model.norm.weight"),
        "CHECKPOINT_MISMATCH extra": (extra, "model.stranger"),
        "CHECKPOINT_MISMATCH shaped": (shaped, "model.norm.weight"),
        "CHECKPOINT_MISMATCH architecture": (architecture, "wen2"),
        "CHECKPOINT_NOT_FOUND truncated": (truncated, "truncated"),
        "CHECKPOINT_NOT_FOUND nowhere": (directory / "nowhere", "nowhere"),
        "CHECKPOINT_NOT_FOUND long": (directory / ("x" * 5000), "xxx"),
    }


def test_bad_checkpoints_are_refused_and_change_nothing(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    before = digests(fleet)
    version = fleet.status().models[0].latest
    for what, (path, named) in bad_checkpoints(tiny[0], tmp_path).items():
        with pytest.raises(OperationFailed) as caught:
            fleet.update_weights_from_disk(str(path))
        assert caught.value.reason.name == what.split()[0], what
        assert named in str(caught.value), what
        assert {r.outcome for r in caught.value.operation.stage_results} == {common.OUTCOME_REJECTED}, what
        assert all(stage.routable for stage in fleet.status().stages), what
    assert digests(fleet) == before
    assert fleet.status().models[0].latest == version
    assert fleet.generate(encode("1+1="), max_new_tokens=1).samples[0].output_ids


@pytest.mark.parametrize("what", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_are_refused(
    fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path], what: str
) -> None:
    model = changed(tiny[0], seed=6)
    pairs = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if what == "missing":
        del pairs["model.norm.weight"]
    elif what == "unknown":
        pairs["model.stranger"] = torch.zeros(3)
    else:
        pairs["model.norm.weight"] = torch.zeros(7)
    named = "model.stranger" if what == "unknown" else "model.norm.weight"
    version = fleet.status().models[0].latest
    for checkpoint in ("", str(tiny[1])):
        with pytest.raises(RlctlError) as caught:
            publisher.update(pairs.items(), version="bad", checkpoint=checkpoint)
        assert named in str(caught.value)
    assert fleet.status().models[0].latest == version, "nothing of it is served"
    assert all(stage.routable for stage in fleet.status().stages), "nothing was paused, nothing was written"
    publisher.update(model, version="good")
    assert holds(digests(fleet), model)
    assert all(stage.routable for stage in fleet.status().stages)


def test_a_source_that_fails_leaves_no_update_open(fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path]) -> None:
    model = changed(tiny[0], seed=7)

    class Failing:
        def metas(self) -> Any:
            from rlctl.weights.tensor.source import as_source

            return as_source(model).metas()

        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            for count, (name, parameter) in enumerate(model.named_parameters()):
                if count == 5:
                    raise ZeroDivisionError("the trainer's own defect")
                yield name, parameter.detach()

    with pytest.raises(ZeroDivisionError, match="own defect"):
        publisher.update(Failing(), version="never", deadline_s=60)
    assert not fleet.status().models[0].update_id
    publisher.update(model, version="after")
    assert holds(digests(fleet), model)


@pytest.mark.parametrize("path", ["ipc", "auto"])
def test_weights_go_through_shared_memory(fleet: Fleet, tiny: tuple[Any, Path], path: str) -> None:
    publisher = fleet.publisher("actor", path=path)
    before = len(fleet.operations(verb="InitWeightsUpdateGroup", page_size=500))
    for number in range(2):
        model = changed(tiny[0], seed=40 + number)
        result = publisher.update(model, version=f"{path}-{number}")
        assert digests(fleet) == {result.model_digest}
        assert holds([result.model_digest], model)
        assert {stage.verified for stage in result.operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
    assert len(fleet.operations(verb="InitWeightsUpdateGroup", page_size=500)) == before, "no group was needed"
    all_generate_like(fleet, model)
    publisher.close()


def test_shared_memory_that_is_full_ends_the_update_before_anything_is_paused(
    fleet: Fleet, tiny: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = changed(tiny[0], seed=45)
    before = fleet.status().models[0].latest
    publisher = fleet.publisher("actor", path="ipc")
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(RlctlError) as caught:
        publisher.update(model, version="full")
    assert caught.value.reason is Reason.SHARED_MEMORY_FULL
    failed = fleet.operations(verb="WeightUpdate")[0].operation_id
    assert not [o for o in fleet.operations(verb="UpdateWeightsFromTensor", page_size=500) if o.update_id == failed]
    assert fleet.status().models[0].latest == before
    assert all(stage.routable for stage in fleet.status().stages)
    monkeypatch.undo()
    publisher.update(model, version="room")
    assert holds(digests(fleet), model)
    publisher.close()


def test_a_failed_update_keeps_no_shared_memory(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    """Not even while somebody keeps what it raised: gigabytes would wait for the garbage collection."""
    publisher = fleet.publisher("actor", path="ipc")
    before, used = mapped_by(os.getpid()), set[str]()

    def note() -> None:
        used.update(mapped_by(os.getpid()) - before)

    def vanish() -> None:
        note()
        for name in used:
            (SHARED_MEMORY / name).unlink(missing_ok=True)

    def fail() -> None:
        note()
        raise ZeroDivisionError

    for happens, error in ((vanish, OperationFailed), (fail, ZeroDivisionError)):
        used.clear()
        with pytest.raises(error) as caught:
            publisher.update(Interrupted(changed(tiny[0], seed=46), happens), version="never", deadline_s=60)
        assert used
        assert not used & mapped_by(os.getpid()), caught.value
    model = changed(tiny[0], seed=47)
    publisher.update(model, version="memory of its own")
    assert holds(digests(fleet), model)
    publisher.close()


def test_sleep_update_wake(fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path]) -> None:
    model = changed(tiny[0], seed=8)
    fleet.pause_generation("retract")
    fleet.release_memory()
    assert {stage.state for stage in fleet.status().stages} == {common.STAGE_STATE_ASLEEP}
    with pytest.raises(RlctlError) as caught:
        publisher.update(model, version="asleep")
    assert caught.value.reason is Reason.MEMORY_RELEASED
    fleet.resume_memory(["weights"])
    publisher.update(model, version="awake")
    fleet.resume_memory()
    fleet.continue_generation()
    all_generate_like(fleet, model)


def test_the_checkers_actions(fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path]) -> None:
    model = changed(tiny[0], seed=9)
    publisher.update(model, version="checked")
    fleet.check_weights("snapshot")
    same = fleet.check_weights("compare")
    for stage in same.stage_results:
        for rank in stage.rank_results:
            assert rank.check.matched == rank.check.tensor_count > 0
            assert not rank.check.changed
    fleet.check_weights("reset_tensors")
    assert {stage.state for stage in fleet.status().stages} == {common.STAGE_STATE_DIRTY}
    with pytest.raises(OperationFailed) as caught:
        fleet.continue_generation()
    assert caught.value.reason is Reason.WEIGHTS_DIRTY
    publisher.update(model, version="restored")
    restored = fleet.check_weights("compare")
    assert not [name for s in restored.stage_results for r in s.rank_results for name in r.check.changed]
    per_tensor = fleet.check_weights(per_tensor=True, slots=["actor-0"])
    names = {t.name for rank in per_tensor.stage_results[0].rank_results for t in rank.check.model_tensors}
    assert names == {name for name, _ in model.named_parameters()}


def test_a_prompt_is_scored(fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path]) -> None:
    model = changed(tiny[0], seed=11)
    publisher.update(model, version="scored")
    prompt = encode("12+34=56")
    with torch.no_grad():
        expected = torch.log_softmax(model(input_ids=torch.tensor([prompt])).logits[0], -1)
    for response in fleet.generate_batch([prompt] * 2, max_new_tokens=0, return_logprob=True, logprob_start_len=0):
        found = [token.logprob for token in response.input_logprobs]
        assert not response.input_logprobs[0].HasField("logprob")
        wanted = [float(expected[i, prompt[i + 1]]) for i in range(len(prompt) - 1)]
        assert found[1:] == pytest.approx(wanted, abs=1e-4)


def test_text_in_and_out(fleet: Fleet) -> None:
    response = fleet.generate("1+2=", max_new_tokens=3, stop_token_ids=[EOS])
    assert response.prompt_tokens == len(response.prompt_ids)
    assert response.samples[0].text is not None


def test_a_trainer_in_another_process_may_take_over(
    fleet: Fleet, torch_fleet: LaunchedFleet, tiny: tuple[Any, Path]
) -> None:
    script = f"""
import rlctl
from rlctl.demo import tiny
with rlctl.connect({torch_fleet.address!r}) as fleet:
    model = tiny.make(seed=77)
    result = fleet.publisher("actor").update(model, version="from another process")
    print(result.model_digest)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert digests(fleet) == {run.stdout.split()[-1]}


def test_a_trainer_in_float32_feeds_a_bfloat16_checkpoint(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    model = copy.deepcopy(tiny[0]).bfloat16()
    save(model, tmp_path / "checkpoint")
    trained = changed(tiny[0], seed=30)
    rounded = copy.deepcopy(trained).bfloat16()
    engines = [EngineSpec("actor-0", str(tmp_path / "checkpoint"))]
    with LaunchedFleet(engines, directory=tmp_path / "fleet") as local, local.connect() as fleet:
        publisher = fleet.publisher("actor")
        result = publisher.update(trained, version="cast")
        assert holds([result.model_digest], rounded)
        assert digests(fleet) == {result.model_digest}
        rounded.save_pretrained(tmp_path / "rounded")
        publisher.update(trained, version="read", checkpoint=str(tmp_path / "rounded"))
        assert holds(digests(fleet), rounded)
        publisher.close()


def test_a_rendezvous_that_never_completes_costs_its_deadline_and_nothing_else(
    fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path]
) -> None:
    store = GroupStore()  # its source never joins
    host, port = store.local_address
    request = v.InitWeightsUpdateGroupRequest(
        master_address=host, master_port=port, world_size=4, group_name="nobody's", backend="gloo"
    )
    operation = fleet.call(request, timeout_s=4, check=False)
    ranks = [rank for stage in operation.stage_results for rank in stage.rank_results]
    assert len(ranks) == 3
    for rank in ranks:
        assert rank.outcome == common.OUTCOME_REJECTED
        assert rank.error.reason == "GROUP_FAILED"
        assert rank.error.metadata["missing_ranks"] == "0", rank.error
    store.close()
    assert all(stage.routable for stage in fleet.status().stages)
    model = changed(tiny[0], seed=31)
    publisher.update(model, version="met")
    assert holds(digests(fleet), model)


def test_group_errors_are_typed_and_change_nothing(fleet: Fleet) -> None:
    with pytest.raises(OperationFailed) as caught:
        fleet.call(v.DestroyWeightsUpdateGroupRequest(group_name="nobody's"))
    assert caught.value.reason is Reason.GROUP_NOT_FOUND
    assert all(stage.routable for stage in fleet.status().stages)

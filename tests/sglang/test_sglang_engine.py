"""The plug-in on a real SGLang of one rank: what it is, requests, and weights by every path."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct
from models import changed, greedy
from rlctl_sglang import SGLangEngine
from rlctl_sglang.requests import requests
from server_stage import Driver, Segments, Source, prompt
from sglang_server import at_the_checkpoint
from up_helpers import known, own_state, rlctl_command, when

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.sdk.blocking import connect
from rlctl.trainer.probe import Probe
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.results_pb2 import OPERATION_STATE_OK

pytestmark = pytest.mark.timeout(300)

RETRACT = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT)


def test_what_it_says_about_itself(driver: Driver, tiny: tuple[Any, Path]) -> None:
    info = driver.info
    assert info.fenced
    assert info.model_digest == rlctl.model_digest(tiny[0])
    assert len(info.layout.workers) == 1
    assert common.VERIFICATION_LEVEL_EXPECTED in info.capabilities.verification
    assert "--enable-memory-saver" in info.capabilities.unsupported["ReleaseMemory"]
    model = driver.tell(v.GetModelInfoRequest(reference=True))
    assert (model.model_type, model.vocab_size, model.context_length) == ("llama", 16, 512)
    assert {tensor.name for tensor in model.reference} == {name for name, _ in tiny[0].named_parameters()}
    server = driver.tell(v.GetServerInfoRequest())
    assert server.engine_version.startswith("0.5.")
    assert server.settings["rlctl_in_ranks"] == server.rlctl_version
    assert not any("key" in name for name in server.settings)
    assert driver.tell(v.GetLoadsRequest()).max_tokens > 0


def test_greedy_tokens_are_those_of_transformers(driver: Driver, tiny: tuple[Any, Path]) -> None:
    driver.engine.set_version(common.WeightVersion(label="initial", sequence=1))
    parts = driver.generate(prompt(encode("1+2="), 8, return_logprob=True, logprob_start_len=0, top_logprobs_num=2))
    samples = [part.samples[0] for part in parts]
    tokens = [token for sample in samples for token in sample.output_ids]
    assert tokens == greedy(tiny[0], encode("1+2="), 8)
    logprobs = [entry for sample in samples for entry in sample.output_logprobs]
    assert [entry.token_id for entry in logprobs] == tokens
    with torch.no_grad():
        logits = tiny[0](input_ids=torch.tensor([encode("1+2=") + tokens])).logits[0]
    wanted = torch.log_softmax(logits, -1)[len(encode("1+2=")) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert [entry.logprob for entry in logprobs] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert all(len(entry.top) == 2 for entry in logprobs)
    assert [entry.token_id for entry in parts[0].input_logprobs] == encode("1+2=")
    assert parts[0].prompt_tokens == len(encode("1+2="))
    assert samples[-1].finish_reason.type == rollout.FINISH_TYPE_LENGTH
    (span,) = samples[-1].versions
    assert (span.version.label, span.version.sequence, span.start, span.end) == ("initial", 1, 0, 8)


def test_what_sglang_says_of_a_sample_comes_whole(driver: Driver) -> None:
    """As of the same request that is sent to the server itself, and is not streamed."""
    fields = Struct()
    fields.update({"token_ids_logprob": [3, 15], "return_text_in_logprobs": True})
    request = prompt(
        encode("1+2="), 6, return_logprob=True, logprob_start_len=0, top_logprobs_num=2, return_engine_meta=True
    )
    request.engine_fields.CopyFrom(fields)
    driver.tell(v.FlushCacheRequest())
    *before, last = [sample for part in driver.generate(request) for sample in part.samples]
    assert not any(sample.HasField("engine_meta") for sample in before)
    said = MessageToDict(last.engine_meta)
    body = {
        "input_ids": encode("1+2="),
        "sampling_params": {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [3, 15],
        "return_text_in_logprobs": True,
    }
    driver.tell(v.FlushCacheRequest())
    native = driver.admin.submit(driver.engine._server.http.call("/generate", body, timeout_s=60, admin=False)).result(
        60
    )
    meta = native.body["meta_info"]
    assert said.keys() == meta.keys()
    for name in meta.keys() - {"id"} - {name for name in meta if isinstance(meta[name], float)}:
        assert flat(said[name]) == pytest.approx(flat(meta[name]), abs=1e-5), name
    assert said["e2e_latency"] > 0


def flat(value: Any) -> list[Any]:
    """Its leaves, in order."""
    if isinstance(value, dict):
        return [leaf for name in sorted(value) for leaf in (name, *flat(value[name]))]
    return [leaf for each in value for leaf in flat(each)] if isinstance(value, list) else [value]


def test_samples_text_and_stops(driver: Driver) -> None:
    request = rollout.GenerateRequest(
        text="1+2=", sampling_params=rollout.SamplingParams(max_new_tokens=6, n=3, ignore_eos=True)
    )
    parts = driver.generate(request)
    for index in range(3):
        mine = [sample for part in parts for sample in part.samples if sample.index == index]
        assert sum(len(sample.output_ids) for sample in mine) == 6
        assert len("".join(sample.text for sample in mine)) <= 6
        assert mine[-1].finish_reason.type == rollout.FINISH_TYPE_LENGTH
    assert [part.prompt_ids for part in parts if part.prompt_ids] == [[5, 14, 6, 15]]
    stop = rollout.SamplingParams(max_new_tokens=400, stop_token_ids=range(2, 16))
    parts = driver.generate(prompt(encode("1"), 200, sampling_params=stop))
    # The sampled tokens below 2 (padding and the like) stop nothing: there may be some before the one that does.
    *before, token = [token for part in parts for token in part.samples[0].output_ids]
    assert token in stop.stop_token_ids
    assert not set(before) & set(stop.stop_token_ids)
    assert parts[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_STOP
    assert parts[-1].samples[0].finish_reason.matched_token == token


def test_requests_are_ended_by_their_ids(driver: Driver) -> None:
    first = driver.begin(prompt(encode("1"), 400, rid="r-1")).started()
    second = driver.begin(prompt(encode("2"), 400, rid="r-10")).started()
    with pytest.raises(RlctlError) as refused:
        driver.generate(prompt(encode("1"), 4, rid="r-1"))
    assert refused.value.reason is Reason.RID_IN_USE
    report = driver.tell(v.AbortRequestsRequest(rids=["r-1", "r-2"]))
    assert (report.aborted, list(report.unknown_rids)) == (1, ["r-2"])
    assert first.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_ABORT
    assert second.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_LENGTH
    assert len(second.tokens) == 400


@pytest.mark.parametrize("mode", ["RETRACT", "IN_PLACE"])
def test_a_pause_keeps_requests_and_continue_lets_them_end(driver: Driver, mode: str) -> None:
    running = driver.begin(prompt(encode("7"), 400)).started()
    driver.tell(v.PauseGenerationRequest(mode=common.PauseMode.Value(f"PAUSE_MODE_{mode}")))
    if mode == "IN_PLACE":
        with pytest.raises(RlctlError) as refused:
            driver.tell(v.FlushCacheRequest())
        assert refused.value.reason is Reason.ACTIVE_REQUESTS
    else:
        assert driver.tell(v.FlushCacheRequest()).tiers == ["radix"]
    driver.tell(v.ContinueGenerationRequest())
    assert running.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_LENGTH
    assert len(running.tokens) == 400


def test_a_pause_that_aborts(driver: Driver) -> None:
    running = driver.begin(prompt(encode("7"), 400)).started()
    driver.tell(v.PauseGenerationRequest())
    assert running.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_ABORT
    driver.tell(v.ContinueGenerationRequest())
    assert len(driver.generate(prompt(encode("7"), 4))) >= 1


@pytest.mark.parametrize("sizes", [{"large_bytes": 1}, {"bucket_bytes": 100_000}], ids=["plain", "flattened"])
def test_weights_over_a_group(driver: Driver, tiny: tuple[Any, Path], sizes: dict[str, int]) -> None:
    update_id = f"u-{sizes}"
    model = changed(tiny[0], seed=len(update_id))
    with Source(driver, f"actor-{len(update_id)}-s0") as source:
        plan = source.plan(model, **sizes)
        driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
        driver.tell(v.PrepareUpdateRequest(), update_id=update_id)
        receiving = driver.submit(source.announce(plan), update_id=update_id)
        source.send(model, plan)
        (result,) = receiving.result(60)
        assert result.weights.tensors == len(list(model.parameters()))
        assert result.weights.bytes_received == sum(p.numel() * 4 for p in model.parameters())
        version = driver.commit(update_id, "over-a-group", 7)
    driver.engine.set_version(version)
    driver.tell(v.FlushCacheRequest())
    assert driver.digest() == rlctl.model_digest(model)
    driver.tell(v.ContinueGenerationRequest())
    generating = driver.begin(prompt(encode("3+"), 12))
    last = generating.result()[-1].samples[0]
    assert generating.tokens == greedy(model, encode("3+"), 12)
    assert last.versions[0].version == version
    assert driver.tell(v.GetModelInfoRequest()).weight_version == version


@pytest.mark.parametrize("load_format", ["", "flattened_bucket", "their_loader.load"])
def test_weights_from_memory(driver: Driver, tiny: tuple[Any, Path], loader: Path, load_format: str) -> None:
    """Plain, packed, and through a loader that the server was started with."""
    assert list(driver.info.capabilities.load_formats) == ["flattened_bucket", "their_loader.load"]
    model = changed(tiny[0], seed=len(load_format) + 50)
    driver.prepare("memory")
    with Segments(driver) as segments:
        (result,) = segments.send(model, "memory", load_format=load_format)
    assert result.evidence == common.EVIDENCE_RANK
    assert result.weights.tensors == len(list(model.parameters()))
    assert result.weights.bytes_received == sum(p.numel() * 4 for p in model.parameters())
    version = driver.commit("memory", "from-memory", 20)
    assert driver.digest() == rlctl.model_digest(model)
    driver.tell(v.FlushCacheRequest())
    driver.tell(v.ContinueGenerationRequest())
    generating = driver.begin(prompt(encode("3+"), 12))
    assert generating.result()[-1].samples[0].versions[0].version == version
    assert generating.tokens == greedy(model, encode("3+"), 12)
    assert not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*")), "what was handed over is gone"
    if load_format == "their_loader.load":
        loaded = (loader / "loaded").read_text().split()
        assert sorted(loaded) == sorted(name for name, _ in model.named_parameters())
        ignored, visited = map(int, (loader / "heap").read_text().split())
        assert ignored > 10 * visited, "on a CPU each flush collects garbage, under the pause"
    else:
        assert not (loader / "loaded").exists()


@pytest.mark.parametrize("mode", ["RETRACT", "IN_PLACE"])
def test_nothing_is_told_of_weights_that_are_being_probed(driver: Driver, tiny: tuple[Any, Path], mode: str) -> None:
    """SGLang goes on with the requests that it paused while it computes the probe."""
    model = changed(tiny[0], seed=60)
    running = driver.begin(prompt(encode("7"), 400)).started()
    driver.tell(v.PauseGenerationRequest(mode=common.PauseMode.Value(f"PAUSE_MODE_{mode}")))
    driver.tell(v.PrepareUpdateRequest(), update_id="probed")
    with Segments(driver) as segments:
        segments.send(model, "probed")
    version = driver.commit("probed", f"probed {mode}", 21)
    wanted = Probe.of(model, [encode("1+2=3"), encode("9")])
    probe = v.CheckWeightsRequest(action=v.CHECK_ACTION_PROBE, prompts=wanted.to_proto().prompts)
    for _ in range(3):
        found = driver.tell(probe).probed
        assert [list(each.logprobs) for each in found] == [pytest.approx(each, abs=1e-4) for each in wanted.logprobs]
    told = len(running.tokens)
    driver.tell(v.ContinueGenerationRequest())
    before, after = running.result()[-1].samples[0].versions
    assert after.version == version
    assert told <= before.end < 400
    assert len(running.tokens) == 400


def test_weights_from_disk(driver: Driver, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    model = changed(tiny[0], seed=5)
    model.save_pretrained(tmp_path / "saved")
    found = driver.tell(v.InspectCheckpointRequest(model_path=str(tmp_path / "saved")))
    assert found.tensors == len(list(model.parameters()))
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    driver.tell(v.PrepareUpdateRequest(), update_id="disk")
    digest = rlctl.model_digest(model)
    request = v.UpdateWeightsFromDiskRequest(model_path=str(tmp_path / "saved"), expected_digest=digest)
    driver.tell(request, update_id="disk")
    driver.commit("disk", "from-disk", 8)
    assert driver.digest() == digest
    driver.tell(v.FlushCacheRequest())
    driver.tell(v.ContinueGenerationRequest())
    generating = driver.begin(prompt(encode("4"), 8))
    generating.result()
    assert generating.tokens == greedy(model, encode("4"), 8)
    assert driver.tell(v.GetModelInfoRequest()).model_path == str(tmp_path / "saved")


def test_no_entry_of_earlier_weights_is_read_though_nothing_was_flushed(
    driver: Driver, tiny: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = encode("12+34=" * 10)

    def generated() -> tuple[list[int], int]:
        generating = driver.begin(prompt(ids, 8))
        cached = generating.result()[-1].samples[0].cached_tokens
        return generating.tokens, cached

    def update(number: int) -> list[int]:
        """New weights under the label of the ones before; what they generate."""
        model = changed(tiny[0], seed=number, scale=0.3)
        driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_ABORT))
        driver.tell(v.PrepareUpdateRequest(), update_id=f"salted {number}")
        with Segments(driver) as segments:
            segments.send(model, f"salted {number}")
        driver.commit(f"salted {number}", "same", 30 + number)
        driver.tell(v.ContinueGenerationRequest())
        return greedy(model, ids, 8)

    tokens = update(1)
    assert generated() == (tokens, 0)
    assert generated() == (tokens, len(ids) - 1)
    tokens = update(2)
    assert generated() == (tokens, 0)
    # Without the salt the entries of the weights before are read.
    monkeypatch.setattr(requests, "with_own", lambda *_: "salt")
    generated()
    tokens = update(3)
    stale, cached = generated()
    assert cached == len(ids) - 1
    assert stale != tokens
    at_the_checkpoint(driver, tiny)


def test_the_checker_scrambles_and_sees_it(driver: Driver) -> None:
    before = driver.tell(v.CheckWeightsRequest())
    (after,) = driver.tell(v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS))
    assert before[0].check.rank_digest != after.check.rank_digest
    assert before[0].evidence == common.EVIDENCE_RANK
    assert driver.digest() != before[0].check.model_digest


@pytest.fixture
def lent(driver: Driver, tiny: tuple[Any, Path]) -> Iterator[Driver]:
    """Others drive its server meanwhile."""
    yield driver
    at_the_checkpoint(driver, tiny)


@pytest.mark.long
def test_weights_that_are_made_up_are_no_version(tiny: tuple[Any, Path]) -> None:
    """As trainers start it that send the first weights themselves; loads from disk work in spite of it."""
    driver = Driver(SGLangEngine, tiny[1], options={"load_format": "dummy"})
    try:
        info = driver.start()
        assert (info.checkpoint, info.model_digest) == ("", "")
        driver.prepare("first")
        driver.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), update_id="first")
        driver.commit("first", "first", 2)
        driver.tell(v.ContinueGenerationRequest())
        running = driver.begin(prompt(encode("4"), 8))
        running.result()
        assert running.tokens == greedy(tiny[0], encode("4"), 8)
    finally:
        driver.stop()


def not_attached(model_path: Path, options: dict[str, str]) -> RlctlError:
    """Why a server cannot be attached to."""
    driver = Driver(SGLangEngine, model_path, options=options)
    try:
        with pytest.raises(RlctlError) as refused:
            driver.start()
    finally:
        driver.stop()
    return refused.value


def test_attaching_to_a_server_that_runs(lent: Driver, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    http = lent.engine._server.http
    lent.tell(v.ContinueGenerationRequest())
    lent.prepare("as it was")
    lent.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), update_id="as it was")
    lent.commit("as it was", "as-it-was", 9)
    lent.tell(v.FlushCacheRequest())
    for name, admin in (("api", False), ("admin", True)):
        (tmp_path / name).write_text(http._keys[admin])
    keys = {"api_key_file": str(tmp_path / "api"), "admin_key_file": str(tmp_path / "admin")}
    error = not_attached(tiny[1], {"url": http.url, **keys})
    assert (error.reason, error.field) == (Reason.ILLEGAL_STATE, "options.url"), "it is paused"
    lent.tell(v.ContinueGenerationRequest())
    error = not_attached(tiny[1], {"url": http.url})
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "options.api_key_file")
    attached = Driver(SGLangEngine, tiny[1], options={"url": http.url, **keys})
    try:
        info = attached.start()
        assert info.fenced
        assert not attached.engine.can_restart()
        assert info.model_digest == rlctl.model_digest(tiny[0])
        running = lent.begin(prompt(encode("7"), 400)).started()
        with pytest.raises(RlctlError) as busy:
            attached.tell(v.PrepareUpdateRequest(), update_id="u")
        assert busy.value.reason is Reason.ACTIVE_REQUESTS, "somebody else's requests count"
        lent.abort(rollout.AbortRequest(abort_all=True))
        running.result()
    finally:
        attached.stop()
    assert lent.tell(v.GetLoadsRequest()).max_tokens > 0, "the server was not ours to end"


def test_half_written_weights_are_not_taken_for_those_of_the_start(
    lent: Driver, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    """The stage server ends in the middle of its first update; SGLang, which it was attached to, does not."""
    http = lent.engine._server.http

    def told(path: str, **body: Any) -> None:
        assert lent.admin.submit(http.call(path, body, timeout_s=30)).result(40).ok

    lent.prepare("first")
    lent.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), update_id="first")
    lent.commit("first", "first", 9)
    lent.tell(v.FlushCacheRequest())
    lent.tell(v.ContinueGenerationRequest())
    told("/update_weight_version", new_version="default", abort_all_requests=False)  # as it was started
    for name, admin in (("api", False), ("admin", True)):
        (tmp_path / name).write_text(http._keys[admin])
    options = {"url": http.url, "api_key_file": str(tmp_path / "api"), "admin_key_file": str(tmp_path / "admin")}
    model = changed(tiny[0], seed=11)
    attached = Driver(SGLangEngine, tiny[1], options=options)
    try:
        assert attached.start().model_digest == rlctl.model_digest(tiny[0])
        attached.prepare("half")
        with Source(attached, "half") as source:
            plan = source.plan(model, bucket_bytes=100_000)
            assert len(plan) > 1
            receiving = attached.submit(source.announce(plan[:1]), update_id="half")
            for packed in source.packed(model, plan[:1]):
                source.group.broadcast(packed)
            receiving.result(60)
    finally:
        attached.stop()
    told("/continue_generation")  # which is what the next stage server asks for
    again = Driver(SGLangEngine, tiny[1], options=options)
    try:
        info = again.start()
        assert (info.checkpoint, info.model_digest) == ("", "")
        again.prepare("whole")  # though SGLang has an update open
        with Source(again, "whole") as source:
            plan = source.plan(model)
            receiving = again.submit(source.announce(plan), update_id="whole")
            source.send(model, plan)
            receiving.result(60)
        again.commit("whole", "whole", 3)
        again.tell(v.FlushCacheRequest())
        again.tell(v.ContinueGenerationRequest())
        running = again.begin(prompt(encode("4"), 8))
        running.result()
        assert running.tokens == greedy(model, encode("4"), 8)
    finally:
        again.stop()


def test_a_trainer_takes_charge_of_it_by_its_url(lent: Driver, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    model, checkpoint = tiny
    http = lent.engine._server.http
    for name, admin in (("api", False), ("admin", True)):
        (tmp_path / name).write_text(http._keys[admin])
    keys = {"api_key_file": str(tmp_path / "api"), "admin_key_file": str(tmp_path / "admin")}
    with rlctl.embedded([http.url], options={**keys, "allowed_roots": str(tmp_path)}) as fleet:
        (stage,) = fleet.status().stages
        assert (stage.registration.slot, stage.routable) == ("actor-0", True)
        (sample,) = fleet.generate(encode("4"), max_new_tokens=8, temperature=0).samples
        assert list(sample.output_ids) == greedy(model, encode("4"), 8)
        other = changed(model, seed=9)
        other.save_pretrained(tmp_path / "other")
        for path, served in ((tmp_path / "other", other), (checkpoint, model)):
            assert fleet.update_weights_from_disk(str(path), options=RETRACT).state == OPERATION_STATE_OK
            (sample,) = fleet.generate(encode("4"), max_new_tokens=8, temperature=0).samples
            assert list(sample.output_ids) == greedy(served, encode("4"), 8)
    # A trainer that is started again has forgotten everything, its server has not: neither weights nor groups.
    for label, served in (("sent", changed(model, seed=10)), ("back", model)):
        with rlctl.embedded([http.url], options=keys) as fleet:
            assert fleet.status().stages[0].report.checkpoint == ("" if label == "back" else str(checkpoint))
            publisher = fleet.publisher("actor", path="broadcast")
            publisher.update(served, version=label)
            (sample,) = fleet.generate(encode("4"), max_new_tokens=8, temperature=0).samples
            assert list(sample.output_ids) == greedy(served, encode("4"), 8)
            publisher.close()
    assert lent.tell(v.GetLoadsRequest()).max_tokens > 0, "the server was not ours to end"


def test_up_attaches_to_external_engines_by_slimes_flags_and_never_ends_them(
    lent: Driver, tiny: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checkpoint = tiny
    http = lent.engine._server.http
    for name, admin in (("api", False), ("admin", True)):
        (tmp_path / name).write_text(http._keys[admin])
    external = ["--rollout-external", "--rollout-external-engine-addrs", http.url.removeprefix("http://")]
    keys = ["--option", f"api_key_file={tmp_path / 'api'}", "--option", f"admin_key_file={tmp_path / 'admin'}"]
    where = ["--hf-checkpoint", str(checkpoint), "--listen", "127.0.0.1:0", "--name", "external"]
    roots = ["--option", f"allowed_roots={tmp_path}"]
    with own_state(monkeypatch, tmp_path):
        up = rlctl_command("up", "--detach", *where, *external, *keys, *roots)
        assert up.returncode == 0, up.stderr
        assert f"(engine sglang at {http.url}, TP 1)" in up.stderr
        with connect(known("external").endpoint) as client:
            (sample,) = client.generate(encode("4"), model="actor", max_new_tokens=8, temperature=0).samples
            assert list(sample.output_ids) == greedy(model, encode("4"), 8)
            other = changed(model, seed=8)
            other.save_pretrained(tmp_path / "other")
            done = client.update_weights_from_disk(str(tmp_path / "other"), version="step-1", options=RETRACT)
            assert done.state == OPERATION_STATE_OK
            (sample,) = client.generate(encode("4"), model="actor", max_new_tokens=8, temperature=0).samples
            assert list(sample.output_ids) == greedy(other, encode("4"), 8)
            # The stage server is ours, and is started again; what it is at is found out, and brought to the version.
            os.kill(known("external").processes["actor-0"], signal.SIGKILL)
            now = when(client, lambda now: now["actor-0"].incarnation == 2 and now["actor-0"].routable)
            assert now["actor-0"].report.weight_version.label == "step-1"
        assert rlctl_command("down", "--name", "external").returncode == 0
    assert lent.tell(v.GetLoadsRequest()).max_tokens > 0, "the server was not ours to end"

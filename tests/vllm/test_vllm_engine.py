"""The plug-in on a real vLLM of one rank: what it is, requests, and weights by every path."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from models import changed, greedy
from server_stage import Driver, Source, prompt, refusal

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.trainer.probe import Probe
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as v
from rlctl.weights.group.process_group import join
from rlctl.weights.shared_memory.sender import SegmentSender
from rlctl.weights.tensor import buckets
from rlctl.weights.tensor.source import as_source

pytestmark = pytest.mark.timeout(300)
_numbers = itertools.count(1)


def reference(model: Any, ids: list[int], tokens: list[int]) -> torch.Tensor:
    """Log probabilities that transformers gives at the output's positions: [tokens, vocabulary]."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids + tokens])).logits[0]
    return torch.log_softmax(logits.float(), -1)[len(ids) - 1 : -1]


def update(driver: Driver, model: Any, take: Any, **prepare: Any) -> common.WeightVersion:
    """A whole update; ``take(update_id)`` sends the weights."""
    number = next(_numbers)
    driver.prepare(f"u{number}", **prepare)
    take(f"u{number}")
    version = driver.commit(f"u{number}", f"v{number}", 10 + number)
    assert driver.digest() == rlctl.model_digest(model)
    driver.tell(v.FlushCacheRequest())
    driver.tell(v.ContinueGenerationRequest())
    return version


def check_serves(driver: Driver, model: Any, version: common.WeightVersion) -> None:
    """It generates what transformers does, and says at which version."""
    generating = driver.begin(prompt(encode("3+"), 12, return_logprob=True))
    last = generating.result()[-1].samples[0]
    assert generating.tokens == greedy(model, encode("3+"), 12)
    assert [span.version for span in last.versions] == [version]
    assert driver.tell(v.GetModelInfoRequest()).weight_version == version


def written(sender: SegmentSender, model: Any) -> v.UpdateWeightsFromTensorRequest:
    """A model in shared memory, and what a stage is told of it."""
    source = as_source(model)
    sent = list(sender.write(source, source.metas()))
    return v.UpdateWeightsFromTensorRequest(segments=[message for segment in sent for message in segment.messages])


@pytest.fixture
def first(driver: Driver, tiny: tuple[Any, Path]) -> None:
    """The weights that it was started with."""
    request = v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1]))
    update(driver, tiny[0], lambda update_id: driver.tell(request, update_id=update_id))


def test_what_it_says_about_itself(driver: Driver, tiny: tuple[Any, Path]) -> None:
    info = driver.info
    assert info.fenced
    assert info.model_digest == rlctl.model_digest(tiny[0])
    (worker,) = info.layout.workers
    assert worker.device == "cpu"
    assert worker.host_id
    assert common.VERIFICATION_LEVEL_EXPECTED in info.capabilities.verification
    assert common.VERIFICATION_LEVEL_PROBE in info.capabilities.verification
    assert "--enable-sleep-mode" in info.capabilities.unsupported["ReleaseMemory"]
    model = driver.tell(v.GetModelInfoRequest(reference=True))
    assert (model.model_type, model.vocab_size, model.context_length) == ("llama", 16, 512)
    assert model.dtype == "torch.float32"
    assert {tensor.name for tensor in model.reference} == {name for name, _ in tiny[0].named_parameters()}
    server = driver.tell(v.GetServerInfoRequest())
    assert server.engine_version == "0.32.0"
    assert server.settings["rlctl_in_ranks"] == server.rlctl_version
    assert driver.tell(v.GetLoadsRequest()).max_tokens > 0


@pytest.mark.usefixtures("first")
def test_greedy_tokens_and_logprobs_are_those_of_transformers(driver: Driver, tiny: tuple[Any, Path]) -> None:
    ids = encode("1+2=")
    parts = driver.generate(prompt(ids, 8, return_logprob=True, top_logprobs_num=3, return_engine_meta=True))
    samples = [part.samples[0] for part in parts]
    assert len(samples) > 1, "it streams"
    tokens = [token for sample in samples for token in sample.output_ids]
    assert tokens == greedy(tiny[0], ids, 8)
    entries = [entry for sample in samples for entry in sample.output_logprobs]
    assert [entry.token_id for entry in entries] == tokens
    wanted = reference(tiny[0], ids, tokens)
    for entry, row in zip(entries, wanted, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-3)
        values, indices = row.topk(3)
        assert [top.token_id for top in entry.top] == indices.tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(values.tolist(), abs=1e-3)
    assert parts[0].prompt_tokens == len(ids)
    last = samples[-1]
    assert last.finish_reason.type == rollout.FINISH_TYPE_LENGTH
    assert (last.versions[0].start, last.versions[0].end, last.completion_tokens) == (0, 8, 8)
    assert last.engine_meta["finish_reason"] == "length"
    assert last.engine_meta["usage"]["completion_tokens"] == 8


@pytest.mark.usefixtures("first")
def test_logprobs_of_what_is_drawn_are_those_after_temperature(driver: Driver, tiny: tuple[Any, Path]) -> None:
    ids = encode("7+")
    params = rollout.SamplingParams(max_new_tokens=12, temperature=0.5, seed=11, ignore_eos=True)
    request = prompt(ids, 0, sampling_params=params, return_logprob=True)
    drawn = []
    for _ in range(2):
        entries = [e for part in driver.generate(request) for e in part.samples[0].output_logprobs]
        drawn.append([entry.token_id for entry in entries])
        with torch.no_grad():
            logits = tiny[0](input_ids=torch.tensor([ids + drawn[-1]])).logits[0, len(ids) - 1 : -1]
        wanted = torch.log_softmax(logits / 0.5, -1).gather(1, torch.tensor(drawn[-1])[:, None])[:, 0]
        assert [entry.logprob for entry in entries] == pytest.approx(wanted.tolist(), abs=1e-3)
    assert drawn[0] == drawn[1], "a seed is honoured"


@pytest.mark.usefixtures("first")
def test_a_prompts_logprobs(driver: Driver, tiny: tuple[Any, Path]) -> None:
    ids = encode("12+34=")
    params = rollout.SamplingParams(max_new_tokens=0)
    (part,) = driver.generate(prompt(ids, 0, sampling_params=params, logprob_start_len=0, top_logprobs_num=2))
    assert [entry.token_id for entry in part.input_logprobs] == ids
    assert not part.input_logprobs[0].HasField("logprob")
    wanted = reference(tiny[0], ids[:1], ids[1:])
    for entry, row in zip(part.input_logprobs[1:], wanted, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-3)
        assert [top.token_id for top in entry.top] == row.topk(2).indices.tolist()
    assert not part.samples[0].output_ids
    assert part.samples[0].finish_reason.type == rollout.FINISH_TYPE_LENGTH
    later = driver.generate(prompt(ids, 3, logprob_start_len=4, return_logprob=True))[-1]
    assert [entry.token_id for entry in later.input_logprobs] == ids[4:]
    assert len(later.samples[0].output_logprobs) == 3


def test_samples_text_and_stops(driver: Driver) -> None:
    sampling = rollout.SamplingParams(max_new_tokens=6, n=3, ignore_eos=True)
    parts = driver.generate(rollout.GenerateRequest(text="1+2=", sampling_params=sampling))
    for index in range(3):
        mine = [sample for part in parts for sample in part.samples if sample.index == index]
        assert sum(len(sample.output_ids) for sample in mine) == 6
        assert mine[-1].finish_reason.type == rollout.FINISH_TYPE_LENGTH
    assert [part.prompt_ids for part in parts if part.prompt_ids] == [[5, 14, 6, 15]]
    stop = rollout.SamplingParams(max_new_tokens=200, stop_token_ids=[3, 4, 5, 6, 7, 8], ignore_eos=True)
    last = driver.generate(prompt(encode("1"), 0, sampling_params=stop))[-1].samples[0]
    assert last.finish_reason.matched_token in range(3, 9)
    words = rollout.SamplingParams(max_new_tokens=400, stop=["7", "8", "9", "1", "2", "3"], ignore_eos=True)
    samples = [part.samples[0] for part in driver.generate(prompt(encode("1"), 0, sampling_params=words))]
    assert samples[-1].finish_reason.matched_string in list(words.stop)
    assert samples[-1].finish_reason.matched_string not in "".join(sample.text for sample in samples)


def test_an_end_of_sequence_token_is_named(driver: Driver) -> None:
    params = rollout.SamplingParams(max_new_tokens=400, temperature=1.0, seed=5)
    samples = [part.samples[0] for part in driver.generate(prompt(encode("1"), 0, sampling_params=params))]
    last = samples[-1]
    assert (last.finish_reason.type, last.finish_reason.matched_token) == (rollout.FINISH_TYPE_STOP, 2)
    assert last.output_ids[-1] == 2


def test_cached_tokens_are_told_and_a_flush_forgets_them(driver: Driver) -> None:
    ids = [5 + i % 9 for i in range(70)]
    driver.tell(v.FlushCacheRequest())
    cached = [driver.generate(prompt(ids, 2))[-1].samples[0].cached_tokens for _ in range(2)]
    assert cached == [0, 64], "two blocks of 32"
    driver.tell(v.FlushCacheRequest())
    assert driver.generate(prompt(ids, 2))[-1].samples[0].cached_tokens == 0


def test_requests_are_ended_by_their_ids(driver: Driver) -> None:
    first = driver.begin(prompt(encode("1"), 400, rid="r-1", return_logprob=True)).started()
    second = driver.begin(prompt(encode("2"), 200, rid="r-10")).started()
    with pytest.raises(RlctlError) as refused:
        driver.generate(prompt(encode("1"), 4, rid="r-1"))
    assert refused.value.reason is Reason.RID_IN_USE
    report = driver.tell(v.AbortRequestsRequest(rids=["r-1", "r-2"]))
    assert (report.aborted, list(report.unknown_rids)) == (1, ["r-2"])
    parts = first.result()
    assert parts[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_ABORT
    assert 0 < len(first.tokens) < 400
    assert sum(len(part.samples[0].output_logprobs) for part in parts) == len(first.tokens)
    assert second.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_LENGTH
    assert len(second.tokens) == 200
    assert driver.tell(v.AbortRequestsRequest(rids=["gone"])).aborted == 0


@pytest.mark.parametrize("requests", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_a_storm_of_requests_is_ended_and_leaves_nothing(driver: Driver, requests: int) -> None:
    """Rounds of requests, all ended between them; of a thousand, some end by themselves before that."""
    for _ in range(3):
        running = [driver.begin(prompt(encode("7"), 400, return_logprob=True)) for _ in range(requests)]
        for each in running[:20]:
            each.started()
        assert driver.abort(rollout.AbortRequest(abort_all=True)).aborted > requests / 2
        ends = []
        for each in running:
            last = each.result()[-1].samples[0]
            ends.append(last.finish_reason.type)
            logprobs = sum(len(part.samples[0].output_logprobs) for part in each.parts)
            assert logprobs == len(each.tokens) == last.completion_tokens
            assert (last.completion_tokens == 400) == (last.finish_reason.type == rollout.FINISH_TYPE_LENGTH)
        assert ends.count(rollout.FINISH_TYPE_ABORT) > requests / 2
        assert not driver.engine._requests.active
    # vLLM counts at its steps: the one after an abort comes a moment after the requests have ended.
    loads = driver.tell(v.GetLoadsRequest())
    while loads.running or loads.waiting:
        loads = driver.tell(v.GetLoadsRequest())


@pytest.mark.parametrize("mode", ["RETRACT", "IN_PLACE"])
def test_a_pause_keeps_requests_and_continue_lets_them_end(driver: Driver, mode: str) -> None:
    running = driver.begin(prompt(encode("7"), 200)).started()
    driver.tell(v.PauseGenerationRequest(mode=common.PauseMode.Value(f"PAUSE_MODE_{mode}")))
    had = len(running.tokens)
    late = driver.begin(prompt(encode("8"), 4))
    if mode == "IN_PLACE":
        with pytest.raises(RlctlError) as refused:
            driver.tell(v.FlushCacheRequest())
        assert refused.value.reason is Reason.ACTIVE_REQUESTS
    else:
        assert driver.tell(v.FlushCacheRequest()).tiers == ["prefix"]
    assert len(running.tokens) <= had + 1
    assert not late.tokens, "what comes during a pause waits"
    driver.tell(v.ContinueGenerationRequest())
    assert running.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_LENGTH
    assert len(running.tokens) == 200
    assert len(late.result()) >= 1


def test_a_pause_that_aborts(driver: Driver) -> None:
    running = driver.begin(prompt(encode("7"), 400)).started()
    driver.tell(v.PauseGenerationRequest())
    assert running.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_ABORT
    driver.tell(v.ContinueGenerationRequest())
    assert len(driver.generate(prompt(encode("7"), 4))) >= 1


def test_a_pause_that_drains(driver: Driver) -> None:
    running = driver.begin(prompt(encode("7"), 200)).started()
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_DRAIN))
    assert running.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_LENGTH
    assert len(running.tokens) == 200
    late = driver.begin(prompt(encode("8"), 4))
    driver.tell(v.GetLoadsRequest())
    assert not late.tokens
    driver.tell(v.ContinueGenerationRequest())
    late.result()


@pytest.mark.parametrize("sizes", [{"large_bytes": 1}, {"bucket_bytes": 100_000}], ids=["plain", "flattened"])
def test_weights_over_a_group(driver: Driver, tiny: tuple[Any, Path], sizes: dict[str, int]) -> None:
    model = changed(tiny[0], seed=next(_numbers))
    with Source(driver, f"actor-{next(_numbers)}") as source:
        plan = source.plan(model, **sizes)

        def take(update_id: str) -> None:
            receiving = driver.submit(source.announce(plan), update_id=update_id)
            source.send(model, plan)
            (result,) = receiving.result(60)
            assert (result.coordinates, result.evidence) == (driver.info.layout.workers[0], common.EVIDENCE_RANK)
            assert result.weights.tensors == len(list(model.parameters()))
            assert result.weights.bytes_received == sum(p.numel() * 4 for p in model.parameters())

        check_serves(driver, model, update(driver, model, take))


def test_weights_out_of_shared_memory(driver: Driver, tiny: tuple[Any, Path]) -> None:
    model = changed(tiny[0], seed=next(_numbers))
    sender = SegmentSender()
    try:
        request = written(sender, model)

        def take(update_id: str) -> None:
            (result,) = driver.tell(request, update_id=update_id)
            assert result.evidence == common.EVIDENCE_RANK

        version = update(driver, model, take)
    finally:
        sender.close()
    check_serves(driver, model, version)


def test_weights_from_disk(driver: Driver, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    model = changed(tiny[0], seed=5)
    model.save_pretrained(tmp_path / "saved")
    path = str(tmp_path / "saved")
    assert driver.tell(v.InspectCheckpointRequest(model_path=path)).tensors == len(list(model.parameters()))
    request = v.UpdateWeightsFromDiskRequest(model_path=path, expected_digest=rlctl.model_digest(model))
    version = update(driver, model, lambda update_id: driver.tell(request, update_id=update_id))
    check_serves(driver, model, version)
    assert driver.tell(v.GetModelInfoRequest()).model_path == path


@pytest.mark.usefixtures("first")
def test_a_partial_update_of_whole_layers(driver: Driver, tiny: tuple[Any, Path]) -> None:
    model = changed(tiny[0], seed=next(_numbers))
    mixed = changed(tiny[0], seed=0)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"] + ["model.norm.weight"]
    fresh = {name: tensor for name, tensor in model.state_dict().items() if name in names}
    mixed.load_state_dict({**tiny[0].state_dict(), **fresh})
    source_weights = [(name, fresh[name]) for name in names]
    with Source(driver, f"part-{next(_numbers)}") as source:
        plan = source.plan(source_weights)

        def take(update_id: str) -> None:
            receiving = driver.submit(source.announce(plan), update_id=update_id)
            source.send(source_weights, plan)
            receiving.result(60)

        check_serves(driver, mixed, update(driver, mixed, take, kind=v.UPDATE_KIND_PARTIAL))


def test_the_digest_of_what_came_is_each_ranks_own(driver: Driver, tiny: tuple[Any, Path]) -> None:
    model = changed(tiny[0], seed=next(_numbers))
    with Source(driver, f"received-{next(_numbers)}") as source:
        plan = source.plan(model)
        driver.prepare("received", digest_received=True)
        receiving = driver.submit(source.announce(plan), update_id="received")
        source.send(model, plan)
        receiving.result(60)
        version = common.WeightVersion(label="received", sequence=10 + next(_numbers))
        (result,) = driver.tell(v.CommitUpdateRequest(version=version), update_id="received")
    driver.engine.set_version(version)
    assert result.weights.received_digest == rlctl.model_digest(model)
    driver.tell(v.FlushCacheRequest())
    driver.tell(v.ContinueGenerationRequest())


def test_a_request_in_flight_goes_on_with_new_weights_only(driver: Driver, tiny: tuple[Any, Path]) -> None:
    sender = SegmentSender()
    for _ in range(4):  # beside much other work it may have ended before the update comes
        model = changed(tiny[0], seed=next(_numbers))
        request = written(sender, model)
        running = driver.begin(prompt(encode("5+"), 120)).started()
        version = update(driver, model, lambda update_id, sent=request: driver.tell(sent, update_id=update_id))
        spans = running.result()[-1].samples[0].versions
        if len(spans) > 1:
            break
    sender.close()
    before, after = spans
    assert after.version == version
    assert not after.HasField("kv_version")
    assert (before.end, after.end) == (after.start, 120)
    kept = running.tokens[: before.end]
    assert running.tokens[before.end : before.end + 30] == greedy(model, encode("5+") + kept, 30)[: 120 - before.end]


def test_a_retract_leaves_no_entries_to_be_told_of(driver: Driver, tiny: tuple[Any, Path]) -> None:
    """vLLM empties its cache with it: an update that flushes nothing keeps none."""
    running = driver.begin(prompt(encode("7"), 200)).started()
    driver.prepare("retracted")
    driver.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), update_id="retracted")
    version = driver.commit("retracted", "retracted", 10 + next(_numbers))
    driver.tell(v.ContinueGenerationRequest())
    after = running.result()[-1].samples[0].versions[-1]
    assert after.version == version
    assert not after.HasField("kv_version")


def test_entries_that_are_kept_over_an_update_are_told(driver: Driver, tiny: tuple[Any, Path]) -> None:
    running = driver.begin(prompt(encode("7"), 200)).started()
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_IN_PLACE))
    driver.tell(v.PrepareUpdateRequest(), update_id="frozen")
    driver.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), update_id="frozen")
    version = driver.commit("frozen", "frozen", 10 + next(_numbers))
    driver.tell(v.ContinueGenerationRequest())
    spans = running.result()[-1].samples[0].versions
    assert spans[-1].version == version
    assert spans[-1].kv_version == spans[0].version, "nothing was flushed: entries of the weights before were used"
    assert len(running.tokens) == 200
    driver.tell(v.FlushCacheRequest())
    (span,) = driver.generate(prompt(encode("7"), 4))[-1].samples[0].versions
    assert not span.HasField("kv_version")


@pytest.mark.parametrize("mode", ["RETRACT", "IN_PLACE", "DRAIN"])
def test_nothing_is_told_of_weights_that_are_being_probed(driver: Driver, tiny: tuple[Any, Path], mode: str) -> None:
    """vLLM goes on with the requests that it paused while it computes the probe."""
    model = changed(tiny[0], seed=next(_numbers))
    running = driver.begin(prompt(encode("7"), 4 if mode == "DRAIN" else 400)).started()
    driver.tell(v.PauseGenerationRequest(mode=common.PauseMode.Value(f"PAUSE_MODE_{mode}")))
    waiting = driver.begin(prompt(encode("5"), 4))
    wanted = Probe.of(model, [encode("1+2=3"), encode("9")])
    probe = v.CheckWeightsRequest(action=v.CHECK_ACTION_PROBE, prompts=wanted.to_proto().prompts)
    sender = SegmentSender()
    driver.tell(v.PrepareUpdateRequest(), update_id="probed")
    assert refusal(driver, probe).reason is Reason.ILLEGAL_STATE
    driver.tell(written(sender, model), update_id="probed")
    version = driver.commit("probed", f"probed {mode}", 10 + next(_numbers))
    sender.close()
    for _ in range(3):
        found = driver.tell(probe).probed
        assert [list(each.logprobs) for each in found] == [pytest.approx(each, abs=1e-4) for each in wanted.logprobs]
    told = len(running.tokens)
    assert not waiting.tokens
    driver.tell(v.ContinueGenerationRequest())
    spans = running.result()[-1].samples[0].versions
    assert len(running.tokens) == (4 if mode == "DRAIN" else 400)
    if mode != "DRAIN":
        before, after = spans
        assert after.version == version
        assert told <= before.end < 400
    assert [span.version for span in waiting.result()[-1].samples[0].versions] == [version]


def test_weights_go_out_over_a_group(driver: Driver, tiny: tuple[Any, Path]) -> None:
    """As to heal another stage: this one is the source."""
    source = as_source(tiny[0])
    layout = driver.info.layout
    name = f"out-{next(_numbers)}"
    joining = driver.submit(
        v.InitWeightsUpdateGroupRequest(
            master_address=layout.store_host,
            master_port=layout.store_port,
            world_size=2,
            rank_offset=0,
            num_ranks=1,
            group_name=name,
            backend="gloo",
        )
    )
    group = join((layout.store_host, layout.store_port), name=name, rank=1, world_size=2, timeout_s=60)
    joining.result(60)
    plan = buckets.plan(source.metas(), large_bytes=1)
    sending = driver.submit(v.SendWeightsRequest(group_name=name, buckets=[buckets.to_proto(b) for b in plan]))
    received = {}
    for meta in source.metas():
        received[meta.name] = torch.empty(meta.shape, dtype=meta.dtype)
        group.broadcast(received[meta.name])
    assert sending.result(60).tensors == len(received)
    driver.tell(v.DestroyWeightsUpdateGroupRequest(group_name=name))
    group.close()
    assert rlctl.model_digest(list(received.items())) == driver.digest()

"""What requests may ask for, and what comes back: streaming, stops, seeds, samples, aborts, refusals."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from pathlib import Path

import pytest
import tokenizers
from rlctl_torch.generation.detokenizer import Tokenizer
from torch_models import EOS, VOCAB, greedy, make_checkpoint, prompt_of
from torch_source import tensors_of
from torch_stage import Stage, generate_request, merge, until
from transformers import PreTrainedTokenizerFast

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import (
    FINISH_TYPE_ABORT,
    FINISH_TYPE_LENGTH,
    FINISH_TYPE_STOP,
    AbortRequest,
    GenerateRequest,
)
from rlctl.v1.verbs_pb2 import AbortRequestsRequest, GetLoadsRequest, GetModelInfoRequest, GetServerInfoRequest

PROMPT = prompt_of(9)


@pytest.fixture(scope="module")
def tokenizer(checkpoints) -> Tokenizer:
    return Tokenizer(checkpoints())


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


async def refused(stage: Stage, prompt: list[int] | str = PROMPT, **fields: object) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        await stage.generate(prompt, **fields)
    return caught.value


async def test_text_prompts_are_tokenised_and_echoed(stage: Stage, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick brown")
    response = await stage.generate("The quick brown", temperature=0, max_new_tokens=5, ignore_eos=True)
    assert list(response.prompt_ids) == ids
    assert response.prompt_tokens == len(ids)
    assert list(response.samples[0].output_ids) == greedy(stage.config.model_path, ids, 5)
    assert not (await stage.generate(ids, max_new_tokens=1)).prompt_ids


async def test_streamed_messages_make_up_the_whole(stage: Stage, tokenizer: Tokenizer) -> None:
    messages = [m async for m in stage.stream(PROMPT, rid="r", temperature=0, max_new_tokens=40, ignore_eos=True)]
    assert len(messages) > 10, "it is delivered as it comes"
    assert all(message.rid == "r" for message in messages)
    sample = merge(messages).samples[0]
    assert list(sample.output_ids) == greedy(stage.config.model_path, PROMPT, 40)
    assert sample.text == text_of(tokenizer, list(sample.output_ids))
    assert (sample.completion_tokens, sample.finish_reason.type) == (40, FINISH_TYPE_LENGTH)
    times = [message.elapsed.ToNanoseconds() for message in messages]
    assert times == sorted(times)
    assert times[-1] > 0


async def test_the_output_stops_at_a_token_which_is_part_of_it(stage: Stage, tokenizer: Tokenizer) -> None:
    output = greedy(stage.config.model_path, PROMPT, 12)
    at = 5
    assert output[at] not in output[:at]
    sample = (await stage.generate(PROMPT, temperature=0, stop_token_ids=[output[at]], max_new_tokens=12)).samples[0]
    assert list(sample.output_ids) == output[: at + 1]
    assert sample.finish_reason.type == FINISH_TYPE_STOP
    assert sample.finish_reason.matched_token == output[at]
    assert sample.text == text_of(tokenizer, output[:at])


async def test_min_new_tokens_ignores_stops_until_then(stage: Stage) -> None:
    output = greedy(stage.config.model_path, PROMPT, 12)
    sample = (
        await stage.generate(
            PROMPT, temperature=0, stop_token_ids=[output[2], output[7]], min_new_tokens=5, max_new_tokens=12
        )
    ).samples[0]
    assert list(sample.output_ids) == output[:8]


async def test_a_stop_string_over_token_boundaries_ends_the_output(stage: Stage, tokenizer: Tokenizer) -> None:
    output = greedy(stage.config.model_path, PROMPT, 30)
    texts = [text_of(tokenizer, output[: n + 1]) for n in range(30)]
    # Ends of one token and beginning of the next, where both are whole characters.
    at = next(
        n
        for n in range(4, 29)
        if "\ufffd" not in texts[n + 1][-6:] and len(texts[n - 1]) < len(texts[n]) < len(texts[n + 1])
    )
    boundary = len(texts[at])
    stop = texts[at + 1][boundary - 1 : boundary + 1]
    where = texts[-1].index(stop)
    for keep in (False, True):
        messages = [
            m
            async for m in stage.stream(
                PROMPT, temperature=0, ignore_eos=True, stop=["never there", stop], no_stop_trim=keep, max_new_tokens=30
            )
        ]
        sample = merge(messages).samples[0]
        assert sample.finish_reason.matched_string == stop
        assert sample.text == texts[-1][: where + (len(stop) if keep else 0)]
        assert list(sample.output_ids) == output[: len(sample.output_ids)]
        assert len(sample.output_ids) <= at + 2


async def test_end_of_sequence_tokens_stop_unless_ignored(stage: Stage) -> None:
    # A flat distribution meets the end of sequence within so many tokens, whatever the model.
    fields = {"temperature": 50.0, "seed": 1, "max_new_tokens": 200, "n": 4}
    stopped = (await stage.generate(PROMPT, **fields)).samples
    longer = (await stage.generate(PROMPT, ignore_eos=True, **fields)).samples
    ended = [s for s in stopped if s.finish_reason.type == FINISH_TYPE_STOP]
    assert ended, "four times 200 draws out of 320 tokens"
    for sample in ended:
        assert sample.finish_reason.matched_token == 0
        assert list(sample.output_ids).index(0) == len(sample.output_ids) - 1
        assert len(longer[sample.index].output_ids) == 200
        assert longer[sample.index].output_ids[: len(sample.output_ids)] == sample.output_ids


async def test_a_seeded_sample_is_the_same_whatever_runs_beside_it(stage: Stage) -> None:
    fields = {"temperature": 1.0, "seed": 42, "max_new_tokens": 20, "ignore_eos": True, "n": 3}
    alone = await stage.generate(PROMPT, **fields)
    among, *_ = await asyncio.gather(
        stage.generate(PROMPT, **fields),
        *(stage.generate(prompt_of(5 + n, n), temperature=0.9, max_new_tokens=30) for n in range(9)),
    )
    outputs = [list(sample.output_ids) for sample in alone.samples]
    assert outputs == [list(sample.output_ids) for sample in among.samples]
    assert len({tuple(output) for output in outputs}) == 3, "samples of one request differ"
    other = await stage.generate(PROMPT, **{**fields, "seed": 43})
    assert [list(s.output_ids) for s in other.samples] != outputs


async def test_unseeded_requests_differ_unless_the_engine_is_seeded(stage1: Stage, checkpoints) -> None:
    fields = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
    first, second = [(await stage1.generate(PROMPT, **fields)).samples[0].output_ids for _ in range(2)]
    assert first != second
    runs = []
    for _ in range(2):
        seeded = Stage(checkpoints(), seed=5)
        await seeded.start()
        runs.append([list((await seeded.generate(PROMPT, **fields)).samples[0].output_ids) for _ in range(2)])
        await seeded.stop()
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


async def test_penalties_change_what_is_generated(stage: Stage) -> None:
    plain = await stage.tokens(PROMPT, 60)
    assert len(set(plain)) < 60, "a greedy output repeats itself"
    once = await stage.tokens(PROMPT, 60, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0)
    assert len(set(once)) > len(set(plain))


async def test_top_logprobs_come_with_every_output_token(stage: Stage) -> None:
    response = await stage.generate(PROMPT, temperature=0, max_new_tokens=4, ignore_eos=True, top_logprobs_num=3)
    for entry in response.samples[0].output_logprobs:
        assert len(entry.top) == 3
        assert entry.top[0].token_id == entry.token_id
        assert math.isclose(entry.top[0].logprob, entry.logprob)
    assert not response.input_logprobs


async def test_more_samples_than_may_run_take_turns(checkpoints) -> None:
    stage = Stage(checkpoints(), max_running=3)
    await stage.start()
    try:
        responses = await asyncio.gather(
            *(stage.generate(prompt_of(4, n), temperature=0, ignore_eos=True, max_new_tokens=5, n=2) for n in range(8))
        )
        for n, response in enumerate(responses):
            expected = greedy(stage.config.model_path, prompt_of(4, n), 5)
            assert [list(sample.output_ids) for sample in response.samples] == [expected, expected]
    finally:
        await stage.stop()


async def test_when_slots_run_out_samples_are_retracted_and_nothing_is_lost(checkpoints, follower) -> None:
    stage = Stage(checkpoints(), follower, max_total_tokens=64)
    await stage.start()
    try:
        responses = await asyncio.gather(
            *(stage.generate(prompt_of(6, n), temperature=0, ignore_eos=True, max_new_tokens=30) for n in range(5))
        )
        for n, response in enumerate(responses):
            expected = greedy(stage.config.model_path, prompt_of(6, n), 30)
            assert list(response.samples[0].output_ids) == expected
        assert sum(response.samples[0].retractions for response in responses) > 0
        (loads, _) = await stage(GetLoadsRequest())
        assert (loads.used_tokens, loads.running, loads.waiting) == (0, 0, 0)
    finally:
        await stage.stop()


async def test_the_context_length_ends_an_output(checkpoints) -> None:
    stage = Stage(checkpoints(), context_length=20)
    await stage.start()
    try:
        sample = (await stage.generate(prompt_of(15), ignore_eos=True, max_new_tokens=100)).samples[0]
        assert (len(sample.output_ids), sample.finish_reason.type) == (5, FINISH_TYPE_LENGTH)
        assert (await refused(stage, prompt_of(20))).reason is Reason.PROMPT_TOO_LONG
        assert (await refused(stage, [10**6] * 20)).reason is Reason.PROMPT_TOO_LONG  # the ids are not looked at
        whole = await stage.generate(prompt_of(20), max_new_tokens=0, logprob_start_len=0)
        assert len(whole.input_logprobs) == 20
        assert (await refused(stage, prompt_of(21), max_new_tokens=0)).reason is Reason.PROMPT_TOO_LONG
    finally:
        await stage.stop()


async def test_responses_say_which_version_each_stretch_is_from(stage: Stage, gate) -> None:
    first, second = WeightVersion(label="a", sequence=1), WeightVersion(label="b", sequence=2)
    stage.engine.set_version(first)
    messages = []
    gate.allow(4)
    async for message in stage.stream(PROMPT, temperature=0, ignore_eos=True, max_new_tokens=10):
        messages.append(message)
        if sum(len(m.samples[0].output_ids) for m in messages) == 4:
            stage.engine.set_version(second)
            gate.open()
    spans = merge(messages).samples[0].versions
    assert [(span.version, span.start, span.end) for span in spans] == [(first, 0, 4), (second, 4, 10)]
    (info, *_) = await stage(GetModelInfoRequest())
    assert info.weight_version == second


async def test_abort_by_id_returns_what_there_is(stage: Stage, gate) -> None:
    running = asyncio.create_task(stage.generate(PROMPT, rid="a", temperature=0, max_new_tokens=100, ignore_eos=True))
    # A prefix of the other's id must not be taken for it.
    other = asyncio.create_task(stage.generate(PROMPT, rid="ab", temperature=0, max_new_tokens=9, ignore_eos=True))
    gate.allow(3)
    await until(lambda: gate.steps >= 3 and gate.held)
    answer = await stage.engine.abort(AbortRequest(rids=["a", "unknown", "a"]))
    assert (answer.aborted, list(answer.unknown_rids)) == (1, ["unknown"])
    gate.open()
    sample = (await running).samples[0]
    assert sample.finish_reason.type == FINISH_TYPE_ABORT
    assert 0 < len(sample.output_ids) < 10
    assert list(sample.output_ids) == greedy(stage.config.model_path, PROMPT, len(sample.output_ids))
    assert (await other).samples[0].finish_reason.type == FINISH_TYPE_LENGTH


async def test_abort_all_ends_waiting_requests_too(stage: Stage, gate) -> None:
    tasks = [
        asyncio.create_task(stage.generate(prompt_of(3, n), max_new_tokens=50, n=3, ignore_eos=True)) for n in range(40)
    ]
    gate.allow(2)
    await until(lambda: gate.steps >= 2)
    (report, *others) = await stage(AbortRequestsRequest(abort_all=True))
    assert report.aborted == 40
    assert all(other.aborted == 0 for other in others), "only rank 0 has requests"
    gate.open()
    for task in tasks:
        assert [sample.finish_reason.type for sample in (await task).samples] == [FINISH_TYPE_ABORT] * 3
    assert (await stage(GetLoadsRequest()))[0].used_tokens == 0


async def test_closing_the_stream_aborts_the_request(stage: Stage, gate) -> None:
    before = (await stage(GetLoadsRequest()))[0].generated_tokens
    gate.allow(2)
    request = generate_request(PROMPT, max_new_tokens=240, ignore_eos=True)
    async with aclosing(stage.engine.generate(request)) as messages:
        await anext(messages)
    gate.open()
    await until(lambda: stage.engine._rank.scheduler.idle)
    (loads, *_) = await stage(GetLoadsRequest())
    assert loads.used_tokens == 0
    assert loads.generated_tokens - before <= 3


async def test_a_rid_is_used_once_at_a_time(stage: Stage, gate) -> None:
    running = asyncio.create_task(stage.generate(PROMPT, rid="same", max_new_tokens=3))
    await asyncio.sleep(0)
    assert (await refused(stage, rid="same")).reason is Reason.RID_IN_USE
    gate.open()
    await running
    await stage.generate(PROMPT, rid="same", max_new_tokens=1)


async def test_what_cannot_be_served_is_refused_before_anything_runs(stage: Stage, checkpoints) -> None:
    error = await refused(stage, top_p=2.0)
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "sampling_params.top_p")
    error = await refused(stage, adapter="lora")
    assert (error.reason, error.field) == (Reason.ADAPTER_NOT_FOUND, "adapter")
    error = await refused(stage, engine_fields={"unheard_of": 1})
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "engine_fields")
    error = await refused(stage, [5, 320])
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "input_ids.ids")
    error = await refused(stage, [])
    assert (error.reason, error.field) == (Reason.FIELD_REQUIRED, "input_ids.ids")
    error = await refused(stage, [5], logprob_start_len=2)
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "logprob_start_len")
    with pytest.raises(RlctlError) as caught:
        await anext(stage.engine.generate(GenerateRequest()))
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_REQUIRED, "text")
    with pytest.raises(RlctlError) as caught:
        await stage.engine.abort(AbortRequest(rids=["a"], abort_all=True))
    assert caught.value.reason is Reason.FIELD_CONFLICT
    assert (await stage(GetLoadsRequest()))[0].waiting == 0


async def test_an_output_tells_the_space_that_it_begins_with(tmp_path: Path) -> None:
    """Decoders like Llama 2's leave it out of a text's beginning, which an output is not; nor is one that goes on."""
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    words = {EOS: 0, **{f"▁word{number}": number for number in range(1, VOCAB)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=EOS))
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS).save_pretrained(path)
    stage = Stage(path)
    await stage.start()
    try:
        output = greedy(path, PROMPT, 6)
        for begun in (0, 3):
            sample = (
                await stage.generate(PROMPT + output[:begun], temperature=0, max_new_tokens=6 - begun, ignore_eos=True)
            ).samples[0]
            assert list(sample.output_ids) == output[begun:]
            assert sample.text == "".join(f" word{token}" for token in output[begun:])
    finally:
        await stage.stop()


async def test_a_checkpoint_without_a_tokenizer_serves_ids_only(checkpoints) -> None:
    stage = Stage(checkpoints(tokenizer=False))
    await stage.start()
    try:
        response = await stage.generate(PROMPT, temperature=0, max_new_tokens=4, ignore_eos=True)
        assert list(response.samples[0].output_ids) == greedy(stage.config.model_path, PROMPT, 4)
        assert response.samples[0].text == ""
        error = await refused(stage, "some text")
        assert (error.reason, error.field) == (Reason.UNSUPPORTED, "text")
        error = await refused(stage, stop=["x"])
        assert (error.reason, error.field) == (Reason.UNSUPPORTED, "sampling_params.stop")
    finally:
        await stage.stop()


async def test_the_ranks_say_what_they_are(stage: Stage) -> None:
    path = stage.config.model_path
    infos = await stage(GetModelInfoRequest())
    servers = await stage(GetServerInfoRequest())
    loads = await stage(GetLoadsRequest())
    for info in infos:
        assert (info.model_path, info.model_type, info.dtype) == (path, "llama", "torch.float32")
        assert (info.vocab_size, info.context_length) == (320, 256)
        assert list(info.architectures) == ["LlamaForCausalLM"]
        assert not info.reference
    assert infos[0].tokenizer_path == path
    for info in await stage(GetModelInfoRequest(reference=True)):
        found = {tensor.name: (tensor.dtype, tuple(tensor.shape.dims)) for tensor in info.reference}
        assert found == {name: (str(t.dtype), tuple(t.shape)) for name, t in tensors_of(path).items()}
    if len(infos) == 2:
        assert infos[0].local_parameters == infos[1].local_parameters
        assert servers[0].pid != servers[1].pid
        assert loads[1].max_tokens == 0
    assert [server.settings["rank"] for server in servers] == [str(rank) for rank in range(len(servers))]
    assert loads[0].max_tokens == 16384
    assert loads[0].step > 0


async def test_requests_come_from_another_event_loop_than_verbs(stage: Stage) -> None:
    await stage(GetLoadsRequest())
    answer = await asyncio.to_thread(lambda: asyncio.run(stage.tokens(PROMPT, 5)))
    assert answer == greedy(stage.config.model_path, PROMPT, 5)

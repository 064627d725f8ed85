"""What is read of bodies that are passed on, and what is put into bodies and answers."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlctl_servers.data_port.answers import Labels, Relabelling
from rlctl_servers.requests.passed_bodies import check_token_ids, overridden
from rlctl_servers.updates.version_labels import Stamps

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import TokenIds

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), VALUES), st.dictionaries(st.text(), VALUES), st.sampled_from([None, 1]))
def test_fields_are_put_into_an_object_and_the_rest_stays(
    document: dict[str, Any], fields: dict[str, Any], indent: int | None
) -> None:
    body = json.dumps(document, indent=indent).encode() + b" \n"
    put = overridden(body, fields)
    assert json.loads(put) == orjson.loads(put) == {**document, **fields}
    assert put.startswith(body.rstrip()[:-1])


@pytest.mark.parametrize(
    "value",
    [
        None,
        "a text",
        [],
        [0, 9],
        [[1], [2, 3]],
        [[1], None],
        ["a", "b"],
        TokenIds(ids=[1, 9]),
        [TokenIds(ids=[1]), [2]],
    ],
)
def test_prompts_of_the_vocabulary_pass(value: object) -> None:
    check_token_ids(value, 10, "prompt", texts=True)


@pytest.mark.parametrize("value", ["7", ["7"], [["7"]], [{}], {}])
def test_texts_are_no_token_ids_where_only_these_are_taken(value: object) -> None:
    check_token_ids([[1], [2]], 10, "stop_token_ids")
    with pytest.raises(RlctlError):
        check_token_ids(value, 10, "stop_token_ids")


@pytest.mark.parametrize(
    "value",
    [
        *([10], [-1], [[1], [10]], ["1", 1], [1.0], [True, 1], [None, 1], 3, True, [[["1", 2]]], TokenIds(ids=[10])),
        *([[1], "a", 2], [1, [2]]),
    ],
)
def test_other_prompts_are_refused(value: object) -> None:
    with pytest.raises(RlctlError) as refused:
        check_token_ids(value, 10, "prompt", texts=True)
    assert (refused.value.reason, refused.value.field) == (Reason.FIELD_INVALID, "prompt")


def stamps() -> Stamps:
    made = Stamps("default")
    made.bind(WeightVersion(label="first", sequence=1))
    version = WeightVersion(label='step "2"', sequence=2)
    label = made.of(version)
    made.bind(version, label)
    made.label = label
    return made


def test_labels_become_those_of_the_trainer() -> None:
    made = stamps()
    label = orjson.dumps(made.label).decode()
    labels = Labels(made, {"base:a@1#2": "base:a"})
    text = json.dumps(json.dumps({"weight_version": made.label, "version": "1", "model": "base:a@1#2"}))
    spans = f'[{{"version": {label},"start":0}}]'
    answer = (
        f'{{"metadata":{{"weight_version":{label},"weight_versions":{spans}}},"version":"1.0","text":{text},'
        f'"model":"base:a@1#2","choices":[{{"weight_versions":{spans}}}]}}'
    )
    put = labels.put_into(answer.encode())
    spans_of_trainer = [{"version": 'step "2"', "start": 0}]
    assert orjson.loads(put) == {
        "metadata": {"weight_version": 'step "2"', "weight_versions": spans_of_trainer},
        "version": "1.0",
        "text": json.loads(text),
        "model": "base:a",
        "choices": [{"weight_versions": spans_of_trainer}],
    }


PLACES = {
    *("model", "id", "root", "weight_version", "meta_info.id", "meta_info.weight_version", "metadata.weight_version"),
    *("meta_info.weight_versions.version", "metadata.weight_versions.version", "choices.weight_versions.version"),
    *("choices.meta_info.id", "choices.meta_info.weight_version", "choices.meta_info.weight_versions.version"),
    *("message.id", "message.model", "response.id", "response.model", "data.id", "data.root"),
}
KEYS = sorted({key for place in PLACES for key in place.split(".")} | {"input", "content", 'x": {"model', "[{"})


def renamed(value: Any, path: str = "", lists: int = 0) -> Any:
    """The server's names replaced at its places, by a walk through the parsed document."""
    if isinstance(value, dict):
        below = {key: f"{path}.{key}".removeprefix(".") if lists < 2 else "nowhere" for key in value}
        return {key: renamed(each, below[key]) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each, path, lists + 1) for each in value]
    key = path.rpartition(".")[2]
    if lists or path not in PLACES or not isinstance(value, str):
        return value
    if key in ("version", "weight_version"):
        return 'step "2"' if value == 'step "2"@2' else value
    return "mine" if value == "base" else value


def drawn(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if kind < 0.5 and depth < 5:
        return {rng.choice(KEYS): drawn(rng, depth + 1) for _ in range(rng.randrange(1, 6))}
    if kind < 0.7 and depth < 5:
        return [drawn(rng, depth + 1) for _ in range(rng.randrange(4))]
    return rng.choice(["base", 'step "2"@2', '"model":"base"', "]}", "\\", '{"', 1, None, -0.5])


def test_only_the_servers_own_names_are_replaced() -> None:
    """The input of a tool is JSON that a model has generated, and may have keys and texts like the server's own."""
    rng, changed = random.Random(7), 0
    labels = Labels(stamps(), {"base": "mine"}, strict=False)
    for _ in range(10_000):
        document = drawn(rng)
        separators = rng.choice([(",", ":"), (", ", ": "), (" ,\n", " : ")])
        answer = json.dumps(document, separators=separators).encode()
        expected = json.dumps(renamed(document), separators=separators).encode()
        assert labels.put_into(answer) == expected, answer
        changed += answer != expected
    assert changed > 100


def test_the_input_of_a_tool_stays() -> None:
    made = stamps()
    use = b'{"type":"tool_use","id":"base","input":{"model":"base","weight_version":"default","data":[{"id":"base"}]}}'
    answer = b'{"id":"msg","content":[%b],"model":"%b"}'
    assert Labels(made, {"base": "mine"}).put_into(answer % (use, b"base")) == answer % (use, b"mine")
    events = b'event: message_start\ndata: {"message":{"model":"base"}}\n\ndata: {"content_block":%b}\n\n' % use
    relabelling = Relabelling(Labels(made, {"base": "mine"}), "text/event-stream")
    assert relabelling.put_into(events) == events.replace(b'"base"', b'"mine"', 1)


@pytest.mark.parametrize("label", ["default", "foreign", "step@9"])
def test_a_version_that_is_older_or_of_somebody_else_is_no_answer(label: str) -> None:
    answer = b'{"weight_version":"%b"}' % label.encode()
    with pytest.raises(RlctlError) as refused:
        Labels(stamps(), {}).put_into(answer)
    assert refused.value.reason is Reason.ENGINE_FAILED
    if label != "default":
        assert Labels(stamps(), {}, strict=False).put_into(answer) == answer


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_relabelled_however_they_come(size: int) -> None:
    made = stamps()
    whole = b'data: {"meta_info":{"weight_version":%b}}\n\ndata: [DONE]\n\n' % orjson.dumps(made.label)

    relabelling = Relabelling(Labels(made, {}), "text/event-stream")
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    body = b"".join(relabelling.put_into(piece) for piece in [*pieces, b""])
    assert body == relabelling.put_whole(whole) == whole.replace(orjson.dumps(made.label), b'"step \\"2\\""')
    assert not relabelling.put_into(b"")


def test_a_document_is_relabelled_whole_and_other_content_stays() -> None:
    made = stamps()
    document = b'{"weight_version":%b}' % orjson.dumps(made.label)
    assert Relabelling(Labels(made, {}), "application/json").put_whole(document) == b'{"weight_version":"step \\"2\\""}'
    other = Relabelling(Labels(made, {}), "text/plain")
    assert other.put_whole(document) == other.put_into(document) == document

"""What is read of bodies that are passed on, and what is put into bodies and answers."""

from __future__ import annotations

import json
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
    answer = (
        f'{{"weight_version":{label},"x":[{{"version": {label}}}],"version":"1.0","text":{text},"model":"base:a@1#2"}}'
    )
    put = labels.put_into(answer.encode())
    assert orjson.loads(put) == {
        "weight_version": 'step "2"',
        "x": [{"version": 'step "2"'}],
        "version": "1.0",
        "text": json.loads(text),
        "model": "base:a",
    }


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

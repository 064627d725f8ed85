"""Valid values of fields, so that inputs get past the first check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.ports import new_uuid7
from rlctl.version import CONTRACT_VERSION
from tests.fuzz.http_requests import Fields
from tests.support.client_bodies import SENT

_NAMES = (
    *("url", "worker_url", "text", "mode", "stages", "timeout_s", "timeout", "torch_empty_cache", "model_path", "path"),
    *("weight_version", "segments", "names", "dtypes", "dtype_names", "shapes", "group_name", "master_address"),
    *("master_port", "backend", "world_size", "rank_offset", "action", "disabled", "level", "tags", "method", "args"),
    *("kwargs", "init_info", "update_info", "new_version", "request_ids", "token_ids", "sampling_params", "model"),
    *("session_id", "prompt", "tokens", "is_checkpoint_format", "target", "reset_running_requests", "packed", "rid"),
    *("wait_for_inflight_request", "lora_name", "lora_path", "lora_int_id", "load_inplace", "serialized_named_tensors"),
    *("load_format", "flush_cache", "abort_all_requests", "abort_all", "abort_message", "files", "zmq_handles", "name"),
    *("adapter", "pinned", "input_ids", "stream", "n", "return_logprob", "messages", "max_tokens", "stop", "echo"),
)
"""Fields of requests of SGLang, vLLM and their clients, besides those of :data:`SENT`."""


def of_messages(checkpoint: str, other: str) -> Mapping[str, Sequence[Any]]:
    """Return valid values by the name of a field of the contract. ``checkpoint`` is served, ``other`` is not."""
    ids = [new_uuid7() for _ in range(24)]
    return {
        "request_id": ids,
        "operation_id": ids,
        "command_id": ids,
        "update_id": [*ids[:2], ""],
        "model": ["actor", "actor", ""],
        "slots": ["a", "b"],
        "slot": ["a", "b", "c"],
        "for_slot": ["", "a"],
        "stages": ["main"],
        "stage": ["main"],
        "timeout": [],
        "seconds": [1, 2],
        "nanos": [0, 500_000_000],
        "model_path": [checkpoint, other],
        "path": [checkpoint, other],
        "checkpoint": [checkpoint, other],
        "label": ["v1", "v2"],
        "version": ["v1", "v2"],
        "weight_version": ["v1"],
        "adapter": ["", "math"],
        "name": ["math", "weights", "trainer"],
        "names": ["weights"],
        "dtypes": ["float32"],
        "dtype": ["float32"],
        "dims": [1, 2],
        "shape": [1, 2],
        "group_name": ["group"],
        "backend": ["gloo"],
        "master_address": ["127.0.0.1"],
        "store_address": ["127.0.0.1"],
        "master_port": [1, 29500],
        "world_size": [2, 3],
        "rank_offset": [1],
        "rids": ["r1", "r2"],
        "rid": ["r1", "r2"],
        "ids": [1, 2, 3],
        "text": ["x"],
        "max_new_tokens": [1, 2],
        "n": [1],
        "temperature": [],
        "engine": ["fake"],
        "boot_id": ids[:3],
        "address": ["127.0.0.1:1"],
        "contract_version": [CONTRACT_VERSION],
        "fleet_epoch": [1, 2, 3],
        "incarnation": [1, 2],
        "verb": ["PauseGeneration", ""],
        "key": ["one", "two"],
        "body_sha256": [b"\x00" * 32],
        "watch_id": ["", "w"],
        "page_size": [0, 1, 10],
        "page_token": [""],
        "principal": [""],
        "rank": [1, 2],
        "update": [1, 2, 3],
        "source": [0, 1],
        "attempt": [1],
        "num_sources": [1],
        "service": ["", "rlctl.v1.CoordinatorService"],
        "reason": ["FIELD_INVALID", "INTERNAL_TEST"],
    }


def of_bodies(checkpoint: str, other: str) -> Fields:
    """Return names and valid values of the fields of HTTP bodies."""
    words: dict[str, list[Any]] = {
        "mode": ["abort", "retract", "in_place", "keep", "wait"],
        "model_path": [checkpoint, other],
        "path": [checkpoint, other],
        "lora_path": [checkpoint, "math"],
        "lora_name": ["math"],
        "model": ["actor", "default"],
        "tags": [["kv_cache"], ["weights"], ["kv_cache", "weights"]],
        "prompt": ["x", [1, 2], [[1], [2]]],
        "text": ["x", ["x", "y"]],
        "input_ids": [[1, 2], [[1], [2]]],
        "token_ids": [[1, 2]],
        "messages": [[{"role": "user", "content": "x"}]],
        "sampling_params": [{"max_new_tokens": 1}, {"max_tokens": 1, "n": 1}],
        "max_tokens": [1, 2],
        "n": [1, 2],
        "target": [{"model": "actor"}, "a"],
        "rid": ["r1"],
        "action": ["checksum", "snapshot", "compare"],
        "worker_url": ["http://127.0.0.1:1"],
        "url": ["http://127.0.0.1:1"],
        "group_name": ["group"],
        "backend": ["gloo"],
        "master_address": ["127.0.0.1"],
        "timeout": [0.1],
        "timeout_s": [0.1],
    }
    names = list(dict.fromkeys([*_NAMES, *(name for sent in SENT for name in sent.body)]))
    plain: tuple[Any, ...] = (
        1,
        2,
        "x",
        "float32",
        ["x"],
        ["float32"],
        [[1]],
        [1, 2],
        {"n": 1},
        {},
        [],
        True,
        False,
        None,
        0.5,
    )
    return Fields(names, words, plain)


def bodies_of(path: str) -> list[Mapping[str, Any]]:
    """Return the bodies that clients of other projects send to a path."""
    return [{**sent.body} for sent in SENT if path.endswith(sent.path)]

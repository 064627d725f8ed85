"""Rules for generation requests: sampling parameters, engine fields and pairs, the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from google.protobuf.struct_pb2 import Struct, Value

from rlctl.contract.errors import Reason
from rlctl.v1.rollout_pb2 import GenerateRequest, SamplingParams

DEFAULT_NEW_TOKENS = 128
MOST_SAMPLES = 4096

LEAST_PENALTY = 0.001
"""Smallest repetition penalty. A logit divided by a smaller penalty may leave float32. Its probability is then NaN,
which ends an engine.
"""
MOST_LEVELS = 24
"""Nesting of objects and lists in ``engine_fields``. Each level takes up to three nested messages, and protobuf reads
at most a hundred. An unreadable message breaks the stream that many requests share.
"""
MOST_META_LEVELS = MOST_LEVELS + 4
"""Nesting in ``engine_meta``, which may repeat ``engine_fields``."""
MOST_ROOM = (1 << 63) - 1
"""Largest bootstrap_room: SGLang keeps the room in a signed 64-bit number."""


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise FIELD_INVALID, with the field's path, for the first value that is not allowed.

    ``vocab_size``: number of tokens in the model's vocabulary. The comparisons are false for NaN.
    """
    allowed = {
        "temperature": (not params.HasField("temperature") or 0 <= params.temperature < math.inf, "0 or more"),
        "top_p": (not params.HasField("top_p") or 0 < params.top_p <= 1, "above 0 and at most 1"),
        "top_k": (not params.HasField("top_k") or params.top_k == -1 or params.top_k >= 1, "-1 or at least 1"),
        "min_p": (0 <= params.min_p <= 1, "from 0 to 1"),
        "n": (params.n <= MOST_SAMPLES, f"at most {MOST_SAMPLES}"),
        "stop": (all(params.stop), "without empty strings"),
        "stop_token_ids": (all(i < vocab_size for i in params.stop_token_ids), f"below {vocab_size}"),
        "frequency_penalty": (-2 <= params.frequency_penalty <= 2, "from -2 to 2"),
        "presence_penalty": (-2 <= params.presence_penalty <= 2, "from -2 to 2"),
        "repetition_penalty": (
            not params.HasField("repetition_penalty") or LEAST_PENALTY <= params.repetition_penalty <= 2,
            f"from {LEAST_PENALTY:g} to 2",
        ),
        "min_new_tokens": (
            params.min_new_tokens
            <= (params.max_new_tokens if params.HasField("max_new_tokens") else DEFAULT_NEW_TOKENS),
            "at most max_new_tokens",
        ),
    }
    for name, (is_valid, words) in allowed.items():
        if not is_valid:
            value = getattr(params, name)
            printable = list(value) if name.startswith("stop") else value
            raise Reason.FIELD_INVALID.error(
                f"{name} is {printable}; it must be {words}", field=f"sampling_params.{name}"
            )


def check_samples(params: SamplingParams) -> None:
    """Raise FIELD_INVALID for too many samples of a prompt, before samples are made."""
    if params.n > MOST_SAMPLES:
        raise Reason.FIELD_INVALID.error(
            f"n is {params.n}; it must be at most {MOST_SAMPLES}", field="sampling_params.n"
        )


def seed_of(params: SamplingParams, index: int) -> int | None:
    """Return the seed of a sample, by its index in the request; None: the request has no seed."""
    return (params.seed + index) % (1 << 63) if params.HasField("seed") else None


def check_levels(fields: Mapping[str, object] | Struct, where: str = "engine_fields.", *, within: int = 1) -> None:
    """Raise FIELD_INVALID for the first entry of ``engine_fields`` that is nested too deeply.

    ``where``: prefix of the entry's name in errors; ``within``: number of objects around the entries. A protobuf value
    without a kind is refused as well: JSON has no such value.
    """
    if isinstance(fields, Struct):
        for name, each in fields.fields.items():
            if not _is_set(each):
                raise Reason.FIELD_INVALID.error(
                    "a google.protobuf.Value without a kind",
                    field=f"{where}{name}",
                    next_step="Set null_value for null.",
                )
    for name, value in fields.items():
        if deeper(value, MOST_LEVELS - within):
            raise Reason.FIELD_INVALID.error(
                f"objects and lists are nested deeper than {MOST_LEVELS} levels", field=f"{where}{name}"
            )


def _is_set(value: Value) -> bool:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return all(_is_set(each) for each in value.struct_value.fields.values())
    if kind == "list_value":
        return all(_is_set(each) for each in value.list_value.values)
    return kind is not None


def deeper(value: object, most: int) -> bool:
    """Return True if more than ``most`` objects and lists are nested."""
    if value is None or isinstance(value, str | int | float):
        return False
    if not isinstance(value, Mapping | Sequence):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    return most == 0 or any(deeper(each, most - 1) for each in inner)


def check_pair(request: GenerateRequest, mode: str) -> None:
    """Raise for a request that an engine of this ``disaggregation_mode`` cannot take.

    "prefill" and "decode" engines generate only as half of a pair, "null" engines never do. Raises FIELD_REQUIRED,
    FIELD_INVALID, UNSUPPORTED.
    """
    if mode == "null":
        if request.HasField("bootstrap_room"):
            raise Reason.UNSUPPORTED.error("this engine belongs to no pair", field="bootstrap_room")
        return
    if not request.HasField("bootstrap_room"):
        raise Reason.FIELD_REQUIRED.error(
            f"a {mode} engine generates only as part of a pair",
            field="bootstrap_room",
            next_step="Generate through the SDK or a gateway, which pick a pair.",
        )
    for name in ("bootstrap_host", "bootstrap_port", "model"):
        if not getattr(request, name):
            raise Reason.FIELD_REQUIRED.error("a request to a pair names it", field=name)
    if request.bootstrap_room > MOST_ROOM or request.bootstrap_port > 65535:
        raise Reason.FIELD_INVALID.error(
            f"bootstrap_room {request.bootstrap_room} or port {request.bootstrap_port} is out of range",
            field="bootstrap_room",
        )


def check_pair_version(request: GenerateRequest, sequence: int) -> None:
    """Raise STAGE_NOT_SERVING for half of a request to a pair if the stage is not at the version of the pair's pick.

    ``sequence``: sequence of the stage's version. The other half may be computed at the version of the pick.
    """
    pair_version = request.bootstrap_version_seq
    if request.HasField("bootstrap_version_seq") and pair_version != sequence:
        raise Reason.STAGE_NOT_SERVING.error(
            f"the pair was picked at version {pair_version}, this stage is at {sequence}", field="bootstrap_version_seq"
        )


def check_pair_adapter(request: GenerateRequest, digest: str) -> None:
    """Raise STAGE_NOT_SERVING if the digest of the request's adapter differs from the pair's adapter."""
    if request.HasField("bootstrap_version_seq") and request.bootstrap_adapter_digest != digest:
        raise Reason.STAGE_NOT_SERVING.error(
            f"adapter {request.adapter!r} of this stage is not the adapter of the picked pair",
            field="bootstrap_adapter_digest",
        )

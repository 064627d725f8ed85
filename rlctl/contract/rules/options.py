"""Rules for the options of an update, and for prompts with log probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlctl.contract.errors import Reason
from rlctl.contract.rules import fields
from rlctl.v1 import common_pb2, verbs_pb2

MAX_PROMPTS = 256


def check_options(options: verbs_pb2.UpdateOptions) -> None:
    if options.HasField("probe"):
        _probe(options.probe, "options.probe")
    if options.digest == verbs_pb2.DIGEST_FUNCTION_AS_VERIFIED:
        raise fields.invalid("as_verified is for CheckWeights only", "options.digest")
    if options.verify == common_pb2.VERIFICATION_LEVEL_DECODE:
        raise fields.invalid("decode is no level of the bytes; set decode_check", "options.verify")


def check_adapter_options(options: verbs_pb2.UpdateOptions) -> None:
    """Check the options of an adapter's update. Only the digest of the staged tensors verifies an adapter."""
    if options.HasField("probe"):
        raise Reason.FIELD_CONFLICT.error(
            "a probe is computed without adapters, so it does not verify the adapter",
            field="options.probe",
            next_step="Omit the probe: the digest of an adapter's tensors is verified.",
        )
    if options.decode_check:
        raise Reason.FIELD_CONFLICT.error(
            "the decode check runs without adapters, so it does not verify the adapter",
            field="options.decode_check",
            next_step="Omit decode_check: the digest of an adapter's tensors is verified.",
        )
    if options.verify in (common_pb2.VERIFICATION_LEVEL_PROBE, common_pb2.VERIFICATION_LEVEL_RECEIVED):
        raise Reason.FIELD_CONFLICT.error(
            "an adapter is verified by the digest of its staged tensors",
            field="options.verify",
            next_step="Omit verify, or set expected, replica or none.",
        )


def _probe(probe: verbs_pb2.Probe, field: str) -> None:
    if not 0 < probe.tolerance < math.inf:
        raise fields.invalid(f"{field}.tolerance is {probe.tolerance:g}; it must be above 0", f"{field}.tolerance")
    check_prompts(probe.prompts, f"{field}.prompts")
    for index, prompt in enumerate(probe.prompts):
        path = f"{field}.prompts[{index}]"
        if len(prompt.logprobs) != len(prompt.token_ids) - 1:
            raise Reason.LENGTH_MISMATCH.error(
                f"{path} has {len(prompt.token_ids)} tokens and {len(prompt.logprobs)} log probabilities; every token "
                "but the first has one",
                field=f"{path}.logprobs",
            )
        if not all(-math.inf < value <= 0 for value in prompt.logprobs):
            raise fields.invalid(f"{path}.logprobs holds one that is above 0 or not finite", f"{path}.logprobs")


def check_prompts(prompts: Sequence[verbs_pb2.ProbePrompt], field: str) -> None:
    fields.required(prompts, field)
    if len(prompts) > MAX_PROMPTS:
        raise fields.invalid(f"{field} holds {len(prompts)} prompts, at most {MAX_PROMPTS} are taken", field)
    for index, prompt in enumerate(prompts):
        if len(prompt.token_ids) < 2:
            raise fields.invalid(f"{field}[{index}] has fewer than two tokens", f"{field}[{index}].token_ids")

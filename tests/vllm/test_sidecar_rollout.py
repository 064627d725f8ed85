"""A rollout as slime writes it, plain HTTP: the same code at real SGLang and at real vLLM through the sidecar."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from server_stage import Driver
from sidecar_process import Served

from rlctl.demo.tiny import encode

pytestmark = [pytest.mark.timeout(500), pytest.mark.long]
PROMPTS = ["1+2=", "7+8=", "12+34=", "9"]


def post(url: str, body: dict[str, Any], headers: Mapping[str, str]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=120) as answer:
        data = answer.read()
    return json.loads(data) if data else None


def rollout(url: str, headers: Mapping[str, str], admin: Mapping[str, str]) -> list[dict[str, Any]]:
    """One round: every prompt's tokens, log probabilities and end; then everything is ended for the next round."""
    samples = []
    for prompt in PROMPTS:
        sampling = {
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 16,
            "stop": ["=="],
            "stop_token_ids": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        body = {"input_ids": encode(prompt), "sampling_params": sampling, "return_logprob": True}
        answer = post(f"{url}/generate", body, headers)
        meta = answer["meta_info"]
        samples.append(
            {
                "text": answer["text"],
                "tokens": [entry[1] for entry in meta["output_token_logprobs"]],
                "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
                "end": meta["finish_reason"],
                "prompt_tokens": meta["prompt_tokens"],
                "version": meta["weight_version"],
            }
        )
    post(f"{url}/abort_request", {"abort_all": True}, admin)
    return samples


def test_the_same_rollout_gives_the_same(launched: Served, sglang: Driver, tiny: tuple[Any, Path]) -> None:
    http = sglang.engine._server.http
    theirs = rollout(http.url, http._headers(admin=False), http._headers(admin=True))
    version = {sample["version"] for sample in theirs}.pop()
    launched.must("/update_weights_from_disk", {"model_path": str(tiny[1]), "weight_version": version})
    ours = rollout(launched.url, {}, {})
    for one, other in zip(ours, theirs, strict=True):
        assert one.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-3)
    assert ours == theirs

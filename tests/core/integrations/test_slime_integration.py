"""slime's names: where a model answers."""

from __future__ import annotations

from argparse import Namespace

import pytest

from rlctl.contract.errors import InvalidRequest, NotFound, Unavailable
from rlctl.integrations import slime
from rlctl.integrations.slime import get_model_url, set_model_routers

ARGS = Namespace(sglang_model_routers={"actor": ("10.0.0.1", 3000), "ref": ("fd00::1", 3001)})


def test_a_path_at_a_models_router() -> None:
    assert get_model_url(ARGS, "actor") == "http://10.0.0.1:3000/generate"
    assert get_model_url(ARGS, "actor", "v1/models") == "http://10.0.0.1:3000/v1/models"
    assert get_model_url(ARGS, "ref", "/v1/chat/completions") == "http://[fd00::1]:3001/v1/chat/completions"


def test_an_unknown_model_is_an_error_and_not_the_default_one() -> None:
    with pytest.raises(NotFound, match=r"no model 'reward' has a gateway; there are: actor, ref"):
        get_model_url(ARGS, "reward")
    with pytest.raises(NotFound, match="there are: none"):
        get_model_url(Namespace(sglang_model_routers={}), "actor")


def test_a_zero_is_an_argument_and_what_is_not_given_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime, "known_options", lambda *_: None)
    args = Namespace(
        sglang_random_seed=0, sglang_cpu_offload=0.0, sglang_dp_size=1, sglang_enable_x=True, sglang_disable_x=False,
        sglang_chat_template=None, sglang_quantization="", sglang_buckets=[],
    )  # fmt: skip
    said = ["--sglang-cpu-offload=0.0", "--sglang-dp-size=1", "--sglang-enable-x=true", "--sglang-random-seed=0"]
    assert list(slime._flags(args)) == said


def test_what_fills_the_routers_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    with pytest.raises(InvalidRequest, match="set_model_routers"):
        get_model_url(Namespace(), "actor")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(Unavailable, match="no fleet 'lab' is up"):
        set_model_routers(Namespace(), "lab")

"""The hooks around an update's tensors: each once, in order, whatever way the update goes."""

from __future__ import annotations

import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import WEIGHT_SELECTOR_ALL, WEIGHT_SELECTOR_DRAFT, WEIGHT_SELECTOR_TARGET
from rlctl.weights.shards.load_hooks import Load, LoadHooks, Loading, refuse_draft

LOAD = Load("update", full=True, selector=WEIGHT_SELECTOR_TARGET)


class Recording(LoadHooks):
    def __init__(self, fail: str = "") -> None:
        self.calls: list[str] = []
        self._fail = fail

    def _called(self, name: str, load: Load) -> None:
        assert load is LOAD
        self.calls.append(name)
        if name == self._fail:
            raise Reason.ENGINE_FAILED.error(f"cannot {name}")

    def prepare_load(self, load: Load) -> None:
        self._called("prepare", load)

    def finalize_load(self, load: Load) -> None:
        self._called("finalize", load)

    def abandon_load(self, load: Load) -> None:
        self._called("abandon", load)


@pytest.mark.parametrize(
    ("steps", "calls"),
    [
        (["prepare", "prepare", "finalise", "abandon"], ["prepare", "finalize"]),
        (["prepare", "abandon", "abandon", "finalise"], ["prepare", "abandon"]),
        (["finalise"], []),
        (["abandon"], []),
    ],
)
def test_each_hook_is_called_once(steps: list[str], calls: list[str]) -> None:
    hooks = Recording()
    loading = Loading(hooks, LOAD)
    for step in steps:
        getattr(loading, step)()
    assert hooks.calls == calls


def test_a_load_that_could_not_be_prepared_may_be_tried_again_and_is_not_abandoned() -> None:
    hooks = Recording(fail="prepare")
    loading = Loading(hooks, LOAD)
    for _ in range(2):
        with pytest.raises(RlctlError, match="cannot prepare"):
            loading.prepare()
    loading.abandon()
    assert hooks.calls == ["prepare", "prepare"]


def test_a_load_that_could_not_be_finalised_is_abandoned() -> None:
    hooks = Recording(fail="finalize")
    loading = Loading(hooks, LOAD)
    loading.prepare()
    with pytest.raises(RlctlError, match="cannot finalize"):
        loading.finalise()
    loading.abandon()
    assert hooks.calls == ["prepare", "finalize", "abandon"]


def test_only_the_draft_model_is_refused() -> None:
    for selector in (0, WEIGHT_SELECTOR_TARGET, WEIGHT_SELECTOR_ALL):
        refuse_draft(selector, "selector")
    with pytest.raises(RlctlError) as caught:
        refuse_draft(WEIGHT_SELECTOR_DRAFT, "options.selector")
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, "options.selector")

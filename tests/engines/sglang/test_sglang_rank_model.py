"""How the layout of one of SGLang's ranks is found and lost: over a toy module, without SGLang."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rlctl_servers.ranks.model import LoaderMap, MemoryMap
from rlctl_sglang.ranks.model import SGLangModel

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, WEIGHT_SELECTOR_DRAFT, WEIGHT_SELECTOR_TARGET
from rlctl.weights.shards.load_hooks import Load
from rlctl.weights.tensor.tensors import TensorMeta

REFERENCE = {
    name: TensorMeta(name, torch.float32, shape)
    for name, shape in (("q.weight", (6, 4)), ("k.weight", (2, 4)), ("norm.weight", (4,)))
}


class Fused(torch.nn.Module):
    """q and k in one parameter, and a value that is derived from the weights after a load."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.randn(8, 4))
        self.norm = torch.nn.Parameter(torch.randn(4))
        self.derived = self.norm.detach().sum()
        self.fails = 0
        self.forgets = ""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        places = {"q.weight": self.qk.data[:6], "k.weight": self.qk.data[6:], "norm.weight": self.norm.data}
        for name, tensor in tensors:
            self.fails -= 1
            if self.fails == 0:
                raise RuntimeError("the loader fails")
            if name != self.forgets:
                places[name].copy_(tensor)


class Updater:
    """SGLang's brackets of a load; ``packs``: parameters are elsewhere during a load."""

    def __init__(self, model: Fused) -> None:
        self.custom_weight_loaders = {"their.loader": None}
        self.model, self.packs, self.begun = model, False, 0

    def begin_weight_update(self) -> None:
        self.begun += 1
        if self.packs:
            self.model.qk.data = self.model.qk.data.clone()

    def end_weight_update(self, *, run_post_load: bool) -> None:
        assert run_post_load
        self.begun -= 1
        self.model.derived = self.model.norm.detach().sum()


class Manager:
    """SGLang's manager of updates, of one rank."""

    def __init__(self) -> None:
        self.module = Fused()
        self.updater = Updater(self.module)
        config = SimpleNamespace(quantization=None, hf_text_config=SimpleNamespace(tie_word_embeddings=False))
        runner = SimpleNamespace(
            model=self.module, weight_updater=self.updater, device="cpu", gpu_id=0, model_config=config
        )
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.offload_tags: set[str] = set()
        self._session: Any = None

    def _select_runners(self, selector: str = "all") -> list[tuple[str, Any]]:
        return [] if selector == "draft" else [("target", self.tp_worker.model_runner)]


@pytest.fixture(autouse=True)
def derived_error(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What SGLang imports there are, and what it says of derived copies (the last entry)."""
    errors: list[str] = []
    context, updater, parent = (ModuleType(name) for name in ("context", "updater", "parent"))
    context.get_parallel = lambda: SimpleNamespace(tp_rank=0, tp_size=1)  # type: ignore[attr-defined]
    context.get_model = lambda: SimpleNamespace(weight_cache_mode="off")  # type: ignore[attr-defined]
    updater._unsupported_derived_weight_cache_error = lambda _: errors[-1] if errors else None  # type: ignore[attr-defined]
    parent.weight_updater = updater  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.model_runner_components", parent)
    return errors


@pytest.fixture
def manager() -> Manager:
    return Manager()


@pytest.fixture
def model(manager: Manager) -> SGLangModel:
    return SGLangModel(manager)


def state(manager: Manager) -> list[torch.Tensor]:
    return [each.detach().clone() for each in (manager.module.qk, manager.module.norm, manager.module.derived)]


def refused(act: Callable[[], object]) -> RlctlError:
    with pytest.raises(RlctlError) as error:
        act()
    return error.value


def test_the_layout_is_found_and_the_weights_are_put_back(manager: Manager, model: SGLangModel) -> None:
    before = state(manager)
    model.learn(REFERENCE)
    assert model.learned(REFERENCE)
    assert all(map(torch.equal, state(manager), before)), "what is derived from the weights too"
    held = model.held(REFERENCE).shards
    assert torch.equal(held["k.weight"].local, manager.module.qk[6:])
    assert held["k.weight"].local.data_ptr() == manager.module.qk[6:].data_ptr()


def test_nothing_is_written_into_memory_before_its_digest_was_the_checkpoint_s(
    manager: Manager, model: SGLangModel
) -> None:
    assert isinstance(model.places(REFERENCE), LoaderMap)
    model.learn(REFERENCE)
    assert isinstance(model.places(REFERENCE), LoaderMap)
    model.confirm()
    places = model.places(REFERENCE)
    assert isinstance(places, MemoryMap)
    model.prepare_load(Load("u", full=True))
    places.place("k.weight", torch.full((2, 4), 7.0))
    model.finalize_load(Load("u", full=True))
    assert (manager.module.qk[6:] == 7).all()
    assert manager.updater.begun == 0


@pytest.mark.parametrize("fails", [1, 2, 7])
def test_a_loader_that_fails_leaves_the_weights_as_they_were(manager: Manager, model: SGLangModel, fails: int) -> None:
    before = state(manager)
    manager.module.fails = fails
    error = refused(lambda: model.learn(REFERENCE))
    assert error.reason is Reason.UNSUPPORTED
    assert "the loader fails" in error.message
    assert all(map(torch.equal, state(manager), before))
    assert manager.updater.begun == 0
    assert refused(lambda: model.held(REFERENCE)).reason is Reason.UNSUPPORTED


def test_parameters_that_move_at_a_load_are_not_written_directly(manager: Manager, model: SGLangModel) -> None:
    before = state(manager)
    manager.updater.packs = True
    assert refused(lambda: model.learn(REFERENCE)).reason is Reason.UNSUPPORTED
    assert all(map(torch.equal, state(manager), before))


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        ("session", Reason.ILLEGAL_STATE),
        ("released", Reason.MEMORY_RELEASED),
        ("derived", Reason.UNSUPPORTED),
        ("quantised", Reason.UNSUPPORTED),
    ],
)
def test_what_rules_a_search_out_is_refused_before_anything_is_loaded(
    manager: Manager, model: SGLangModel, derived_error: list[str], obstacle: str, reason: Reason
) -> None:
    match obstacle:
        case "session":
            manager._session = object()
        case "released":
            manager.offload_tags.add("weights")
        case "derived":
            derived_error.append("splits of weights stay")
        case "quantised":
            manager.tp_worker.model_runner.model_config.quantization = "fp8"
    manager.module.fails = 1  # the first tensor that were loaded would say so
    error = refused(lambda: model.learn(REFERENCE))
    assert (error.reason, error.outcome == OUTCOME_DIRTY) == (reason, False)
    assert manager.module.fails == 1
    assert manager.updater.begun == 0
    if obstacle != "quantised":
        assert refused(lambda: model.prepare_load(Load("u", full=True))).reason is reason
        assert manager.updater.begun == 0


def test_a_tensor_that_the_loaders_forget_is_no_part_of_a_rank(manager: Manager, model: SGLangModel) -> None:
    manager.module.forgets = "norm.weight"
    model.learn(REFERENCE)
    assert model.held(REFERENCE).shards["norm.weight"].local.numel() == 0


def test_parameters_of_another_form_are_left_to_the_loaders_and_searched_anew(
    manager: Manager, model: SGLangModel
) -> None:
    model.learn(REFERENCE)
    model.confirm()
    manager.module.qk.data = torch.randn(8, 5)[:, :4]
    assert isinstance(model.places(REFERENCE), LoaderMap)
    assert not model.learned(REFERENCE)
    assert not model.confirmed


def test_a_loader_of_the_user_s_is_one_that_sglang_was_started_with(model: SGLangModel) -> None:
    model.use_loader("their.loader")
    assert model._others()
    model.use_loader("")
    assert not model._others()
    assert refused(lambda: model.use_loader("os.system")).reason is Reason.UNSUPPORTED


def test_a_load_of_the_draft_model_does_not_begin_at_the_target(manager: Manager, model: SGLangModel) -> None:
    model.prepare_load(Load("u", full=True, selector=WEIGHT_SELECTOR_DRAFT))
    assert manager.updater.begun == 0


STAGED = Load("u", full=True, selector=WEIGHT_SELECTOR_TARGET)


def test_a_shadow_copy_goes_into_the_same_memory(manager: Manager, model: SGLangModel) -> None:
    model.learn(REFERENCE)
    model.confirm()
    address = manager.module.qk.data_ptr()
    copy = model.shadow(REFERENCE, STAGED)
    copy.allocate(lambda: None)
    copy.shards.place("k.weight", torch.full((2, 4), 7.0))
    assert not (manager.module.qk[6:] == 7).any()
    before = manager.module.qk[:6].clone()
    copy.swap(copy.targets())
    assert (manager.module.qk[6:] == 7).all()
    assert torch.equal(manager.module.qk[:6], before)
    assert manager.module.qk.data_ptr() == address


@pytest.mark.parametrize(
    ("obstacle", "cause"),
    [
        ("not confirmed", "did not have the digest"),
        ("not looked for", "not looked for"),
        ("quantised", "quantization fp8"),
        ("draft", "draft model"),
        ("other form", "another form|is now"),
    ],
)
def test_what_cannot_be_staged_is_refused_by_name(
    manager: Manager, model: SGLangModel, monkeypatch: pytest.MonkeyPatch, obstacle: str, cause: str
) -> None:
    runner = manager.tp_worker.model_runner
    if obstacle == "quantised":
        runner.model_config.quantization = "fp8"
        refused(lambda: model.learn(REFERENCE))
    elif obstacle != "not looked for":
        model.learn(REFERENCE)
    if obstacle not in ("not confirmed", "quantised", "not looked for"):
        model.confirm()
    if obstacle == "draft":
        draft = SimpleNamespace(model=torch.nn.Module(), weight_updater=manager.updater)
        monkeypatch.setattr(manager, "_select_runners", lambda _: [("target", runner), ("draft", draft)])
    if obstacle == "other form":
        manager.module.qk.data = torch.randn(8, 5)[:, :4]
    error = refused(lambda: model.shadow(REFERENCE, STAGED))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "apply")
    assert re.search(cause, error.message), error.message
    assert manager.updater.begun == 0

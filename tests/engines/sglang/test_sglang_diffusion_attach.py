"""SGLang-Diffusion's plug-in against a server that answers as its source says, and goes wrong as it is told to."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from google.protobuf.message import Message
from rlctl_servers.server import server as watching
from rlctl_sglang.diffusion import engine as diffusion
from rlctl_sglang.diffusion.engine import DiffusionEngine
from safetensors.torch import load_file, save_file

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.verbs import of_request
from rlctl.engine import Call, EngineConfig, EngineInfo
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as v
from rlctl.weights.tensor.digest import ModelDigest

MODULES = ("text_encoder", "transformer", "vae")
WEIGHTS = common.MEMORY_TAG_WEIGHTS


def save(place: Path, value: float) -> Path:
    """A checkpoint of which transformer and VAE hold a number."""
    for module in MODULES:
        (place / module).mkdir(parents=True)
        tensors = {"a.weight": torch.full((2, 3), value), "b": torch.full((4,), value)}
        if module == "text_encoder":
            tensors = {"e": torch.ones(5)}
        stem = "model" if module == "text_encoder" else "diffusion_pytorch_model"
        save_file(tensors, place / module / f"{stem}.safetensors")
        (place / module / "config.json").write_text(json.dumps({"_class_name": module, "layers": 1}))
    (place / "model_index.json").write_text(json.dumps({"_class_name": "Pipeline"}))
    return place


def stored(place: Path, module: str) -> dict[str, torch.Tensor]:
    (file,) = (place / module).glob("*.safetensors")
    return dict(load_file(file))


def digest_of(place: Path) -> str:
    digest = ModelDigest()
    for module in ("transformer", "vae"):
        for name, tensor in stored(place, module).items():
            digest.add(f"{module}.{name}", tensor)
    return digest.digest()


class Fake:
    """A server. What goes wrong at it is set from outside.

    Attributes:
        skips: modules that a load leaves as they are, with success.
        adds: modules that a load writes though it was not told to.
        refuses: what it answers a load with, and the modules that it has written by then.
        lacks: routes that its release does not have.
        gone: what its front says instead of what its scheduler would, with success.
        loading: until when it does not answer a load that it has carried out; ``loaded``: it has.
        calls: paths that it was posted to.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.held = {module: stored(checkpoint, module) for module in MODULES}
        self.held["text_encoder"] = {"renamed": torch.ones(5)}
        self.skips: set[str] = set()
        self.adds: set[str] = set()
        self.refuses: tuple[str, list[str]] | None = None
        self.gpus, self.role, self.architecture = 1, "monolithic", "FluxPipeline"
        self.busy = asyncio.Event()
        self.busy.set()
        self.asleep = False
        self.wakes = True
        self.ill = ""
        self.gone = ""
        self.lacks: set[str] = set()
        self.loading: asyncio.Event | None = None
        self.loaded = asyncio.Event()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def app(self) -> web.Application:
        app = web.Application()
        answers = {
            "/health": lambda: {"status": "ok"},
            "/model_info": lambda: {
                "model_path": str(self.checkpoint), "model_type": "diffusion", "architectures": [self.architecture],
            },
            "/models": lambda: {"model_path": str(self.checkpoint), "num_gpus": self.gpus},
            "/server_info": lambda: {"version": "0.5.23", "tp_size": 1},
        }  # fmt: skip

        async def get(request: web.Request) -> web.Response:
            if request.path == "/health" and self.ill:
                return web.json_response({"status": "unhealthy", "error": self.ill}, status=503)
            if request.path in self.lacks:
                return web.json_response({"detail": "Not Found"}, status=404)
            if request.path == "/openapi.json":
                routes = {*posts, *answers, "/stats"} - self.lacks
                return web.json_response({"paths": {route: {} for route in routes}})
            if request.path == "/stats":
                await self.busy.wait()
                role = {"role": self.role} if self.role else {}
                return web.json_response({"disagg": {"error": self.gone} if self.gone else role})
            return web.json_response(answers[request.path]())

        async def post(request: web.Request) -> web.Response:
            body = await request.json()
            if request.path in self.lacks:
                return web.json_response({"detail": "Not Found"}, status=404)
            self.calls.append((request.path, body))
            answer = posts[request.path](body)
            if self.loading is not None and request.path == "/update_weights_from_disk":
                self.loaded.set()
                await self.loading.wait()
            return web.json_response(answer, status=200 if answer.get("success", True) else 400)

        posts = {
            "/get_weights_checksum": lambda _: {module: self.sum(module) for module in self.held},
            "/update_weights_from_disk": self.load,
            "/update_weights_from_tensor_checker": self.compare,
            "/release_memory_occupation": lambda _: self.sleep(asleep=True),
            "/resume_memory_occupation": lambda _: self.sleep(asleep=False),
        }
        app.add_routes([web.get("/{path:.*}", get), web.post("/{path:.*}", post)])
        return app

    def sum(self, module: str) -> str:
        sha256 = hashlib.sha256()
        for name, tensor in sorted(self.held[module].items()):
            sha256.update(name.encode() + tensor.numpy().tobytes())
        return sha256.hexdigest()

    def load(self, body: dict[str, Any]) -> dict[str, Any]:
        message, names = self.refuses or ("Updated.", body["target_modules"])
        for module in {*names, *self.adds} - self.skips:
            self.held[module] = stored(Path(body["model_path"]), module)
        return {"success": self.refuses is None, "message": message}

    def compare(self, body: dict[str, Any]) -> dict[str, Any]:
        names = set(body["expected_named_tensors_sha256"])
        missing = names - self.held[body["target_module"]].keys()
        what = f"missing {len(missing)} tensor(s)" if missing else f"checksum mismatch for {len(names)} tensor(s)"
        return {"success": False, "message": f"Module update weight check failed: {what}: ..."}

    def sleep(self, *, asleep: bool) -> dict[str, Any]:
        if not self.wakes:
            return {"success": False, "sleeping": self.asleep, "message": "no room"}
        self.asleep = asleep
        return {"success": True, "sleeping": asleep, "message": ""}

    def posted(self, path: str) -> list[dict[str, Any]]:
        return [body for called, body in self.calls if called == path]


class Attached:
    """The plug-in before such a server."""

    def __init__(self, fake: Fake, url: str) -> None:
        self.fake = fake
        self.options = {"url": url}
        self.failed: asyncio.Queue[RlctlError] = asyncio.Queue()
        self.engine: DiffusionEngine | None = None

    async def start(self, **options: str) -> EngineInfo:
        config = EngineConfig(str(self.fake.checkpoint), options={**self.options, **options})
        self.engine = DiffusionEngine(config, self.failed.put_nowait)
        return await self.engine.start({})

    async def tell(self, request: Message, update_id: str = "", timeout_s: float = 30.0) -> Any:
        call = Call("c", asyncio.get_running_loop().time() + timeout_s, update_id)
        return await getattr(self.engine, of_request(request).method)(request, call)

    async def load(self, place: Path, *modules: str, **fields: Any) -> Any:
        kind = v.UPDATE_KIND_PARTIAL if modules else v.UPDATE_KIND_FULL
        await self.tell(v.PrepareUpdateRequest(kind=kind), "u")
        request = v.UpdateWeightsFromDiskRequest(model_path=str(place), target_modules=modules, **fields)
        return await self.tell(request, "u")

    async def refused(self, request: Message, update_id: str = "") -> RlctlError:
        with pytest.raises(RlctlError) as raised:
            await self.tell(request, update_id)
        return raised.value


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return save(tmp_path / "first", 1.0)


@pytest.fixture
def second(tmp_path: Path) -> Path:
    return save(tmp_path / "second", 2.0)


@pytest.fixture
async def attached(first: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Attached]:
    monkeypatch.setattr(watching, "LOOK_S", 0.05)
    monkeypatch.setattr(diffusion, "IDLE_S", 0.2)
    fake = Fake(first)
    runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    attached = Attached(fake, f"http://127.0.0.1:{runner.addresses[0][1]}")
    yield attached
    fake.busy.set()
    if attached.engine is not None:
        await attached.engine.stop()
    await runner.cleanup()


async def test_modules_that_are_as_their_files_are_can_be_updated(attached: Attached, second: Path) -> None:
    info = await attached.start()
    assert info.model_digest == digest_of(attached.fake.checkpoint)
    assert (info.fenced, list(info.capabilities.memory_tags)) == (False, [WEIGHTS])
    await attached.load(second)
    (sent,) = attached.fake.posted("/update_weights_from_disk")
    assert sent == {"model_path": str(second), "target_modules": ["transformer", "vae"], "flush_cache": True}
    await attached.tell(v.CommitUpdateRequest(), "u")
    report = await attached.tell(v.CheckWeightsRequest())
    assert report.model_digest == digest_of(second)
    info_ = await attached.tell(v.GetModelInfoRequest(reference=True))
    assert (info_.model_path, len(info_.reference)) == (str(second), 4)


async def test_a_load_that_leaves_a_module_as_it_is_has_failed_whatever_it_says(
    attached: Attached, second: Path
) -> None:
    await attached.start()
    attached.fake.skips = {"vae"}
    with pytest.raises(RlctlError) as raised:
        await attached.load(second)
    error = raised.value
    assert (error.reason, error.outcome) == (Reason.DIGEST_MISMATCH, common.OUTCOME_DIRTY)
    assert error.metadata["modules"] == "vae"
    assert (await attached.refused(v.CheckWeightsRequest())).reason is Reason.DIGEST_MISMATCH


async def test_a_load_that_changes_what_it_was_not_told_to_has_failed(attached: Attached, second: Path) -> None:
    await attached.start()
    attached.fake.adds = {"text_encoder"}
    with pytest.raises(RlctlError) as raised:
        await attached.load(second, "transformer")
    assert (raised.value.outcome, raised.value.metadata["modules"]) == (common.OUTCOME_DIRTY, "text_encoder")


@pytest.mark.parametrize("module", ["vae", "text_encoder"])
async def test_what_somebody_else_loaded_is_noticed_by_a_check(attached: Attached, second: Path, module: str) -> None:
    """In a module that is never loaded too: the server holds it, and makes pictures with it."""
    await attached.start()
    attached.fake.held[module] = stored(second, "vae")
    error = await attached.refused(v.CheckWeightsRequest())
    assert (error.reason, error.outcome) == (Reason.DIGEST_MISMATCH, common.OUTCOME_DIRTY)
    assert (error.metadata["modules"], bool(error.next_step)) == (module, True)


async def test_a_check_beside_a_load_sees_what_was_before_it_or_what_is_after_it(
    attached: Attached, second: Path
) -> None:
    await attached.start()
    attached.fake.loading = asyncio.Event()
    loading = asyncio.create_task(attached.load(second))
    await asyncio.wait_for(attached.fake.loaded.wait(), 10)
    checking = asyncio.create_task(attached.tell(v.CheckWeightsRequest()))
    await asyncio.sleep(0.2)
    attached.fake.loading.set()
    await loading
    assert (await checking).model_digest == digest_of(second)


@pytest.mark.parametrize(
    ("written", "outcome"), [([], common.OUTCOME_REJECTED), (["transformer"], common.OUTCOME_DIRTY)]
)
async def test_a_refusal_is_judged_by_what_is_held_afterwards(
    attached: Attached, second: Path, written: list[str], outcome: int
) -> None:
    await attached.start()
    attached.fake.refuses = "Failed to update module 'vae'. All modules rolled back to original weights.", written
    with pytest.raises(RlctlError) as raised:
        await attached.load(second)
    assert (raised.value.reason, raised.value.outcome) == (Reason.ENGINE_FAILED, outcome)


async def test_a_digest_that_is_not_the_expected_one_is_refused_before_anything_is_sent(
    attached: Attached, second: Path
) -> None:
    await attached.start()
    with pytest.raises(RlctlError) as raised:
        await attached.load(second, expected_digest="0" * 64)
    assert (raised.value.reason, raised.value.outcome) == (Reason.DIGEST_MISMATCH, common.OUTCOME_REJECTED)
    assert not attached.fake.posted("/update_weights_from_disk")


async def test_another_architecture_is_refused_before_anything_is_sent(attached: Attached, second: Path) -> None:
    await attached.start()
    (second / "vae" / "config.json").write_text(json.dumps({"_class_name": "vae", "layers": 2}))
    error = await attached.refused(v.InspectCheckpointRequest(model_path=str(second)))
    assert (error.reason, "layers is 2" in error.message) == (Reason.CHECKPOINT_MISMATCH, True)


async def test_files_that_are_written_anew_are_read_again(attached: Attached, second: Path) -> None:
    await attached.start()
    request = v.InspectCheckpointRequest(model_path=str(second))
    assert (await attached.tell(request)).model_digest == digest_of(second)
    changed = {name: tensor + 1 for name, tensor in stored(second, "vae").items()}
    save_file(changed, second / "vae" / "diffusion_pytorch_model.safetensors")
    assert (await attached.tell(request)).model_digest == digest_of(second)


async def test_a_full_update_that_leaves_modules_out_is_refused_at_the_commit(attached: Attached, second: Path) -> None:
    await attached.start()
    await attached.tell(v.PrepareUpdateRequest(kind=v.UPDATE_KIND_FULL), "u")
    request = v.UpdateWeightsFromDiskRequest(model_path=str(second), target_modules=["vae"])
    await attached.tell(request, "u")
    error = await attached.refused(v.CommitUpdateRequest(), "u")
    assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, common.OUTCOME_DIRTY)
    assert "transformer" in error.message


@pytest.mark.parametrize(
    "request_",
    [
        v.PrepareUpdateRequest(kind=v.UPDATE_KIND_DELTA),
        v.PrepareUpdateRequest(kind=v.UPDATE_KIND_ADAPTER),
        v.PrepareUpdateRequest(apply=v.APPLY_MODE_STAGED),
        v.PrepareUpdateRequest(selector=common.WEIGHT_SELECTOR_DRAFT),
        v.PauseGenerationRequest(mode=common.PAUSE_MODE_IN_PLACE),
        v.PauseGenerationRequest(),
        v.FlushCacheRequest(),
        v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS),
    ],
    ids=str,
)
async def test_what_it_cannot_do_is_refused(attached: Attached, request_: Message) -> None:
    await attached.start()
    attached.fake.calls.clear()
    update = "u" if isinstance(request_, v.PrepareUpdateRequest) else ""
    error = await attached.refused(request_, update)
    assert error.reason is Reason.UNSUPPORTED
    assert not attached.fake.calls


async def test_requests_are_told_where_to_go(attached: Attached) -> None:
    await attached.start()
    assert attached.engine is not None
    with pytest.raises(RlctlError) as raised:
        await anext(attached.engine.generate(rollout.GenerateRequest(text="a cat")))
    assert raised.value.reason is Reason.UNSUPPORTED
    with pytest.raises(RlctlError) as raised:
        await attached.engine.abort(rollout.AbortRequest(abort_all=True))
    assert raised.value.reason is Reason.UNSUPPORTED


async def test_while_it_works_an_update_is_refused_and_a_pause_waits(attached: Attached) -> None:
    await attached.start()
    attached.fake.busy.clear()
    assert (await attached.refused(v.PrepareUpdateRequest(), "u")).reason is Reason.ACTIVE_REQUESTS
    pausing = asyncio.create_task(attached.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT)))
    await asyncio.sleep(0.3)
    assert not pausing.done()
    attached.fake.busy.set()
    await pausing
    await attached.tell(v.PrepareUpdateRequest(), "u")


async def test_a_pause_ends_with_its_time(attached: Attached) -> None:
    await attached.start()
    attached.fake.busy.clear()
    with pytest.raises(RlctlError) as raised:
        async with asyncio.timeout(1.0):  # later the answer is UNKNOWN, whatever it is
            await attached.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_DRAIN), timeout_s=1.0)
    assert (raised.value.reason, raised.value.outcome) == (Reason.DEADLINE_EXCEEDED, common.OUTCOME_REJECTED)


async def test_a_front_that_answers_for_a_scheduler_that_did_not_confirms_nothing(attached: Attached) -> None:
    await attached.start()
    attached.fake.gone = "Scheduler worker exited; restart the server."
    for request in (v.PauseGenerationRequest(mode=common.PAUSE_MODE_DRAIN), v.PrepareUpdateRequest()):
        error = await attached.refused(request, "u")
        assert (error.reason, attached.fake.gone in error.message) == (Reason.ENGINE_FAILED, True)


async def test_memory_is_released_and_resumed_whole(attached: Attached) -> None:
    await attached.start()
    assert list((await attached.tell(v.ReleaseMemoryRequest())).released) == [WEIGHTS]
    assert attached.fake.asleep
    assert (await attached.refused(v.PrepareUpdateRequest(), "u")).reason is Reason.MEMORY_RELEASED
    other = v.ResumeMemoryRequest(tags=[common.MEMORY_TAG_KV_CACHE])
    assert (await attached.refused(other)).field == "tags[0]"
    assert not (await attached.tell(v.ResumeMemoryRequest())).released
    assert not attached.fake.asleep


async def test_what_became_of_memory_is_unknown_when_nothing_is_confirmed(attached: Attached) -> None:
    await attached.start()
    attached.fake.wakes = False
    error = await attached.refused(v.ReleaseMemoryRequest())
    assert (error.reason, error.outcome) == (Reason.ENGINE_FAILED, common.OUTCOME_UNKNOWN)


async def test_a_server_that_holds_something_else_is_not_attached_to_unless_it_may_be_brought_back(
    attached: Attached, second: Path
) -> None:
    attached.fake.held["vae"] = stored(second, "vae")
    with pytest.raises(RlctlError) as raised:
        await attached.start()
    assert (raised.value.reason, raised.value.field) == (Reason.CHECKPOINT_MISMATCH, "model_path")
    assert attached.engine is not None
    await attached.engine.stop()
    assert (await attached.start(reload="true")).model_digest == digest_of(attached.fake.checkpoint)
    (sent,) = attached.fake.posted("/update_weights_from_disk")
    assert sent["target_modules"] == ["vae"]


@pytest.mark.parametrize(
    ("name", "value"), [("gpus", 2), ("role", "encoder"), ("architecture", "Pi05Pipeline")], ids=str
)
async def test_servers_of_which_too_little_is_known_are_not_attached_to(
    attached: Attached, name: str, value: object
) -> None:
    setattr(attached.fake, name, value)
    with pytest.raises(RlctlError) as raised:
        await attached.start()
    assert (raised.value.reason, raised.value.field) == (Reason.UNSUPPORTED, "options.url")


async def test_a_server_of_another_checkpoint_is_not_attached_to(attached: Attached, second: Path) -> None:
    first, attached.fake.checkpoint = attached.fake.checkpoint, second
    engine = DiffusionEngine(EngineConfig(str(first), options=attached.options), pytest.fail)
    with pytest.raises(RlctlError) as raised:
        await engine.start({})
    await engine.stop()
    assert raised.value.reason is Reason.CHECKPOINT_MISMATCH


def test_it_is_not_launched_and_takes_no_settings_of_others(first: Path) -> None:
    with pytest.raises(RlctlError) as raised:
        DiffusionEngine(EngineConfig(str(first)), pytest.fail)
    assert (raised.value.reason, raised.value.field) == (Reason.FIELD_REQUIRED, "options.url")
    with pytest.raises(RlctlError) as raised:
        DiffusionEngine(EngineConfig(str(first), options={"tp_size": "2"}), pytest.fail)
    assert (raised.value.reason, raised.value.field) == (Reason.FIELD_INVALID, "options.tp_size")
    options = {"url": "http://127.0.0.1:1", "reload": "yes"}
    with pytest.raises(RlctlError) as raised:
        DiffusionEngine(EngineConfig(str(first), options=options), pytest.fail)
    assert (raised.value.reason, raised.value.field) == (Reason.FIELD_INVALID, "options.reload")


async def test_where_nothing_listens_the_option_is_blamed(first: Path) -> None:
    engine = DiffusionEngine(EngineConfig(str(first), options={"url": "http://127.0.0.1:1"}), pytest.fail)
    with pytest.raises(RlctlError) as raised:
        await engine.start({})
    await engine.stop()
    assert (raised.value.reason, raised.value.field) == (Reason.UNREACHABLE, "options.url")


async def test_a_front_without_its_server_is_not_taken_for_one(attached: Attached) -> None:
    await attached.start()
    attached.fake.ill = "Scheduler worker exited; restart the server."
    error = await asyncio.wait_for(attached.failed.get(), 30)
    assert (error.reason, attached.fake.ill in error.message) == (Reason.ENGINE_FAILED, True)
    assert (await attached.refused(v.CheckWeightsRequest())).reason is Reason.ENGINE_FAILED


@pytest.mark.parametrize(
    "route",
    ["/server_info", "/models", "/stats", "/get_weights_checksum", "/update_weights_from_tensor_checker"],
)
async def test_an_unknown_release_is_refused_by_name(attached: Attached, route: str) -> None:
    attached.fake.lacks = {route}
    with pytest.raises(RlctlError) as refused:
        await attached.start()
    assert refused.value.reason is Reason.UNSUPPORTED
    assert refused.value.field == "options.url"
    name = "SGLang-Diffusion" if route == "/server_info" else "SGLang-Diffusion 0.5.23"
    assert refused.value.message == f"{name} has no {route}"


async def test_a_release_that_reports_no_role_is_refused_by_name(attached: Attached) -> None:
    attached.fake.role = ""
    with pytest.raises(RlctlError) as refused:
        await attached.start()
    assert refused.value.reason is Reason.UNSUPPORTED
    assert refused.value.message == "SGLang-Diffusion 0.5.23 does not report disagg.role at /stats"

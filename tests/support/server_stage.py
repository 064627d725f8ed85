"""A real engine server under its plug-in, driven like a stage: admin verbs on one loop, requests on another."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from safetensors.torch import load_file, save_file

from rlctl.contract.errors import RlctlError
from rlctl.contract.verbs import of_request
from rlctl.demo import tiny as tiny_
from rlctl.engine import Call, Engine, EngineConfig, EngineInfo
from rlctl.runtime.event_loops import LoopThread
from rlctl.v1 import common_pb2, rollout_pb2
from rlctl.v1 import verbs_pb2 as v
from rlctl.weights.group.process_group import GroupStore, WeightGroup, join
from rlctl.weights.group.sender import send
from rlctl.weights.shared_memory.sender import SegmentSender, SentSegment
from rlctl.weights.tensor import buckets
from rlctl.weights.tensor.source import as_source

START_S = 240.0
VERB_S = 60.0
RESULT_S = 120.0
_ids = itertools.count(1)


class Driver:
    """An engine and its two loops."""

    def __init__(
        self, engine: type[Engine], model_path: Path, *, tp_size: int = 1, options: Mapping[str, str] | None = None
    ) -> None:
        self.admin, self.rollout = LoopThread("admin"), LoopThread("rollout")
        self.failures: list[RlctlError] = []
        config = EngineConfig(str(model_path), tp_size=tp_size, options=options or {})
        self.engine: Any = engine(config, self.failures.append)

    def start(self, starts: int = 1) -> EngineInfo:
        """``starts``: number of server starts until the engine is ready."""
        self.info = self.admin.submit(self.engine.start({})).result(START_S * starts)
        return self.info

    def stop(self) -> None:
        self.admin.submit(self.engine.stop()).result(VERB_S)
        self.rollout.stop()
        self.admin.stop()

    def submit(
        self, request: Message, *, update_id: str = "", timeout_s: float = VERB_S
    ) -> concurrent.futures.Future[Any]:
        async def run() -> Any:
            call = Call(f"c{next(_ids)}", asyncio.get_running_loop().time() + timeout_s, update_id)
            return await getattr(self.engine, of_request(request).method)(request, call)

        return self.admin.submit(run())

    def tell(self, request: Message, *, update_id: str = "", timeout_s: float = VERB_S) -> Any:
        """Run a verb."""
        return self.submit(request, update_id=update_id, timeout_s=timeout_s).result(timeout_s + 10)

    def begin(self, request: rollout_pb2.GenerateRequest) -> Generating:
        generating = Generating()
        generating.done = self.rollout.submit(generating.run(self.engine, request))
        return generating

    def generate(self, request: rollout_pb2.GenerateRequest) -> list[rollout_pb2.GenerateResponse]:
        """Return all messages of a request."""
        return self.begin(request).result()

    def abort(self, request: rollout_pb2.AbortRequest) -> rollout_pb2.AbortResponse:
        return self.rollout.submit(self.engine.abort(request)).result(VERB_S)

    def prepare(self, update_id: str, **fields: Any) -> None:
        """Pause, and open an update."""
        self.tell(v.PauseGenerationRequest(mode=common_pb2.PAUSE_MODE_RETRACT))
        self.tell(v.PrepareUpdateRequest(**fields), update_id=update_id)

    def commit(self, update_id: str, label: str, sequence: int) -> common_pb2.WeightVersion:
        version = common_pb2.WeightVersion(label=label, sequence=sequence)
        self.tell(v.CommitUpdateRequest(version=version), update_id=update_id)
        self.engine.set_version(version)
        return version

    def digest(self) -> str:
        """Return the model digest of the server's weights."""
        results = self.tell(v.CheckWeightsRequest())
        (digest,) = {result.check.model_digest for result in results}
        return str(digest)


class Generating:
    done: concurrent.futures.Future[None]

    def __init__(self) -> None:
        self.parts: list[rollout_pb2.GenerateResponse] = []
        self._started = concurrent.futures.Future[None]()

    async def run(self, engine: Engine, request: rollout_pb2.GenerateRequest) -> None:
        request.rid = request.rid or uuid.uuid4().hex
        async with contextlib.aclosing(engine.generate(request)) as parts:
            async for part in parts:
                self.parts.append(part)
                if not self._started.done():
                    self._started.set_result(None)

    def started(self) -> Generating:
        self._started.result(VERB_S)
        return self

    def result(self, timeout_s: float = RESULT_S) -> list[rollout_pb2.GenerateResponse]:
        self.done.result(timeout_s)
        return self.parts

    @property
    def tokens(self) -> list[int]:
        return [token for part in self.parts for sample in part.samples for token in sample.output_ids]


def prompt(ids: list[int], count: int, **fields: Any) -> rollout_pb2.GenerateRequest:
    """Return a greedy request for ``count`` tokens."""
    params = rollout_pb2.SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
    return rollout_pb2.GenerateRequest(
        input_ids=rollout_pb2.TokenIds(ids=ids), sampling_params=fields.pop("sampling_params", params), **fields
    )


class Segments:
    """A trainer on this host: writes a model into shared memory and lets the engine read it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._sender = SegmentSender(segment_bytes=200_000)

    def __enter__(self) -> Segments:
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.close()

    def written(self, model: Any, lease_s: float = VERB_S) -> Iterator[SentSegment]:
        """Yield filled segments; the caller must release each."""
        source = as_source(model)
        return self._sender.write(source, list(source.metas()), lease_s=lease_s)

    def send(self, model: Any, update_id: str, **fields: Any) -> v.WeightsReport:
        """Let the engine read the whole model."""
        report = v.WeightsReport()
        for sent in self.written(model):
            request = v.UpdateWeightsFromTensorRequest(segments=sent.messages, **fields)
            report = self._driver.tell(request, update_id=update_id)
            sent.release()
        return report


class Source:
    """A trainer's rank 0: forms a group with the engine and broadcasts a model."""

    def __init__(self, driver: Driver, name: str, timeout: Duration | None = None) -> None:
        """``timeout``: longest time of a collective."""
        self._driver = driver
        self._timeout = timeout
        self.name = name
        self.world_size = 1 + len(driver.info.layout.workers)

    def __enter__(self) -> Source:
        self._store = GroupStore("127.0.0.1")
        request = v.InitWeightsUpdateGroupRequest(
            master_address="127.0.0.1",
            master_port=self._store.port,
            world_size=self.world_size,
            rank_offset=1,
            group_name=self.name,
            backend="gloo",
            group_timeout=self._timeout,
        )
        joining = self._driver.submit(request)
        self.group: WeightGroup = join(
            self._store, name=self.name, rank=0, world_size=self.world_size, timeout_s=VERB_S
        )
        joining.result(VERB_S)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RlctlError):
            self._driver.tell(v.DestroyWeightsUpdateGroupRequest(group_name=self.name))
        self.group.close()
        self._store.close()

    def plan(self, model: Any, **sizes: int) -> list[buckets.Bucket]:
        return buckets.plan(as_source(model).metas(), **sizes)

    @property
    def port(self) -> int:
        """Return the TCP port of the store."""
        return self._store.port

    def packed(self, model: Any, plan: list[buckets.Bucket]) -> Iterator[torch.Tensor]:
        """Yield the bytes of each bucket."""
        tensors = dict(as_source(model).tensors())
        for bucket in plan:
            yield buckets.pack(bucket, tensors)

    def send(self, model: Any, plan: list[buckets.Bucket]) -> None:
        """Broadcast, bucket by bucket."""
        send(as_source(model), plan, self.group)

    def announce(self, plan: list[buckets.Bucket]) -> v.UpdateWeightsFromDistributedRequest:
        return v.UpdateWeightsFromDistributedRequest(group_name=self.name, buckets=[buckets.to_proto(b) for b in plan])


def broken_checkpoint(kind: str, tiny: tuple[Any, Path], place: Path) -> str:
    """Return a checkpoint with one defect."""
    directory = place / kind
    shutil.copytree(tiny[1], directory)
    config = json.loads((directory / "config.json").read_text())
    weights = directory / "model.safetensors"
    match kind:
        case "architecture":
            config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        case "heads":
            config |= {"num_attention_heads": 8, "head_dim": 16}
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "missing":
            weights.unlink()
        case "old index":
            _shard(_other(place), directory)
        case "shards without index":
            _shard(_other(place), directory).unlink()
        case "consolidated":
            shutil.copy(_other(place) / "model.safetensors", directory / "consolidated.safetensors")
        case "pattern":
            _other(place)
            directory = directory.rename(place / "[a-z]")
        case "smaller":
            model = tiny_.make(seed=1)
            del model.model.layers[1]
            model.config.num_hidden_layers = 1
            tiny_.save(model, directory)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def _other(place: Path) -> Path:
    """Return a checkpoint with different weights, matched by the pattern ``[a-z]``."""
    directory = place / "x"
    directory.mkdir()
    tiny_.save(tiny_.make(seed=2), directory)
    return directory


def _shard(checkpoint: Path, directory: Path) -> Path:
    """Write the tensors of a checkpoint as two files and an index; return the index."""
    tensors, weight_map = load_file(checkpoint / "model.safetensors"), {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number - 1 :: 2]}
        save_file(part, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


def refusal(driver: Driver, request: Any, **how: Any) -> RlctlError:
    """Return the refusal of a verb or a request."""
    act = driver.generate if isinstance(request, rollout_pb2.GenerateRequest) else driver.tell
    with pytest.raises(RlctlError) as refused:
        act(request, **how)
    return refused.value

"""A co-located trainer: sends a checkpoint's tensors in the way of slime, Miles or verl, and reports the results.

    python colocated_trainer.py CHECKPOINT OUTPUT TRAINER SEEDS ENGINE=RANKS [ENGINE=RANKS ...]

The script needs torch and safetensors, and nothing of rlctl. SGLang's own serialiser writes the payloads; without
SGLang, torch's ``ForkingPickler`` does the same for classes of the same names. Each update is one JSON line.
"""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import glob
import io
import json
import os
import sys
import types
import urllib.error
import urllib.request
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from safetensors.torch import load_file, save_file

NAMES = ["sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.weight_sync", "sglang.srt.weight_sync.tensor_bucket"]
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"

Bucket = dict[str, torch.Tensor]
Encode = Callable[[list[Any]], list[bytes]]

torch.multiprocessing.set_sharing_strategy("file_system")


def stand_in() -> None:
    """Make modules with the classes that payloads name."""
    for name in [*NAMES, "sglang.srt.model_executor", "sglang.srt.model_executor.model_runner_components", UPDATER]:
        sys.modules[name] = types.ModuleType(name)

    def dataclass(module: str, name: str, *fields: str) -> None:
        made = dataclasses.make_dataclass(name, fields)
        made.__module__ = module
        setattr(sys.modules[module], name, made)

    dataclass(NAMES[-1], "FlattenedTensorMetadata", "name", "shape", "dtype", "start_idx", "end_idx", "numel")
    dataclass(UPDATER, "LocalSerializedTensor", "values")


if os.environ.get("STAND_IN"):
    stand_in()

    def serialize(value: Any) -> bytes:
        """Serialise like SGLang's ``MultiprocessingSerializer``."""
        stream = io.BytesIO()
        ForkingPickler(stream).dump(value)
        return stream.getvalue()

    def flattened(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return a bucket like SGLang's ``FlattenedTensorBucket``."""
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

        entries, start = [], 0
        for name, tensor in tensors.items():
            end = start + tensor.nbytes
            entries.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, tensor.nbytes))
            start = end
        parts = [tensor.flatten().view(torch.uint8) for tensor in tensors.values()]
        return {"flattened_tensor": torch.cat(parts), "metadata": entries}

else:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    serialize = MultiprocessingSerializer.serialize

    def flattened(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return a bucket in the form of slime and Miles."""
        bucket = FlattenedTensorBucket(named_tensors=list(tensors.items()))
        return {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}


def post(url: str, body: Any = None) -> dict[str, Any]:
    """Return the answer; an error status ends the trainer."""
    method = "POST" if body is not None else "GET"
    headers = {"Content-Type": "application/json"}
    data = json.dumps(body).encode() if body is not None else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=60) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url}: {error.code} {error.read().decode()}") from None
    return json.loads(text) if text.startswith("{") else {}


class Engines:
    """The engines, called concurrently, each at its own address."""

    def __init__(self, places: dict[str, int]) -> None:
        self.places = places
        self._threads = concurrent.futures.ThreadPoolExecutor(len(places))

    def every(self, path: str, body: Any = None) -> None:
        """Send the same request to every engine."""
        list(self._threads.map(lambda url: post(url + path, body), self.places))

    def write(self, bucket: Bucket, make: Callable[[Bucket], Any], encode: Encode, **fields: Any) -> None:
        """Write a bucket. Each rank of each engine gets its own storages, kept until all engines have answered."""
        made = {url: [make(bucket) for _ in range(ranks)] for url, ranks in self.places.items()}
        bodies = {
            url: {
                "serialized_named_tensors": [base64.b64encode(data).decode() for data in encode(values)],
                "flush_cache": False,
                **fields,
            }
            for url, values in made.items()
        }
        list(self._threads.map(lambda url: post(f"{url}/update_weights_from_tensor", bodies[url]), bodies))


def own(bucket: Bucket) -> Bucket:
    """Return tensors in separate storages."""
    return {name: tensor.clone() for name, tensor in bucket.items()}


def one_each(values: list[Any]) -> list[bytes]:
    """Return a payload for each rank."""
    return [serialize(value) for value in values]


def all_in_each(values: list[Bucket]) -> list[bytes]:
    """Encode like SGLang's ``update_weights``, called by verl: every payload has every rank's handles."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor

    pairs = [(name, LocalSerializedTensor([serialize(value[name]) for value in values])) for name in values[0]]
    return [serialize(pairs) for _ in values]


def buckets(tensors: Bucket, count: int = 3) -> list[Bucket]:
    """Split the tensors into ``count`` parts."""
    items = list(tensors.items())
    return [dict(items[start::count]) for start in range(count)]


def update(trainer: str, engines: Engines, tensors: Bucket, version: str) -> None:
    """Run an update in the order of the trainer's own code."""
    if trainer == "verl":  # verl/workers/rollout/sglang_rollout: the engine sleeps while the trainer trains
        engines.every("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
        engines.every("/resume_memory_occupation", {"tags": ["weights"]})
        for bucket in buckets(tensors):
            engines.write(bucket, own, all_in_each, load_format=None)
        engines.every("/flush_cache")
        engines.every("/resume_memory_occupation", {"tags": ["kv_cache"]})
        return
    engines.every("/pause_generation", {} if trainer == "slime" else {"mode": "retract"})
    engines.every("/flush_cache")
    selector = {"selector": "all"} if trainer == "miles" else {}
    if trainer == "miles":
        engines.every("/begin_weight_update", selector)
    for bucket in buckets(tensors):
        engines.write(bucket, flattened, one_each, load_format="flattened_bucket", weight_version=version, **selector)
    if trainer == "miles":
        engines.every("/end_weight_update", {})
    engines.every("/continue_generation", {})


def main(checkpoint: str, output: str, trainer: str, seeds: str, *places: str) -> None:
    """Send the checkpoint's tensors, changed by each seed; write them to ``output`` as SEED.safetensors."""
    engines = Engines({url: int(ranks) for url, _, ranks in (place.rpartition("=") for place in places)})
    tensors = load_file(f"{checkpoint}/model.safetensors")
    for seed in seeds.split(","):
        generator = torch.Generator().manual_seed(int(seed))
        changed = {
            name: tensor + (torch.randn(tensor.shape, generator=generator) * 0.05).to(tensor.dtype)
            for name, tensor in tensors.items()
        }
        save_file(changed, f"{output}/{seed}.safetensors")
        update(trainer, engines, changed, seed)
        left = glob.glob(f"/dev/shm/torch_{os.getpid()}_*")
        sys.stdout.write(json.dumps({"seed": seed, "left": left}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

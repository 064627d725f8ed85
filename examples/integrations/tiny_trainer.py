"""What the integrations share: a tiny trainer over gloo, which is rank 0 of a group that the engines' ranks join.

The group is made with torch alone, as SGLang's ``init_custom_process_group`` makes its members' (a TCP store, prefixed
by the group's name; https://github.com/sgl-project/sglang, ``srt/utils/common.py``), so nothing of rlctl's sends.
"""

from __future__ import annotations

import argparse
import datetime
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.distributed import distributed_c10d as c10d
from transformers import AutoModelForCausalLM

import rlctl

T = TypeVar("T")

TIMEOUT_S = 120.0
BUCKET_BYTES = 64 << 10


class HTTPError(Exception):
    """An answer that is not 2xx; the upstream trainers raise for them."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status


def request(
    method: str, url: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
) -> Any:
    """One request; the answer's JSON, or its text. Raises HTTPError."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise HTTPError(error.code, error.read().decode()) from None
    try:
        return json.loads(text)
    except ValueError:
        return text


class Engines:
    """Every engine at its own address, called at the same time, as Ray actors would."""

    def __init__(self, urls: Sequence[str], ranks: Sequence[int]) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self.ranks = list(ranks)
        self._threads = ThreadPoolExecutor(len(self.urls))

    @property
    def world_size(self) -> int:
        """The trainer and every rank of every engine."""
        return 1 + sum(self.ranks)

    def start(self, call: Callable[[int, str], T]) -> Callable[[], list[T]]:
        """Call all; what is returned waits for their answers."""
        running = [self._threads.submit(call, index, url) for index, url in enumerate(self.urls)]
        return lambda: [each.result() for each in running]

    def post(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The same to all."""
        return self.start(lambda _, url: request("POST", url + path, body))()

    def flush_until_done(self) -> None:
        """Poll /flush_cache as slime does: 200 is done, anything else is tried again after a second."""

        def flush(_: int, url: str) -> None:
            for _attempt in range(60):
                try:
                    request("GET", f"{url}/flush_cache")
                    return
                except HTTPError:
                    time.sleep(1)
            raise TimeoutError("the cache was not flushed")

        self.start(flush)()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def join_as_source(name: str, port: int, world_size: int) -> Any:
    """The group of rank 0, which listens at the port; returns when all have come."""
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    store = torch.distributed.TCPStore(
        "127.0.0.1", port, world_size, is_master=True, timeout=timeout, wait_for_workers=False
    )
    prefixed = torch.distributed.PrefixStore(name, store)
    made = c10d._new_process_group_helper(world_size, 0, [], "gloo", prefixed, group_name=name, timeout=timeout)
    group = made[0]
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def form_group(engines: Engines, name: str) -> Any:
    """The trainer's and the engines' group: every engine is told where its ranks begin. Raises HTTPError, OSError."""
    port = free_port()
    offsets = [1 + sum(engines.ranks[:index]) for index in range(len(engines.ranks))]
    joining = engines.start(
        lambda index, url: request(
            "POST",
            f"{url}/init_weights_update_group",
            {
                "master_address": "127.0.0.1",
                "master_port": port,
                "rank_offset": offsets[index],
                "world_size": engines.world_size,
                "group_name": name,
                "backend": "gloo",
            },
        )
    )
    came: Future[Any] = Future()

    def come() -> None:
        try:
            came.set_result(join_as_source(name, port, engines.world_size))
        except (RuntimeError, ValueError, OSError) as error:
            came.set_exception(error)

    # Engines that refuse say so at once, and are not waited for.
    threading.Thread(target=come, daemon=True).start()
    joining()
    return came.result()


def broadcast(group: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Send tensors, one after the other, from rank 0."""
    for work in [torch.distributed.broadcast(tensor, 0, group=group, async_op=True) for tensor in tensors]:
        work.wait()


def buckets(model: Any) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The model's tensors under their checkpoint names, packed until a bucket is full."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, parameter in model.named_parameters():
        bucket.append((name, parameter.data.contiguous()))
        size += parameter.nbytes
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def described(bucket: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """A bucket's names, dtypes and shapes, as the engines are told."""
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).replace("torch.", "") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


def run(update: Callable[[Engines, Any, Any, int], None], group_name: str) -> None:
    """Train for some steps, update after each, and compare every engine's weights with the trainer's."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--engine", action="append", required=True, metavar="URL=RANKS", help="address, and ranks there"
    )
    parser.add_argument("--model", required=True, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    named = [engine.rpartition("=") for engine in arguments.engine]
    if not all(url and ranks.isdigit() for url, _, ranks in named):
        parser.error("--engine is an engine's address and how many ranks it has: URL=RANKS")
    engines = Engines([url for url, _, _ in named], [int(ranks) for _, _, ranks in named])
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    try:
        group = form_group(engines, group_name)
    except (HTTPError, OSError) as error:
        raise SystemExit(f"the engines do not join: {error}") from None
    for step in range(1, arguments.steps + 1):
        tokens = torch.randint(model.config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        update(engines, group, model, step)
        held = {
            digest
            for answer in engines.post("/weights_checker", {"action": "checksum"})
            for digest in answer["model_digest"].values()
        }
        if held != {rlctl.model_digest(model)}:
            raise SystemExit(f"step {step}: the engines hold {held}, not {rlctl.model_digest(model)}")
        versions = {
            answer["weight_version"] for answer in engines.start(lambda _, url: request("GET", f"{url}/model_info"))()
        }
        print(json.dumps({"step": step, "weight_version": sorted(versions), "model_digest": held.pop()}), flush=True)
    engines.post("/destroy_weights_update_group", {"group_name": group_name})

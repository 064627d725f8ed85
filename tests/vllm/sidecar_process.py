"""The sidecar, asked as its clients ask it."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from rlctl_vllm.sidecar.server import SidecarConfig, SidecarServer

from rlctl.runtime.event_loops import LoopThread

GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


class Served:
    """A sidecar on a loop of its own."""

    def __init__(self, config: SidecarConfig) -> None:
        self.loop = LoopThread("sidecar")

        async def make() -> SidecarServer:
            return SidecarServer(config)

        self.server = self.loop.call(make())
        self.loop.submit(self.server.start()).result(300)
        self.url = self.server.url

    def stop(self) -> None:
        self.loop.submit(self.server.stop()).result(60)
        self.loop.stop()

    def call(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, _parsed(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _parsed(error.read())

    def must(self, path: str, body: Any = None) -> Any:
        status, answer = self.call(path, body)
        assert status == 200, answer
        return answer

    def refusal(self, path: str, body: Any, status: int = 400) -> Any:
        told, answer = self.call(path, body)
        assert told == status, answer
        return answer["error"]

    def generate(self, ids: list[int], *, new_tokens: int = 8, **fields: Any) -> Any:
        sampling = {**GREEDY, "max_new_tokens": new_tokens, **fields.pop("sampling", {})}
        return self.must("/generate", {"input_ids": ids, "sampling_params": sampling, **fields})

    def events(self, body: dict[str, Any]) -> list[Any]:
        request = urllib.request.Request(self.url + "/generate", json.dumps({**body, "stream": True}).encode())
        with urllib.request.urlopen(request, timeout=120) as answer:
            lines = [line[5:].strip() for line in answer if line.startswith(b"data:")]
        assert lines[-1] == b"[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def until(self, done: Callable[[], bool]) -> None:
        wait = threading.Event()
        for _ in range(600):
            if done():
                return
            wait.wait(0.05)
        raise AssertionError("it did not come about")

    def load(self) -> int:
        (load,) = self.must("/v1/loads?include=core")["loads"]
        return int(load["num_total_reqs"])


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()

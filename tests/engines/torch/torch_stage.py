"""A stage in small: rank 0 of an engine in this process, its followers in others, verbs delivered, ordered, collected.

It plays the part of the stage server's relay. One follower process holds the ranks of several engines, so that
starting it is paid for once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import itertools
import multiprocessing
import os
import queue
import threading
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from google.protobuf.message import Message
from rlctl_torch import TorchEngine

from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.contract.verbs import VERBS, of_request
from rlctl.engine import Call, EngineConfig, EngineInfo
from rlctl.v1 import common_pb2, rollout_pb2, verbs_pb2

TIMEOUT_S = 30.0
PRELOAD = ["rlctl_torch", "transformers.models.llama.modeling_llama"]

_numbers = itertools.count()


async def until(condition: Callable[[], object]) -> None:
    """Return once the condition holds. For what the engine thread does between two steps and tells nobody."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def _receiving(engine: TorchEngine) -> None:
    await until(lambda: any(group.under_way for group in engine._rank.receiver._groups))


class Follower:
    """A process that holds the second ranks of any number of engines."""

    def __init__(self) -> None:
        # Forked from a process that has imported everything, and has no threads: started in no time.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._numbers = itertools.count()
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}
        self._accepted: dict[int, concurrent.futures.Future[None]] = {}
        self.failures: queue.Queue[tuple[int, RlctlError]] = queue.Queue()
        """Engines that have failed in this process, by number."""
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, what: str, *args: Any) -> tuple[concurrent.futures.Future[None], concurrent.futures.Future[Any]]:
        """Send a request; returns (accepted, answer)."""
        number = next(self._numbers)
        accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._accepted[number], self._waiting[number] = accepted, answer
        self._pipe.send((number, what, args))
        return accepted, answer

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()

    def _read(self) -> None:
        while True:
            try:
                number, kind, value = self._pipe.recv()
            except (EOFError, OSError):
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(ConnectionError("the follower process is gone"))
                return
            if kind == "failed":
                self.failures.put((number, _error(value)))
            elif kind == "accepted":
                if not self._accepted[number].done():
                    self._accepted[number].set_result(None)
            elif kind == "error":
                self._waiting.pop(number).set_exception(_error(value))
            elif kind == "crash":
                self._waiting.pop(number).set_exception(AssertionError(value))
            else:
                self._waiting.pop(number).set_result(value)


def _error(value: tuple[bytes, int]) -> RlctlError:
    error = from_detail(common_pb2.ErrorDetail.FromString(value[0]))
    error.outcome = value[1]
    return error


def _pack(error: RlctlError) -> tuple[bytes, int]:
    return error.detail().SerializeToString(), error.outcome


def _serve(pipe: Connection) -> None:
    asyncio.run(_Server(pipe).run())


class _Server:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._send_lock = threading.Lock()
        self._engines: dict[int, TorchEngine] = {}
        self._leaving = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        await self._leaving.wait()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                number, what, args = self._pipe.recv()
            except EOFError:
                loop.call_soon_threadsafe(self._leaving.set)
                return
            loop.call_soon_threadsafe(self._begin, number, what, args)

    def _begin(self, number: int, what: str, args: tuple[Any, ...]) -> None:
        task = asyncio.ensure_future(self._handle(number, what, args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, number: int, kind: str, value: Any = None) -> None:
        with self._send_lock:
            self._pipe.send((number, kind, value))

    async def _handle(self, number: int, what: str, args: tuple[Any, ...]) -> None:
        try:
            self._send(number, "result", await getattr(self, what)(number, *args))
        except RlctlError as error:
            self._send(number, "error", _pack(error))
        except Exception:  # noqa: BLE001 (the test that asked is told)
            self._send(number, "crash", traceback.format_exc())

    async def start(self, _: int, engine: int, config: EngineConfig, setup: dict[str, str]) -> str:
        self._engines[engine] = TorchEngine(config, lambda error: self._send(engine, "failed", _pack(error)))
        return (await self._engines[engine].start(setup)).model_digest

    async def stop(self, _: int, engine: int) -> None:
        await self._engines.pop(engine).stop()

    async def verb(
        self, number: int, engine: int, name: str, body: bytes, command_id: str, remaining: float, update_id: str
    ) -> tuple[int, bytes | None]:
        verb = VERBS[name]
        deadline = asyncio.get_running_loop().time() + remaining
        call = Call(command_id, deadline, update_id, accept=lambda: self._send(number, "accepted"))
        answer = await getattr(self._engines[engine], verb.method)(verb.request.FromString(body), call)
        return call.step, None if answer is None else answer.SerializeToString()

    async def withdraw(self, _: int, engine: int, command_id: str) -> None:
        await self._engines[engine].withdraw(command_id)

    async def interrupt(self, _: int, engine: int, update_id: str) -> None:
        await self._engines[engine].interrupt(update_id)

    async def receiving(self, _: int, engine: int) -> None:
        await _receiving(self._engines[engine])

    async def set_attribute(self, _: int, module: str, name: str, value: Any) -> None:
        setattr(importlib.import_module(module), name, value)

    async def leave(self, _: int) -> None:
        self._leaving.set()

    async def set_environment(self, _: int, name: str, value: str | None) -> None:
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


class Stage:
    """An engine of one or two ranks."""

    def __init__(self, path: str, follower: Follower | None = None, *, dtype: str = "auto", **options: object) -> None:
        size = 1 if follower is None else 2
        self.config = EngineConfig(
            path, 0, size, dtype=dtype, options={name: str(value) for name, value in options.items()}
        )
        self.info: EngineInfo
        self.failures: list[RlctlError] = []
        self.failed = threading.Event()
        self.follower = follower
        self.engine = TorchEngine(self.config, self._failed)
        self.number = next(_numbers)
        self._ids = (f"command-{n}" for n in itertools.count())

    def _failed(self, error: RlctlError) -> None:
        self.failures.append(error)
        self.failed.set()

    async def start(self, **theirs: Any) -> EngineInfo:
        """Start every rank; ``theirs`` are settings of the follower that differ."""
        setup = self.engine.setup()
        starting: list[Any] = [asyncio.ensure_future(self.engine.start(setup))]
        if self.follower is not None:
            config = replace(self.config, rank=1, **theirs)
            starting.append(asyncio.wrap_future(self.follower.ask("start", self.number, config, setup)[1]))
        # All ranks fail together; rank 0's error is the one that the stage tells.
        for ended in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended
        self.info, *digests = await asyncio.gather(*starting)
        assert digests in ([], [self.info.model_digest])
        return self.info

    async def stop(self) -> None:
        """Stop every rank."""
        stopped = [self.follower.ask("stop", self.number)[1]] if self.follower is not None else []
        await self.engine.stop()
        for future in stopped:
            await asyncio.wrap_future(future)

    async def ranks(
        self, request: Message, *, update: str = "", within: float = TIMEOUT_S
    ) -> list[tuple[int, Message | None] | RlctlError]:
        """Carry a verb out; (step, answer) or the error of each rank."""
        verb = of_request(request)
        command_id = next(self._ids)
        loop = asyncio.get_running_loop()
        accepted = [loop.create_future()]
        call = Call(
            command_id,
            loop.time() + within,
            update,
            accept=lambda: None if accepted[0].done() else accepted[0].set_result(None),
        )
        local = asyncio.ensure_future(getattr(self.engine, verb.method)(request, call))
        results: list[asyncio.Future[Any]] = [local]
        if self.follower is not None:
            body = request.SerializeToString()
            theirs = self.follower.ask("verb", self.number, verb.name, body, command_id, within, update)
            accepted.append(asyncio.wrap_future(theirs[0]))
            results.append(asyncio.wrap_future(theirs[1]))
        if verb.ordered:
            everywhere = asyncio.ensure_future(asyncio.wait(accepted))
            await asyncio.wait([everywhere, *results], return_when=asyncio.FIRST_COMPLETED)
            if everywhere.done():
                await asyncio.gather(self.engine.order(command_id), return_exceptions=True)
            else:
                everywhere.cancel()
                await self.withdraw(command_id)
        done = await asyncio.gather(*results, return_exceptions=True)
        answers: list[tuple[int, Message | None] | RlctlError] = []
        for rank, value in enumerate(done):
            if isinstance(value, RlctlError):
                answers.append(value)
            elif isinstance(value, BaseException):
                raise value
            elif rank == 0:
                answers.append((call.step, value))
            else:
                step, body = value
                answers.append((step, None if body is None else _data(verb.name).FromString(body)))
        return answers

    async def __call__(self, request: Message, *, update: str = "", within: float = TIMEOUT_S) -> list[Any]:
        """Carry a verb out; every rank's answer. Raises the first error, of ranks that merely followed suit last."""
        answers = await self.ranks(request, update=update, within=within)
        errors = [answer for answer in answers if isinstance(answer, RlctlError)]
        if errors:
            raise min(errors, key=lambda error: error.reason is Reason.CANCELLED)
        if of_request(request).ordered:
            steps = {answer[0] for answer in answers}  # type: ignore[index]
            assert len(steps) == 1, f"the ranks carried it out at different steps: {steps}"
        return [answer[1] for answer in answers]  # type: ignore[index]

    async def withdraw(self, command_id: str) -> None:
        """Withdraw a command at every rank."""
        await self.engine.withdraw(command_id)
        if self.follower is not None:
            await asyncio.wrap_future(self.follower.ask("withdraw", self.number, command_id)[1])

    async def receiving(self) -> None:
        """Return once every rank waits for a broadcast: what happens next happens to all of them alike."""
        await _receiving(self.engine)
        if self.follower is not None:
            await asyncio.wrap_future(self.follower.ask("receiving", self.number)[1])

    async def interrupt(self, update: str) -> None:
        """Interrupt an update at every rank."""
        await self.engine.interrupt(update)
        if self.follower is not None:
            await asyncio.wrap_future(self.follower.ask("interrupt", self.number, update)[1])

    # Generation.

    async def generate(self, prompt: Sequence[int] | str, **fields: Any) -> rollout_pb2.GenerateResponse:
        """Generate to the end and put the messages together."""
        return merge([message async for message in self.stream(prompt, **fields)])

    async def stream(self, prompt: Sequence[int] | str, **fields: Any) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """Generate, message by message. Sampling parameters and request fields alike are keyword arguments."""
        async with aclosing(self.engine.generate(generate_request(prompt, **fields))) as messages:
            async for message in messages:
                yield message

    async def tokens(self, prompt: Sequence[int], count: int, **fields: Any) -> list[int]:
        """The output tokens of one greedy sample."""
        response = await self.generate(
            prompt, **{"temperature": 0, "ignore_eos": True, "max_new_tokens": count, **fields}
        )
        return list(response.samples[0].output_ids)


def generate_request(prompt: Sequence[int] | str, **fields: Any) -> rollout_pb2.GenerateRequest:
    """A request; what SamplingParams has goes there."""
    fields.setdefault("rid", uuid.uuid4().hex)
    known = rollout_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    params = rollout_pb2.SamplingParams(**{name: fields.pop(name) for name in list(fields) if name in known})
    if isinstance(prompt, str):
        return rollout_pb2.GenerateRequest(text=prompt, sampling_params=params, **fields)
    ids = rollout_pb2.TokenIds(ids=prompt)
    return rollout_pb2.GenerateRequest(input_ids=ids, sampling_params=params, **fields)


def merge(messages: Sequence[rollout_pb2.GenerateResponse]) -> rollout_pb2.GenerateResponse:
    """What a unary call would have answered."""
    whole = rollout_pb2.GenerateResponse(rid=messages[0].rid, prompt_tokens=messages[0].prompt_tokens)
    samples: dict[int, rollout_pb2.Sample] = {}
    for message in messages:
        whole.input_logprobs.extend(message.input_logprobs)
        whole.prompt_ids.extend(message.prompt_ids)
        for delta in message.samples:
            sample = samples.setdefault(delta.index, rollout_pb2.Sample(index=delta.index))
            assert not sample.HasField("finish_reason"), "something came after the finish reason"
            sample.text += delta.text
            sample.output_ids.extend(delta.output_ids)
            sample.output_logprobs.extend(delta.output_logprobs)
            sample.completion_tokens, sample.retractions = delta.completion_tokens, delta.retractions
            for span in delta.versions:
                last = sample.versions[-1] if sample.versions else None
                parts = [(s.version, s.kv_version, s.adapter_version) for s in (last, span) if s is not None]
                if len(parts) == 2 and parts[0] == parts[1]:
                    assert span.start == last.end
                    last.end = span.end
                else:
                    sample.versions.append(span)
            if delta.HasField("finish_reason"):
                sample.finish_reason.CopyFrom(delta.finish_reason)
    whole.samples.extend(samples[index] for index in sorted(samples))
    return whole


def _data(name: str) -> type[Message]:
    return {
        "GetModelInfo": verbs_pb2.ModelInfo,
        "GetServerInfo": verbs_pb2.ServerInfo,
        "GetLoads": verbs_pb2.Loads,
        "AbortRequests": verbs_pb2.AbortReport,
        "FlushCache": verbs_pb2.FlushReport,
        "ReleaseMemory": verbs_pb2.MemoryReport,
        "ResumeMemory": verbs_pb2.MemoryReport,
        "InitWeightsUpdateGroup": verbs_pb2.GroupReport,
        "CheckWeights": verbs_pb2.CheckReport,
        "PullWeights": verbs_pb2.PullReport,
        "InspectCheckpoint": verbs_pb2.CheckpointReport,
        "LoadAdapter": verbs_pb2.AdapterList,
        "UnloadAdapter": verbs_pb2.AdapterList,
        "ListAdapters": verbs_pb2.AdapterList,
    }.get(name, verbs_pb2.WeightsReport)

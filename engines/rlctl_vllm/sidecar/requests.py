"""Requests under way. Each sample is a request of vLLM, under an id of its own."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from rlctl_servers.requests.cache_salts import salt_of, with_own
from rlctl_servers.requests.limits import refuse_prompt

from rlctl.contract.errors import Reason, RlctlError, typed
from rlctl.contract.sampling import check_samples
from rlctl.sglang_api.request import Asking, PromptRequest
from rlctl.v1.common_pb2 import WeightVersion
from rlctl_vllm.requests.bodies import MOST_SALT, SALT, bodies
from rlctl_vllm.requests.requests import LONGEST_S, refused, tokenize
from rlctl_vllm.sidecar.responses import COMPLETIONS, Sample, completion
from rlctl_vllm.sidecar.upstream import About, Upstream

AGAIN_S = 0.5
"""Seconds between aborts of a request at vLLM. A request that had not reached vLLM yet would continue otherwise."""

CUT_S = 5.0
"""Seconds until the connection of an aborted request is closed. A request held back by a pause has no other end."""

MOST_RUNNING = 65_536
"""Most samples under way."""


class _Running:
    def __init__(self, rid: str, group: str) -> None:
        self.rid = rid
        self.group = group
        self.engine_rid = uuid.uuid4().hex
        self.cut = asyncio.Event()


class Requests:
    """The requests at a vLLM server, on a single event loop.

    Attributes:
        progress: grows with every answer of vLLM to any request.
    """

    def __init__(
        self,
        upstream: Upstream,
        about: About,
        *,
        driven: bool,
        version: Callable[[], WeightVersion] | None = None,
    ) -> None:
        """``driven``: rlctl sets the labels of the server's weight versions. ``version``: returns the present version,
        if this process sets the version; requests have a cache salt then.
        """
        self.progress = 0
        self._upstream = upstream
        self._about = about
        self._driven = driven
        self._version = version
        self._running: dict[str, _Running] = {}

    @property
    def active(self) -> int:
        """Return the number of samples that have not ended."""
        return len(self._running)

    samples = active

    async def whole(self, asking: Asking) -> Any:
        """Return the answer to an unstreamed call. Raises errors of the call, and vLLM's refusals."""
        started = time.perf_counter()
        samples = await self._begin(asking, stream=not self._about.admin)
        tasks = [asyncio.create_task(self._run(*entry)) for entry in samples]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _end(tasks)
        elapsed_s = time.perf_counter() - started
        answers = [sample.answer() for sample, _, _ in samples]
        for answer in answers:
            answer["meta_info"]["e2e_latency"] = elapsed_s
        return answers if asking.listed else answers[0]

    async def streamed(self, asking: Asking) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answers to a streamed call: all output of a sample so far, whenever the sample has grown.

        Raises errors of the call before the first answer.
        """
        samples = await self._begin(asking, stream=True)
        changed: asyncio.Queue[int | RlctlError] = asyncio.Queue()  # each sample has at most three entries
        waiting: set[int] = set()
        ended: set[int] = set()

        async def run(index: int) -> None:
            def tell() -> None:
                if index not in waiting:  # a caller that reads slowly gets the newest output
                    waiting.add(index)
                    changed.put_nowait(index)

            try:
                await self._run(*samples[index], tell)
            except Exception as error:  # noqa: BLE001 - the reader would wait for ever
                changed.put_nowait(typed(error))
            else:
                ended.add(index)
                waiting.discard(index)
                tell()

        tasks = [asyncio.create_task(run(index)) for index in range(len(samples))]
        unfinished = set(range(len(samples)))
        try:
            while unfinished:
                change = await changed.get()
                if isinstance(change, RlctlError):
                    raise change
                if change not in unfinished:
                    continue
                waiting.discard(change)
                sample = samples[change][0]
                if change in ended:
                    unfinished.discard(change)
                elif sample.finish is not None:
                    continue  # the counts follow
                answer = sample.answer()
                yield {**answer, "index": change} if asking.listed else answer
        finally:
            await _end(tasks)

    async def abort(self, rids: Sequence[str], *, all_of_them: bool) -> tuple[int, list[str]]:
        """End requests. Return their number and the unknown ids. Raises as :meth:`Upstream.abort`."""
        names = set(rids)
        matches = [running for running in self._running.values() if all_of_them or names & {running.rid, running.group}]
        for running in matches:
            running.cut.set()
        if self._about.admin:
            await self._upstream.abort(
                None if all_of_them else [running.engine_rid for running in matches], self._about.route
            )
        known_names = {name for running in matches for name in (running.rid, running.group)}
        return len({running.group for running in matches}), sorted(names - known_names)

    async def _begin(self, asking: Asking, *, stream: bool) -> list[tuple[Sample, _Running, dict[str, Any]]]:
        """Return the samples, each with the body for vLLM; nothing is sent yet."""
        coming = sum(prompt.samples for prompt in asking.prompts)
        if len(self._running) + coming > MOST_RUNNING:
            raise Reason.TOO_MANY_REQUESTS.error(f"{len(self._running)} samples are under way here")
        samples = []
        about = self._about
        for prompt in asking.prompts:
            check_samples(prompt.request.sampling_params)
            for index in range(prompt.samples):
                rid = prompt.rid if prompt.samples == 1 else f"{prompt.rid}_{index}"
                if rid in self._running:
                    raise Reason.RID_IN_USE.error(f"a request {rid!r} is running", field="rid")
            refuse_prompt(prompt.request, about.limits)
            text = prompt.request.WhichOneof("prompt") == "text"
            ids: Sequence[int] = prompt.request.input_ids.ids
            if text:
                ids = await tokenize(self._upstream.http, prompt.request.text)
            running = [
                _Running(prompt.rid if prompt.samples == 1 else f"{prompt.rid}_{index}", prompt.rid)
                for index in range(prompt.samples)
            ]
            sample_bodies = bodies(prompt.request, ids, [run.engine_rid for run in running], about.limits)
            ids = list(ids)
            for run, body in zip(running, sample_bodies, strict=True):
                samples.append(
                    (Sample(prompt, run.rid, ids, driven=self._driven), run, self._body(prompt, body, stream))
                )
        return samples

    def _body(self, prompt_request: PromptRequest, body: dict[str, Any], stream: bool) -> dict[str, Any]:
        body = {
            **body,
            **prompt_request.fields,
            "sampling_params": {**body["sampling_params"], **prompt_request.sampling},
        }
        if not stream:
            body["stream"] = False
            body.pop("stream_options", None)
        return completion(body, self._about.model) if self._about.route == COMPLETIONS else body

    async def _run(self, sample: Sample, running: _Running, body: dict[str, Any], tell: Any = None) -> None:
        """Generate a sample at vLLM; ``tell`` is called whenever the sample has grown."""
        if running.rid in self._running:
            raise Reason.RID_IN_USE.error(f"a request {running.rid!r} is running", field="rid")
        self._running[running.rid] = running
        try:
            label = await self._upstream.label() if self._about.route == COMPLETIONS else ""
            reading = asyncio.create_task(self._read(sample, body, tell))
            cut_wait = asyncio.create_task(running.cut.wait())
            try:
                await asyncio.wait({reading, cut_wait}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    await self._cut(running, reading)
                if reading.done():
                    reading.result()
            finally:
                await _end([reading, cut_wait])
            if sample.finish is None:
                sample.cut_off()
            await self._stamp(sample, label)
        finally:
            del self._running[running.rid]

    async def _cut(self, running: _Running, reading: asyncio.Task[None]) -> None:
        """Make sure that an aborted sample ends."""
        until = time.monotonic() + (CUT_S if self._about.admin else 0.0)
        while not reading.done() and time.monotonic() < until:
            await asyncio.wait({reading}, timeout=AGAIN_S)
            if not reading.done():
                # An abort that vLLM does not take now is repeated, or the connection is closed.
                with suppress(RlctlError):
                    await self._upstream.abort([running.engine_rid], self._about.route)

    async def _read(self, sample: Sample, body: dict[str, Any], tell: Any) -> None:
        http, route = self._upstream.http, self._about.route
        if self._version is not None:
            body[SALT] = with_own(salt_of(self._version()), body.get(SALT), MOST_SALT)
        try:
            if not body["stream"]:
                answer = await http.call(route, body, timeout_s=LONGEST_S, admin=False, reuse=True)
                if answer.status != 200:
                    raise refused(answer.message, answer.status)
                sample.take(answer.body)
            else:
                async with aclosing(http.stream(route, body)) as stream:
                    async for event in stream:
                        sample.take(event)
                        self.progress += 1
                        if tell is not None and sample.finish is None:
                            tell()
        except RlctlError as error:
            status = int(error.metadata.get("status", "0"))
            if status:
                raise refused(error.message, status) from error
            if error.reason in (Reason.UNREACHABLE, Reason.LINK_LOST):
                raise Reason.STAGE_NOT_SERVING.error(error.message) from error
            raise
        self.progress += 1
        if sample.finish is None:
            raise Reason.ENGINE_FAILED.error("vLLM ended its answer before the sample had ended")

    async def _stamp(self, sample: Sample, before: str) -> None:
        """Set the version of a sample if vLLM did not. A version that changed meanwhile is unknown."""
        if not sample.label:
            with suppress(RlctlError):
                after = await self._upstream.label()
                sample.label = after if self._about.route != COMPLETIONS or after == before else ""


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""Requests: each sample is a request of its own at SGLang, under an id of fixed width that nobody else uses.

SGLang ends requests by the beginnings of their ids; ids of one width are never the beginning of each other.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from rlctl.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import (
    FINISH_TYPE_ABORT,
    FINISH_TYPE_LENGTH,
    FINISH_TYPE_STOP,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    Sample,
    TokenLogprob,
)
from rlctl_sglang.http import Http
from rlctl_sglang.lora_table import Held, LoraTable
from rlctl_sglang.requests import Limits, bodies

ABORT_S = 2.0
"""How long an aborted request waits for SGLang's own end of it: one that SGLang holds back has none."""

ABORT_CALL_S = 10.0

HELD_S = 0.05
"""How often a request whose output is held back looks whether it still is."""

_FINISH = {"length": FINISH_TYPE_LENGTH, "stop": FINISH_TYPE_STOP, "abort": FINISH_TYPE_ABORT}


class Stamps:
    """Which version SGLang's own labels stand for. From any thread."""

    def __init__(self, label: str) -> None:
        """``label``: SGLang's at its start."""
        self.label = label
        self._kv_label = label
        self._versions: dict[str, WeightVersion] = {label: WeightVersion()}

    @staticmethod
    def of(version: WeightVersion) -> str:
        """SGLang's label for a version: the trainer's labels may come again, sequences do not."""
        return f"{version.label}@{version.sequence}"

    def bind(self, version: WeightVersion, label: str = "") -> None:
        """From now on a label, by default the present one, stands for this version."""
        kept = WeightVersion()
        kept.CopyFrom(version)
        self._versions[label or self.label] = kept

    def flushed(self) -> None:
        """From now on no KV entry of an earlier version is left."""
        self._kv_label = self.label

    @property
    def oldest_kv(self) -> WeightVersion:
        """The version that the oldest KV entries may be of."""
        return self._versions[self._kv_label]

    def version(self, label: str) -> WeightVersion | None:
        """The version, or None for a label that rlctl did not give."""
        return self._versions.get(label)


class _Running:
    """One request of a caller's.

    Attributes:
        engine_rids: ids of its samples at SGLang.
        adapter: what it is generated with; None: the base weights alone.
        heard: those that SGLang has said something of.
    """

    def __init__(self, engine_rids: Sequence[str], adapter: Held | None) -> None:
        self.engine_rids = engine_rids
        self.adapter = adapter
        self.heard: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self.cut = asyncio.Event()

    def end(self) -> None:
        """Its end was asked for; from any thread."""
        self._loop.call_soon_threadsafe(self.cut.set)


class Requests:
    """The requests at one server. ``generate`` runs on one loop; the rest may be called from others."""

    def __init__(
        self,
        http: Http,
        limits: Limits,
        stamps: Stamps,
        adapters: LoraTable,
        *,
        incremental: bool,
        stopped: Callable[[], bool],
    ) -> None:
        """``incremental``: the server sends what is new of a text, not all of it again. ``stopped``: whether it is
        paused, or is about to be.
        """
        self._adapters = adapters
        self._http = http
        self._limits = limits
        self._stamps = stamps
        self._incremental = incremental
        self._stopped = stopped
        self._running: dict[str, _Running] = {}
        self._lock = threading.Lock()
        self._held = False

    def hold(self) -> None:
        """From now on nothing that SGLang generates is told, until :meth:`release`."""
        self._held = True

    def release(self) -> None:
        """Tell what was held back, and what comes."""
        self._held = False

    @property
    def active(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    def using(self, lora: str) -> list[str]:
        """Ids of the requests that have not ended and run with the adapter that SGLang calls so."""
        with self._lock:
            return [rid for rid, running in self._running.items() if running.adapter and running.adapter.name == lora]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateResponse, None]:
        """See :meth:`rlctl.engine.Engine.generate`."""
        rid = request.rid or uuid.uuid4().hex
        count = request.sampling_params.n or 1
        rids = [uuid.uuid4().hex for _ in range(count)]
        with self._lock:
            if rid in self._running:
                raise Reason.RID_IN_USE.error(f"a request {rid!r} is running", field="rid")
            # Under the lock: whoever takes an adapter out of the table finds all that have it.
            adapter = self._adapters.find(request.adapter, "adapter") if request.adapter else None
            made = bodies(request, rids, self._limits, lora=adapter.name if adapter else "")
            running = self._running[rid] = _Running(rids, adapter)
        events: asyncio.Queue[tuple[int, dict[str, Any] | RlctlError | None]] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(index, body, events)) for index, body in enumerate(made)]
        keep = request.return_engine_meta
        version = adapter.info.version if adapter else ""
        samples = {
            index: _Reading(index, self._stamps, self._incremental, keep=keep, adapter_version=version)
            for index in range(count)
        }
        try:
            first = True
            while samples:
                event = await _next(events, running.cut)
                while self._held and not running.cut.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(running.cut.wait(), HELD_S)
                if event is None or self._held:
                    # Held back by SGLang, where nothing ends it: closing its connection does, as soon as it could run.
                    for reading in samples.values():
                        yield GenerateResponse(rid=rid, samples=[reading.cut_off()])
                    return
                index, told = event
                if index not in samples:
                    continue
                if isinstance(told, RlctlError):
                    raise told
                if running.cut.is_set() and rids[index] not in running.heard:
                    await self._tell({"rid": rids[index]})  # it was held back when its end was asked for
                running.heard.add(rids[index])
                if told is None:
                    raise Reason.ENGINE_FAILED.error("SGLang ended its answer before the sample had ended")
                response = GenerateResponse(rid=rid, samples=[samples[index].take(told)])
                if index == 0 and first:
                    first = False
                    _head(response, told, request)
                if response.samples[0].HasField("finish_reason"):
                    del samples[index]
                yield response
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with self._lock:
                self._running.pop(rid, None)

    async def abort(self, rids: Sequence[str], *, all_of_them: bool) -> tuple[int, list[str]]:
        """End requests: how many, and the ids that were not found. Raises as :meth:`Http.call`."""
        with self._lock:
            chosen = list(self._running) if all_of_them else list(dict.fromkeys(rids))
            found = {rid: self._running[rid] for rid in chosen if rid in self._running}
        if all_of_them:
            await self._tell({"abort_all": True})
        else:
            # The abort of a request that a pause holds back has no effect, and makes SGLang ignore every later one
            # (``abort_sent`` in its tokenizer_manager.py); closing its connection ends it.
            engine_rids = [
                each
                for running in found.values()
                for each in running.engine_rids
                if each in running.heard or not self._stopped()
            ]
            await asyncio.gather(*(self._tell({"rid": each}) for each in engine_rids))
        for running in found.values():
            running.end()
        return len(found), [rid for rid in chosen if rid not in found]

    async def _tell(self, body: dict[str, Any]) -> None:
        try:
            answer = await self._http.call("/abort_request", body, timeout_s=ABORT_CALL_S)
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error("SGLang did not take the abort in time") from None
        if answer.status != 200:
            raise Reason.ENGINE_FAILED.error(f"SGLang refused the abort: {answer.message}")

    async def _pump(
        self, index: int, body: dict[str, Any], events: asyncio.Queue[tuple[int, dict[str, Any] | RlctlError | None]]
    ) -> None:
        try:
            async with aclosing(self._http.stream("/generate", body)) as stream:
                async for told in stream:
                    events.put_nowait((index, told if "meta_info" in told else _refused(str(told.get("error")), 400)))
            events.put_nowait((index, None))
        except RlctlError as error:
            events.put_nowait((index, _typed(error)))


class _Reading:
    """One sample as it comes."""

    def __init__(self, index: int, stamps: Stamps, incremental: bool, *, keep: bool, adapter_version: str) -> None:
        """``keep``: SGLang's own words are wanted, too."""
        self._adapter_version = adapter_version
        self._meta: dict[str, Any] | None = {} if keep else None
        self._index = index
        self._stamps = stamps
        self._incremental = incremental
        self._tokens = 0
        self._text = 0

    def take(self, told: dict[str, Any]) -> Sample:
        """What is new."""
        meta = told["meta_info"]
        count = int(meta.get("completion_tokens") or 0)
        new = max(count - self._tokens, 0)
        ids = list(told.get("output_ids") or ())[-new:] if new else []
        text = told.get("text") or ""
        if not self._incremental:
            text, self._text = text[self._text :], max(self._text, len(text))
        sample = Sample(
            index=self._index,
            text=text,
            output_ids=ids,
            output_logprobs=_logprobs(
                (meta.get("output_token_logprobs") or [])[-new:] if new else [],
                (meta.get("output_top_logprobs") or [])[-new:] if new else [],
            ),
            completion_tokens=max(count, self._tokens),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            retractions=int(meta.get("num_retractions") or 0),
        )
        self._tokens = max(count, self._tokens)
        self._keep(meta, new)
        finish = meta.get("finish_reason")
        if finish is not None:
            if self._meta is not None:
                sample.engine_meta.update(self._meta)
            sample.finish_reason.CopyFrom(_finish(finish))
            for span in meta.get("weight_versions") or ():
                version = self._stamps.version(str(span["version"]))
                if version is None or span["end"] <= span["start"]:
                    continue
                made = sample.versions.add(
                    version=version,
                    start=span["start"],
                    end=min(span["end"], self._tokens),
                    adapter_version=self._adapter_version,
                )
                oldest = self._stamps.oldest_kv
                if oldest.sequence < version.sequence and (made.start or sample.cached_tokens):
                    made.kv_version.CopyFrom(oldest)  # no flush since: it was asked for
        return sample

    def _keep(self, meta: dict[str, Any], new: int) -> None:
        """As SGLang says it of a sample that is not streamed: its lists grow, and what was said of the prompt stays."""
        if self._meta is None:
            return
        for name, value in meta.items():
            if name.startswith("output_") and isinstance(value, list):
                self._meta.setdefault(name, []).extend(value[-new:] if new else ())
            elif value or not self._meta.get(name):
                self._meta[name] = value

    def cut_off(self) -> Sample:
        """The end of a sample that was aborted and that SGLang says nothing of."""
        return Sample(
            index=self._index,
            completion_tokens=self._tokens,
            finish_reason=FinishReason(type=FINISH_TYPE_ABORT, message="aborted"),
        )


async def _next(
    events: asyncio.Queue[tuple[int, dict[str, Any] | RlctlError | None]], cut: asyncio.Event
) -> tuple[int, dict[str, Any] | RlctlError | None] | None:
    """The next event; None when the request was cut off and nothing more comes."""
    coming = asyncio.ensure_future(events.get())
    cutting = asyncio.ensure_future(cut.wait())
    try:
        await asyncio.wait({coming, cutting}, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            await asyncio.wait({coming}, timeout=ABORT_S)
        return coming.result() if coming.done() else None
    finally:
        for each in (coming, cutting):
            each.cancel()


def _head(response: GenerateResponse, told: dict[str, Any], request: GenerateRequest) -> None:
    """What is said of the prompt, once."""
    meta = told["meta_info"]
    response.prompt_tokens = int(meta.get("prompt_tokens") or 0)
    text = request.WhichOneof("prompt") == "text"
    ids = list(told.get("prompt_token_ids") or ()) if text else list(request.input_ids.ids)
    if text:
        response.prompt_ids.extend(ids)
    if request.HasField("logprob_start_len") and request.logprob_start_len >= 0:
        entries = _logprobs(meta.get("input_token_logprobs") or [], meta.get("input_top_logprobs") or [])
        for entry, token_id in zip(entries, ids[request.logprob_start_len :], strict=False):
            entry.token_id = token_id  # SGLang gives the last id of the vocabulary as 0
        response.input_logprobs.extend(entries)


def _logprobs(tokens: Sequence[Any], tops: Sequence[Any]) -> list[TokenLogprob]:
    """SGLang's [logprob, token id, text] entries; ``tops``, where given, are lists of such."""
    entries = []
    for position, (logprob, token_id, *_) in enumerate(tokens):
        entry = TokenLogprob(token_id=token_id, logprob=logprob)
        top = tops[position] if position < len(tops) else None
        entry.top.extend(TokenLogprob(token_id=token, logprob=value) for value, token, *_ in top or ())
        entries.append(entry)
    return entries


def _finish(told: dict[str, Any]) -> FinishReason:
    if told.get("type") not in _FINISH:
        raise Reason.ENGINE_FAILED.error(f"SGLang ended the sample for a reason that is not known: {told}")
    status = told.get("status_code")
    if told["type"] == "abort" and status:
        raise _refused(str(told.get("message")), int(status))
    reason = FinishReason(type=_FINISH[told["type"]])
    matched = told.get("matched")
    if isinstance(matched, int):
        reason.matched_token = matched
    elif isinstance(matched, str):
        reason.matched_string = matched
    if told["type"] == "abort":
        reason.message = str(told.get("message") or "")
    return reason


def _typed(error: RlctlError) -> RlctlError:
    """What a failed stream means to the caller."""
    status = int(error.metadata.get("status", "0"))
    if status:
        return _refused(error.message, status)
    return Reason.STAGE_NOT_SERVING.error(error.message)


def _refused(message: str, status: int) -> RlctlError:
    if status == 400 and ("longer than" in message or "exceeds the maximum" in message):
        return Reason.PROMPT_TOO_LONG.error(message)
    if status == 400:
        return Reason.FIELD_INVALID.error(f"SGLang: {message}")
    if status == 503:
        return Reason.STAGE_NOT_SERVING.error(f"SGLang: {message}")
    return Reason.ENGINE_FAILED.error(f"SGLang: {message}")

"""Requests to data ports while the weights change: how each request ends, and of which versions its tokens are."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import aiohttp
import torch
from models import changed

from rlctl.demo.tiny import encode
from rlctl.runtime.http_errors import REASON
from rlctl.runtime.http_forwarding import VERSION
from rlctl.sdk.blocking import Fleet
from rlctl.v1.verbs_pb2 import GetLoadsRequest

PROMPT = encode("1+2=")
TOKENS = 24
CALLERS = 6
LEAVES = 7
"""One of so many requests is long, and is closed early."""

LEAVES_S = 0.2
LONG = 400
"""Tokens of a request that its caller closes early."""

BETWEEN_S = 0.3
LEFT_S = 10.0
"""Longest time until requests of callers that have left are gone from the engines, in seconds."""

TRIED_S = 120.0


@dataclass(frozen=True)
class Part:
    """What one document of an answer says.

    Attributes:
        spans: label, start and end of the tokens of each version; only at the end of an answer.
        finish: reason of the end, or "".
    """

    tokens: list[int]
    spans: list[tuple[str, int, int]]
    finish: str


@dataclass(frozen=True)
class Words:
    """A server's own route with token ids in and out.

    Attributes:
        body: body of a request, for a number of tokens.
        part: reads one document of an answer.
        salt: field of a cache salt.
    """

    path: str
    body: Callable[[int], dict[str, Any]]
    part: Callable[[Any], Part]
    salt: str


def _spans(spans: Iterable[Mapping[str, Any]] | None) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in spans or []]


def _of_sglang(document: Any) -> Part:
    meta = document["meta_info"]
    return Part(
        document["output_ids"], _spans(meta.get("weight_versions")), (meta["finish_reason"] or {}).get("type", "")
    )


def _of_vllm(document: Any) -> Part:
    if not document["choices"]:
        return Part([], [], "")
    (choice,) = document["choices"]
    return Part(choice["token_ids"] or [], _spans(choice.get("weight_versions")), choice["finish_reason"] or "")


SGLANG = Words(
    "/generate",
    lambda count: {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True},
    },
    _of_sglang,
    "extra_key",
)
VLLM = Words(
    "/inference/v1/generate",
    lambda count: {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": count, "temperature": 0.0, "ignore_eos": True},
    },
    _of_vllm,
    "cache_salt",
)


Entries = tuple[tuple[int, int], ...]
"""KV entries of a sequence, from its begin: index of the version that has computed them, and their end."""


@dataclass
class Versions:
    """Versions in the order of their updates.

    Attributes:
        models: by label.
        pauses: modes of the updates' pauses, in turn.
        flush: the updates drop all KV entries of the versions before.
        begun: index of the version of the newest update.
        published: index of the version of the newest update that has ended.
    """

    models: dict[str, Any]
    pauses: Sequence[str]
    flush: bool = True
    begun: int = 0
    published: int = 0
    _tokens: dict[tuple[Entries, tuple[int, ...]], int] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        return list(self.models)

    def pause(self, number: int) -> str:
        """Return the pause of the update from version ``number`` to the next."""
        return self.pauses[number % len(self.pauses)]

    def explain(self, tokens: Sequence[int], possible: Callable[[int], Iterable[int]]) -> bool:
        """Return whether greedy tokens come from the versions that are possible at each place, in their order.

        An entry of the KV cache that is older than its version would change the tokens after it. Only frozen requests
        of updates without a flush have such entries.
        """
        entries: set[Entries] = {((version, len(PROMPT)),) for version in possible(0)}
        for place, token in enumerate(tokens):
            if place:
                entries = {
                    after for each in entries for version in possible(place) for after in self._step(each, version)
                }
            entries = {each for each in entries if self._token(each, tokens[:place]) == token}
        return bool(entries)

    def _step(self, entries: Entries, version: int) -> Iterable[Entries]:
        """Return the entries after a version's step over the last token: none for a version older than the entries."""
        last, end = entries[-1]
        if version < last:
            return []
        if version == last:
            return [(*entries[:-1], (last, end + 1))]
        frozen = all(self.pause(number) == "in_place" for number in range(last, version))
        return [(*(entries if frozen and not self.flush else ()), (version, end + 1))]

    def _token(self, entries: Entries, tokens: Sequence[int]) -> int:
        """Return the greedy token after the prompt and these tokens, with KV entries of these versions."""
        key = entries, tuple(tokens)
        if key not in self._tokens:
            ids, start, cache = torch.tensor([[*PROMPT, *tokens]]), 0, None
            for version, end in entries:
                with torch.no_grad():
                    output = self.models[self.labels[version]](input_ids=ids[:, start:end], cache=cache, use_cache=True)
                start, cache = end, output.cache
            self._tokens[key] = int(output.logits[0, -1].argmax())
        return self._tokens[key]


@dataclass
class Ended:
    """A request that has ended.

    Attributes:
        how: "length" or "abort", as the server says; a reason of rlctl's; "left", by its caller; or "lost", without an
            answer, or with a part of one and no error.
        sent: when, on the monotonic clock.
        oldest: :attr:`Versions.published` at the begin of the request.
        newest: :attr:`Versions.begun` at the end of the request.
        admitted: label in the head of the answer.
    """

    target: str
    how: str
    sent: float
    at: float
    oldest: int
    newest: int
    admitted: str = ""
    tokens: list[int] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)

    def check(self, versions: Versions) -> None:
        """Check that each token is of a version that was served between the request's begin and its end.

        Versions published before the begin are stale, also in the middle of an answer.
        """
        served = range(self.oldest, self.newest + 1)
        labels = versions.labels
        assert not self.admitted or labels.index(self.admitted) in served, self
        if self.how != "length":
            assert versions.explain(self.tokens[:TOKENS], lambda _: served), self
            return
        assert len(self.tokens) == TOKENS, self
        assert [0, *(end for _, _, end in self.spans)] == [*(start for _, start, _ in self.spans), TOKENS], self
        said = [labels.index(label) for label, start, end in self.spans for _ in range(start, end)]
        assert set(said) <= set(served), self
        assert labels.index(self.admitted) <= said[0], self
        assert versions.explain(self.tokens, lambda place: [said[place]]), self


async def call(
    session: aiohttp.ClientSession,
    words: Words,
    versions: Versions,
    target: str,
    url: str,
    *,
    stream: bool,
    leaves: int = 0,
) -> Ended:
    """Send one request. ``leaves``: number of tokens if the connection is closed early; 0: wait for the end."""
    ended = Ended(target, "lost", time.monotonic(), 0.0, versions.published, 0)
    body = {**words.body(leaves or TOKENS), "stream": stream}
    if not versions.flush:
        body[words.salt] = secrets.token_hex(8)  # no prompt has entries of another request, which may be older
    received = b""
    try:
        async with asyncio.timeout(LEAVES_S if leaves else TRIED_S):
            async with session.post(url + words.path, json=body) as response:
                ended.admitted = unquote(response.headers.get(VERSION, ""))
                if response.status != 200:
                    ended.how = response.headers.get(REASON, f"{response.status} without a reason")
                    await response.read()
                async for piece in response.content.iter_any():
                    received += piece
            if response.status == 200:
                ended.how = "whole"
    except TimeoutError:
        if not leaves:
            raise
        ended.how = "left"
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError):
        pass
    ended.at, ended.newest = time.monotonic(), versions.begun
    if received and ended.how in ("whole", "lost", "left"):
        _read(ended, words, received, stream=stream)
    return ended


def _read(ended: Ended, words: Words, received: bytes, *, stream: bool) -> None:
    """Read what has come of an answer."""
    if not stream:
        if ended.how == "whole":
            part = words.part(json.loads(received))
            ended.how, ended.tokens, ended.spans = part.finish, part.tokens, part.spans
        return
    events = [event.removeprefix(b"data: ") for event in received.split(b"\n\n")[:-1]]
    was_whole, done, finish = ended.how == "whole", False, ""
    for event in filter(None, events):
        assert not done, received
        done = event == b"[DONE]"
        document = {} if done else json.loads(event)
        if "error" in document:
            ended.how = document["error"].get("reason") or f"an event without a reason: {event!r}"
        elif document:
            part = words.part(document)
            ended.tokens += part.tokens
            ended.spans, finish = part.spans or ended.spans, part.finish or finish
    if was_whole and ended.how == "whole":
        assert done, received
        ended.how = finish


def update(
    fleet: Fleet,
    versions: Versions,
    *,
    during: Callable[[int], None] = lambda number: None,
    after: Callable[[int], None] = lambda number: None,
    **options: Any,
) -> None:
    """Publish every version but the first. ``during`` and ``after``: called with each update's number."""
    with contextlib.closing(fleet.publisher("actor", trainer="port")) as publisher:
        for number, label in enumerate(versions.labels[1:]):
            versions.begun += 1
            pause = versions.pause(number)
            pending = publisher.update_async(
                versions.models[label], version=label, pause=pause, flush=versions.flush, **options
            )
            during(number)
            pending.wait()
            versions.published = versions.begun
            after(number)
            time.sleep(BETWEEN_S)


async def keep_calling(
    words: Words,
    versions: Versions,
    addresses: Callable[[], Mapping[str, str]],
    updates: Callable[[], None],
    long: int = LONG,
) -> list[Ended]:
    """Call every address in turn, streamed and not, until the updates have ended. Return the ends.

    ``long``: tokens of the requests that are closed early.
    """
    updating = asyncio.create_task(asyncio.to_thread(updates))
    ends: list[Ended] = []

    async def calls(number: int) -> None:
        async with aiohttp.ClientSession() as session:
            for turn in itertools.count(number):
                if updating.done():
                    return
                present = addresses()
                target = sorted(present)[turn % len(present)]
                leaves = 0 if turn % LEAVES else long
                url, stream = present[target], turn // 3 % 2 == 0
                ends.append(await call(session, words, versions, target, url, stream=stream, leaves=leaves))
                if ends[-1].how == "lost":
                    await asyncio.sleep(LEAVES_S)

    try:
        await asyncio.gather(*map(calls, range(CALLERS)))
    finally:
        await updating
    return ends


def counted(ends: Iterable[Ended]) -> Counter[tuple[str, str]]:
    """Return the number of requests by target and end."""
    return Counter((ended.target, ended.how) for ended in ends)


def wait_until_idle(fleet: Fleet) -> None:
    """Wait until the engines themselves report no request, LEFT_S at most."""
    deadline = time.monotonic() + LEFT_S
    while busy := {slot: count for slot, count in at_engines(fleet).items() if count}:
        assert time.monotonic() < deadline, busy
        time.sleep(0.2)


def at_engines(fleet: Fleet) -> dict[str, int]:
    """Return the number of requests at each engine, as the engine counts them."""
    stages = fleet.call(GetLoadsRequest()).stage_results
    loads = {stage.slot: stage.rank_results[0].loads for stage in stages}
    return {slot: each.running + each.waiting for slot, each in loads.items()}


async def run(
    fleet: Fleet, words: Words, model: Any, updates: int, pauses: Sequence[str], *, flush: bool = True
) -> None:
    """Update a fleet that is at this model under load, and check every answer."""
    first = fleet.status().models[0].latest.label
    versions = Versions(
        {first: model} | {f"{pauses[0]}-{seed}": changed(model, seed=seed) for seed in range(updates)}, pauses, flush
    )
    registrations = [stage.registration for stage in fleet.status().stages]
    assert all(each.data_address for each in registrations)
    addresses = {each.slot: f"http://{each.data_address}" for each in registrations}
    ends = await keep_calling(words, versions, lambda: addresses, lambda: update(fleet, versions))
    count = counted(ends)
    assert {how for _, how in count} <= {"length", "abort", "left", "STAGE_NOT_SERVING", "CANCELLED"}, count
    assert sum(number for (_, how), number in count.items() if how == "length") >= 2 * updates, count
    for ended in ends:
        ended.check(versions)
    assert len({label for ended in ends for label, _, _ in ended.spans}) > updates // 2
    wait_until_idle(fleet)

"""Choice of the tokens of the next step: continuous batching over the KV slots. Rank 0 only.

Every step takes one token of each running sample. Prompts of waiting samples join as far as rows, slots and
:data:`PREFILL_TOKENS` allow; long prompts go in pieces. When slots run out, the sample that was admitted last goes back
to waiting. Event loops submit and abort from other threads; the engine thread does everything else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT, PauseMode, WeightVersion
from rlctl.v1.verbs_pb2 import Loads, TensorSegment
from rlctl_torch.disaggregation.bootstrap import Coming, Room
from rlctl_torch.disaggregation.kv_handover import MOST
from rlctl_torch.generation import sampling
from rlctl_torch.generation.output_stream import Stream, wake
from rlctl_torch.generation.sample import Sample
from rlctl_torch.model.kv_cache import SlotAllocator
from rlctl_torch.model.lora import WITHOUT, Adapters, LoraAdapter
from rlctl_torch.steps.step_plan import Batch, Move

PREFILL_TOKENS = 2048
"""Prompt tokens per step. The limit bounds the memory of a step, and the time that running samples wait for a long
prompt.
"""

ABORTED = "Aborted"


@dataclass
class _Part:
    """A sample's share of the step under way: the scored prompt tokens, and whether the sample gets a token."""

    sample: Sample
    scored: range
    extends: bool


class Scheduler:
    """Waiting and running samples, and their KV slots."""

    def __init__(self, slots: SlotAllocator, max_running: int, adapters: Adapters) -> None:
        self._slots = slots
        self._adapters = adapters
        self._max_running = max_running
        self._lock = threading.Lock()
        self._requests: dict[str, list[Sample]] = {}
        self._waiting: deque[Sample] = deque()  # bounded by the requests in flight that the stage admits
        self._running: list[Sample] = []
        self._under_way: list[_Part] = []
        self._moving: Sample | None = None
        self._lent: set[int] = set()  # rooms with entries in shared memory
        self._over: deque[int] = deque()  # rooms without readers, to be freed
        self._failure: RlctlError | None = None
        self._version = WeightVersion()
        self._generated = 0
        self._draining = self._held = ""  # adapter with which no sample starts; adapter with which no sample runs
        self._paused: dict[str, bool] = {}  # adapters paused by name; False: still draining
        self.work = threading.Event()
        """Set when there may be work, for the engine thread."""

    # From any thread.

    def submit(self, stream: Stream, samples: list[Sample], *, awaited: bool = False) -> None:
        """Queue a request. Raises RID_IN_USE, ADAPTER_NOT_FOUND, or the engine's failure.

        ``awaited``: the request starts with KV entries of a prefill engine and is queued by :meth:`arrive`.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            for name in {sample.adapter for sample in samples if sample.adapter}:
                self._adapters.find(name, "adapter")
            if stream.rid in self._requests:
                raise Reason.RID_IN_USE.error(f"a request {stream.rid!r} is running", field="rid")
            self._requests[stream.rid] = list(samples)
            for sample in samples:
                if sample.complete and sample.next_score is None and sample.gives is None:
                    self._end(sample, "")
                elif not awaited:
                    self._waiting.append(sample)
        wake([stream])
        self.work.set()

    def arrive(self, stream: Stream, coming: Coming) -> None:
        """Queue a request after its awaited KV entries have arrived. An ended request needs no entries."""
        with self._lock:
            samples = self._of(stream)
            coming.wait_for(len(samples))
            for sample in samples:
                sample.comes = coming
            self._waiting.extend(samples)
        self.work.set()

    def refuse(self, stream: Stream, error: RlctlError) -> None:
        """End a request with an error, unless it has ended."""
        with self._lock:
            self._refuse(stream, error)
        wake([stream])
        self.work.set()

    def hand_over(self, stream: Stream) -> None:
        """End a request after the entries of its prompt were taken, and free their memory."""
        with self._lock:
            for sample in self._of(stream):
                self._end(sample, "")
        wake([stream])
        self.work.set()

    def abort(self, rids: Iterable[str]) -> tuple[int, list[str]]:
        """End requests by id. Return the number of known requests, and the unknown ids."""
        with self._lock:
            unique_rids = list(dict.fromkeys(rids))
            unknown_rids = [rid for rid in unique_rids if rid not in self._requests]
            active_rids = [rid for rid in unique_rids if rid in self._requests]
            streams = self._abort(active_rids)
        wake(streams)
        self.work.set()
        return len(active_rids), unknown_rids

    def drop(self, stream: Stream, why: str = ABORTED) -> None:
        """End the request of a stream without a listener, unless the request has ended."""
        with self._lock:
            if self._of(stream):
                self._abort([stream.rid], why)
        wake([stream])
        self.work.set()

    def abort_all(self) -> int:
        """End every request and return their number."""
        with self._lock:
            rids = list(self._requests)
            streams = self._abort(rids)
        wake(streams)
        self.work.set()
        return len(rids)

    def fail(self, error: RlctlError) -> None:
        """End every request with an error, and refuse new requests with the same error."""
        with self._lock:
            self._failure = error
            streams = [samples[0].stream for samples in self._requests.values()]
            self._requests.clear()
            self._waiting.clear()
            self._running.clear()
            self._over.extend(self._lent)
            self._lent.clear()
            for stream in streams:
                stream.fail(error)
        wake(streams)

    def set_version(self, version: WeightVersion) -> None:
        """Stamp tokens with this version from the next step on."""
        self._version = WeightVersion.FromString(version.SerializeToString())

    @property
    def version(self) -> WeightVersion:
        return self._version

    def loads(self, step: int) -> Loads:
        """Return the load of the engine, counted in samples."""
        with self._lock:
            return Loads(
                running=len(self._running),
                waiting=sum(len(samples) for samples in self._requests.values()) - len(self._running),
                used_tokens=self._slots.used,
                max_tokens=self._slots.tokens,
                step=step,
                generated_tokens=self._generated,
            )

    # From the engine thread.

    @property
    def running(self) -> int:
        """Number of samples that hold KV entries."""
        return len(self._running)

    @property
    def active(self) -> list[str]:
        """Ids of the requests that wait or run."""
        with self._lock:
            return list(self._requests)

    def using(self, adapter: str) -> list[str]:
        """Return the ids of the requests that wait or run with an adapter."""
        with self._lock:
            return self._using(adapter)

    def _using(self, adapter: str) -> list[str]:
        return [rid for rid, samples in self._requests.items() if samples[0].adapter == adapter]

    def put_adapter(self, adapter: LoraAdapter) -> None:
        """Load or replace an adapter. Running samples with the adapter go back to waiting, because KV entries of the
        replaced adapter must not be reused.
        """
        with self._lock:
            self._retract_users(adapter.info.name)
            self._adapters.put(adapter)

    def drop_adapter(self, name: str) -> None:
        """Unload an adapter and end the requests with it."""
        with self._lock:
            streams = self._abort(self._using(name), f"adapter {name!r} was unloaded")
            self._adapters.drop(name)
        wake(streams)

    def runs_with(self, adapter: str) -> bool:
        """Whether a running sample uses an adapter."""
        with self._lock:
            return any(sample.adapter == adapter for sample in self._running)

    def drain_adapter(self, name: str) -> None:
        """Start no sample with an adapter until :meth:`release_adapter`. Running samples continue."""
        with self._lock:
            self._draining = name

    def hold_adapter(self, name: str, mode: PauseMode.ValueType) -> None:
        """Compute nothing with an adapter until :meth:`release_adapter`.

        Mode abort ends its requests. Mode retract sends its running samples back to waiting.
        """
        with self._lock:
            self._draining = self._held = name
            streams = self._stop_users(name, mode)
        wake(streams)

    def release_adapter(self) -> None:
        """Let samples of every adapter start and run, except adapters paused by name."""
        with self._lock:
            self._draining = self._held = ""
        self.work.set()

    def drain_paused(self, name: str) -> None:
        """Start no sample with an adapter that is about to be paused by name. Running samples continue."""
        with self._lock:
            self._paused.setdefault(name, False)

    def pause_adapter(self, name: str, mode: PauseMode.ValueType) -> None:
        """Compute nothing with an adapter until :meth:`continue_adapter`, also across updates. Modes as in
        :meth:`hold_adapter`.
        """
        with self._lock:
            self._paused[name] = True
            streams = self._stop_users(name, mode)
        wake(streams)

    def continue_adapter(self, name: str) -> None:
        """End the pause by name of an adapter."""
        with self._lock:
            self._paused.pop(name, None)
        self.work.set()

    def is_paused(self, adapter: str) -> bool:
        """Whether an adapter is paused by name."""
        return self._paused.get(adapter, False)

    def frozen(self) -> int:
        """Return the number of running samples whose adapter is paused by name."""
        with self._lock:
            return sum(self.is_paused(sample.adapter) for sample in self._running)

    @property
    def idle(self) -> bool:
        return not self._requests

    def retract_all(self) -> None:
        """Send the running samples back to waiting, ahead of the waiting samples."""
        with self._lock:
            while self._running:
                self._retract(self._running[-1])

    def take_dropped(self) -> int:
        """Return the number of KV entries dropped by finished and retracted samples since the last call."""
        with self._lock:
            return self._slots.take_dropped()

    def schedule(self, *, admit: bool) -> Batch | None:
        """Return the batch of the next step, or None if nothing can run. The logits go to :meth:`process`.

        ``admit``: whether waiting samples may start.
        """
        with self._lock:
            if admit:
                self._admit()
            parts = self._share()
            while sum(count for _, count in parts) > self._slots.free:
                if not self._make_room():
                    self._retract(self._running[-1])
                parts = self._share()
            return self._form(parts) if parts else None

    def let_go(self) -> Move | None:
        """Return a move that frees the memory of a room without readers, or None; also while requests may not run."""
        with self._lock:
            return Move("let_go", self._over.popleft()) if self._over else None

    def move(self, *, admit: bool) -> Move | None:
        """Return a move of KV entries to or from the other engine of a pair, before the next batch, or None.

        :meth:`moved` ends the move.
        """
        with self._lock:
            if admit:
                self._admit()
            for sample in list(self._running):
                if self._is_held(sample):
                    continue
                if sample.gives is not None and not sample.pending and len(self._lent) < MOST:
                    self._moving = sample
                    self._lent.add(sample.gives.number)
                    return Move("give", sample.gives.number, sample.slots[:-1])
                if sample.comes is not None and (move := self._take(sample, sample.comes)) is not None:
                    self._moving = sample
                    return move
            return None

    def moved(self, segments: Sequence[TensorSegment], error: RlctlError | None) -> None:
        """End the present move, with the segments of the given entries or the error."""
        with self._lock:
            sample, self._moving = self._moving, None
            assert sample is not None
            if sample.gives is not None:
                self._gave(sample, sample.gives, segments, error)
            elif error is not None:
                self._refuse(sample.stream, error)
            elif sample.comes is not None:
                sample.kv_version = self._version
                sample.comes.took()
                sample.comes = None
            if sample.doomed and not sample.ended:
                self._end(sample, sample.doomed)
        wake([sample.stream])

    def process(self, logits: torch.Tensor) -> None:
        """Sample from the logits of the batch (``[outputs, vocabulary]``) and report to the streams."""
        parts = self._under_way
        scores, extended = [], []
        row = 0
        for part in parts:
            rows = range(row, row + len(part.scored))
            row += len(part.scored)
            if part.scored:
                tokens = part.sample.tokens[part.scored.start : part.scored.stop]
                scores.append(
                    (part.sample, sampling.score(logits[rows.start : rows.stop], tokens, part.sample.settings))
                )
            if part.extends:
                extended.append((row, part.sample))
                row += 1
        choices: Sequence[sampling.Choice] = []
        if extended:
            chosen = logits if len(extended) == logits.shape[0] else logits[[r for r, _ in extended]]
            choices = sampling.sample(chosen, [sample for _, sample in extended])
        with self._lock:
            self._under_way = []
            for sample, sample_scores in scores:
                sample.take_scores(sample_scores)
            for (_, sample), choice in zip(extended, choices, strict=True):
                if not sample.doomed:
                    sample.extend(choice, self._version, self._adapter_version(sample))
                    self._generated += 1
            for part in parts:
                sample = part.sample
                done = sample.complete and not sample.pending and sample.gives is None
                if sample.doomed or sample.ended or done:
                    self._end(sample, sample.doomed)
        wake({part.sample.stream for part in parts})

    # With the lock held.

    def _admit(self) -> None:
        claimed_slots = sum(sample.pending for sample in self._running)
        for sample in list(self._waiting):
            if sample.adapter and (sample.adapter == self._draining or sample.adapter in self._paused):
                continue
            while not self._has_room(sample, claimed_slots):
                if not self._make_room():
                    return
            claimed_slots += sample.pending
            sample.row = self._slots.take_row()
            self._waiting.remove(sample)
            self._running.append(sample)

    def _has_room(self, sample: Sample, claimed: int) -> bool:
        if len(self._running) >= self._max_running or not self._slots.free_rows:
            return False
        # Besides its own tokens, a slot for the next step of every running sample.
        return not self._running or claimed + sample.pending + len(self._running) + 1 <= self._slots.free

    def _make_room(self) -> bool:
        """Send a running sample of an adapter paused by name back to waiting. Return whether there was one."""
        frozen = [sample for sample in self._running if self.is_paused(sample.adapter) and sample is not self._moving]
        if frozen:
            self._retract(frozen[-1])
        return bool(frozen)

    def _is_held(self, sample: Sample) -> bool:
        return bool(sample.adapter) and (sample.adapter == self._held or self.is_paused(sample.adapter))

    def _share(self) -> list[tuple[Sample, int]]:
        """Return the running samples of the next step, with the number of tokens of each sample."""
        budget = PREFILL_TOKENS
        parts = []
        for sample in self._running:
            count = 0 if sample.comes is not None or self._is_held(sample) else sample.pending
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count:
                parts.append((sample, count))
        return parts

    def _form(self, shares: list[tuple[Sample, int]]) -> Batch:
        batch = Batch([], [], [], [], [], [])
        self._under_way = []
        for sample, count in shares:
            start = len(sample.slots)
            end = start + count
            if not start:
                sample.kv_version = self._version
            offset = len(batch.tokens) - start
            slots = self._slots.take(count)
            batch.rows.append(sample.row)
            batch.starts.append(start)
            batch.lengths.append(count)
            batch.adapters.append(self._adapters.loaded[sample.adapter].number if sample.adapter else WITHOUT)
            batch.tokens.extend(sample.tokens[start:end])
            batch.slots.extend(slots)
            sample.slots.extend(slots)
            first = sample.next_score
            scored = range(0) if first is None else range(first, min(end + 1, sample.prompt_length))
            extends = end == len(sample.tokens) and not sample.complete
            # The logits at a position belong to the next token.
            batch.outputs.extend(offset + position - 1 for position in scored)
            if extends:
                batch.outputs.append(offset + end - 1)
            self._under_way.append(_Part(sample, scored, extends))
        if not any(batch.adapters):
            batch.adapters.clear()
        if not batch.outputs:
            batch.outputs.append(len(batch.tokens) - 1)
        return batch

    def _retract(self, sample: Sample) -> None:
        self._give_up(sample)
        sample.score_anew()
        sample.retractions += 1
        self._waiting.appendleft(sample)

    def _abort(self, rids: Iterable[str], why: str = ABORTED) -> list[Stream]:
        busy_ids = {id(part.sample) for part in self._under_way} | {id(self._moving)}
        streams = []
        for rid in rids:
            samples = self._requests[rid]
            streams.append(samples[0].stream)
            for sample in list(samples):
                if id(sample) in busy_ids:
                    sample.doomed = why
                else:
                    self._end(sample, why)
        return streams

    def _stop_users(self, adapter: str, mode: PauseMode.ValueType) -> list[Stream]:
        if mode == PAUSE_MODE_RETRACT:
            self._retract_users(adapter)
        return self._abort(self._using(adapter)) if mode == PAUSE_MODE_ABORT else []

    def _retract_users(self, adapter: str) -> None:
        for sample in reversed([sample for sample in self._running if sample.adapter == adapter]):
            self._retract(sample)

    def _of(self, stream: Stream) -> list[Sample]:
        """Return the samples of a request that have not ended."""
        return [sample for sample in self._requests.get(stream.rid, ()) if sample.stream is stream]

    def _take(self, sample: Sample, coming: Coming) -> Move | None:
        """Return the move that brings a sample its entries, or None without room or after a refusal."""
        if coming.tokens > self._slots.free:
            return None
        try:
            coming.check(sample.tokens, self._version, self._adapter_version(sample))
        except RlctlError as error:
            self._refuse(sample.stream, error)
            wake([sample.stream])
            return None
        sample.slots = self._slots.take(coming.tokens)
        return Move("take", 0, sample.slots, sample.row, coming.message())

    def _gave(self, sample: Sample, room: Room, segments: Sequence[TensorSegment], error: RlctlError | None) -> None:
        """Offer the given entries or refuse the request. In both cases the slots become free."""
        if error is not None:
            self._lent.discard(room.number)
            self._refuse(sample.stream, error)
            return
        sample.shared = True
        room.offer(sample.tokens, sample.kv_version, self._adapter_version(sample), segments)
        if sample.row >= 0:
            self._give_up(sample)

    def _adapter_version(self, sample: Sample) -> str:
        return self._adapters.loaded[sample.adapter].info.version if sample.adapter else ""

    def _refuse(self, stream: Stream, error: RlctlError) -> None:
        for sample in self._of(stream):
            sample.ended = True
            self._end(sample, "")
        stream.fail(error)

    def _end(self, sample: Sample, aborted: str) -> None:
        """Remove a sample. End its output unless the sample has ended."""
        if not sample.ended:
            sample.end(self._version, aborted=aborted)
        if sample.row >= 0:
            self._give_up(sample)
        elif sample in self._waiting:
            self._waiting.remove(sample)
        if sample.shared and sample.gives is not None and sample.gives.number in self._lent:
            self._lent.remove(sample.gives.number)
            self._over.append(sample.gives.number)
        if sample.comes is not None:
            sample.comes.took()
            sample.comes = None
        samples = self._requests.get(sample.stream.rid, [])
        if sample in samples:
            samples.remove(sample)
            if not samples:
                del self._requests[sample.stream.rid]

    def _give_up(self, sample: Sample) -> None:
        self._running.remove(sample)
        self._slots.give_back(sample.slots, sample.row)
        sample.slots, sample.row = [], -1

"""Generates samples for a trainer without a proxy, over pauses and failures, with the version of each token."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack

from rlctl.contract.errors import (
    Forbidden,
    InvalidRequest,
    NotFound,
    Reason,
    RlctlError,
    Unauthenticated,
    Unsupported,
    without_frames,
)
from rlctl.rollout.continuation import Progress, begin, check_continuable, check_resumable
from rlctl.rollout.dispatch import Attempt, Dispatch, Lines
from rlctl.rollout.forwarding import Forwarding
from rlctl.rollout.picking.admission import Admission, parse
from rlctl.rollout.picking.policies import policy as policy_of
from rlctl.rollout.picking.router import FAULTS, Router, Wanted
from rlctl.rollout.requests import GENERATE_S, Sampling, batch_of, build_request
from rlctl.rollout.running import STOP_S, Metadata, Running, stop
from rlctl.rollout.sample import RolloutFailed, RolloutSample
from rlctl.transport.channel import Credentials, bearer
from rlctl.v1.fleet_pb2 import Model
from rlctl.v1.rollout_pb2 import GenerateRequest, Sample

RETRIES = 4
"""Stage failures that a sample survives. The limit protects the fleet from a sample that fails every stage."""

Prompt = str | Sequence[int]
Resume = Literal["continue", "return"]
_REFUSALS = (Forbidden, InvalidRequest, NotFound, Unauthenticated, Unsupported)


class Asking(Sampling, total=False):
    """Keyword arguments of the :class:`AsyncRollout` methods. ``n`` is the number of samples for each prompt."""

    session_id: str
    adapter: str
    min_version: int
    return_logprob: bool
    top_logprobs_num: int
    engine_fields: Mapping[str, Any]
    timeout_s: float


OnProgress = Callable[[Progress, Sample], None]
"""Called with the progress of a sample and its new output."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Stages to generate a sample at.

    Attributes:
        slot: slot of the stage; "" for any.
        only: require ``slot``; otherwise prefer the slot while its stage may take requests.
        prefill: slot of the preferred prefill stage of a pair.
    """

    slot: str = ""
    only: bool = True
    prefill: str = ""


ANYWHERE = Place()


class _Job(Running):
    def __init__(
        self, sample: RolloutSample, metadata: Metadata, on_progress: OnProgress | None = None, place: Place = ANYWHERE
    ) -> None:
        super().__init__(metadata)
        self.sample = sample
        self.place = place
        self.on_progress = on_progress
        self.progress = Progress(sample)


class AsyncRollout:
    """Generates samples of a model; made by ``fleet.rollout``. For one event loop."""

    def __init__(
        self,
        lines: Lines,
        model: str,
        *,
        policy: str = "least_connections",
        admission: str | Admission = "latest",
        resume: Resume = "continue",
        max_inflight_samples: int | None = None,
        max_cuts: int | None = None,
        retries: int = RETRIES,
        session_idle_s: float = 600.0,
    ) -> None:
        """See :meth:`rlctl.sdk.aio.AsyncFleet.rollout`. Raises FIELD_INVALID."""
        if resume not in ("continue", "return"):
            raise Reason.FIELD_INVALID.error(f"resume is {resume!r}; it must be continue or return", field="resume")
        if max_inflight_samples is not None and max_inflight_samples < 1:
            raise Reason.FIELD_INVALID.error(
                f"max_inflight_samples is {max_inflight_samples}; it must be 1 or more", field="max_inflight_samples"
            )
        for name, value in (("retries", retries), ("max_cuts", max_cuts)):
            if value is not None and value < 0:
                raise Reason.FIELD_INVALID.error(f"{name} is {value}; it must be 0 or more", field=name)
        self.model = model
        self.admission = parse(admission)
        self._resume = resume
        self._max_cuts = math.inf if max_cuts is None else max_cuts
        self._retries = retries
        self._most = max_inflight_samples
        self._places = None if max_inflight_samples is None else asyncio.Semaphore(max_inflight_samples)
        self._lines = lines
        self._router = Router(
            policy_of(policy, session_idle_s=session_idle_s), prefill=policy_of(policy, session_idle_s=session_idle_s)
        )
        self._dispatch = Dispatch(lines, self._router)
        self._named: dict[str, Running] = {}

    @property
    def latest(self) -> int:
        """Sequence of the model's latest version in the fleet view; 0 if unknown."""
        model = self._known
        return 0 if model is None else model.latest.sequence

    @property
    def _known(self) -> Model | None:
        """The model in the fleet view. Without a name: the only model of the fleet."""
        view = self._lines.view
        if self.model:
            return view.model(self.model)
        return view.models[0] if len(view.models) == 1 else None

    async def generate(self, prompt: Prompt, **asking: Unpack[Asking]) -> list[RolloutSample]:
        """Return the ``n`` samples of a prompt, in order. Each sample is its own request, at any stage.

        ``prompt`` is text or token ids. ``min_version`` is a least sequence, in addition to the admission.
        ``session_id`` keeps the turns of a conversation at one stage (policy consistent_hashing); without it each
        sample has its own session. ``return_logprob`` is true by default. Waits for a stage at most ``timeout_s`` (600
        s), also during an update.

        Raises a stage's refusal of the request. Raises the error that cut a sample, unless resume="return": the cut
        samples are then returned, with their ``error``. If any sample has tokens, the error is a
        :class:`rlctl.rollout.sample.RolloutFailed` with all samples.
        """
        return (await self.generate_batch([prompt], **asking))[0]

    async def generate_batch(self, prompts: Iterable[Prompt], **asking: Unpack[Asking]) -> list[list[RolloutSample]]:
        """Run :meth:`generate` for every prompt concurrently. Return the samples in the order of the prompts."""
        timeout_s = asking.get("timeout_s", GENERATE_S)
        prompts = batch_of(prompts)
        jobs = self._jobs(prompts, asking)
        samples = await self._run_all(jobs, timeout_s)
        self._refuse_failed(samples)
        n = len(samples) // max(len(prompts), 1)
        return [samples[start : start + n] for start in range(0, len(samples), n or 1)]

    async def resume(
        self, samples: Iterable[RolloutSample], *, timeout_s: float = GENERATE_S, min_version: int = 0
    ) -> list[RolloutSample]:
        """Continue cut samples from their tokens. Finished samples are returned as they are.

        Raises as :meth:`generate`, and UNSUPPORTED for samples that cannot continue.
        """
        samples = list(samples)
        jobs = [self._again(sample, min_version) for sample in samples if not sample.finished]
        done = iter(await self._run_all(jobs, timeout_s))
        results = [sample if sample.finished else next(done) for sample in samples]
        self._refuse_failed(results)
        return results

    async def generate_until(
        self, count: int, prompts: Iterable[Prompt | RolloutSample], **asking: Unpack[Asking]
    ) -> tuple[list[RolloutSample], list[RolloutSample]]:
        """Generate until ``count`` samples have finished, then stop the others. Return (finished, rest).

        ``prompts`` may contain samples of earlier calls. Cut samples continue; finished samples count and are returned
        as they are. The rest keep tokens, log probabilities and versions, and some may have no tokens. :meth:`resume`
        continues the rest. More than ``count`` may have finished. No step waits for the longest samples. Source: Zhou
        et al., "APRIL: Active Partial Rollouts in Reinforcement Learning", 2025.

        Raises as :meth:`resume`. Fewer than ``count`` finished samples raise the cause, as RolloutFailed if any sample
        has tokens.
        """
        timeout_s = asking.get("timeout_s", GENERATE_S)
        prompts = batch_of(prompts)
        fresh = [prompt for prompt in prompts if not isinstance(prompt, RolloutSample)]
        earlier_samples = [sample for sample in prompts if isinstance(sample, RolloutSample)]
        finished_samples = [sample for sample in earlier_samples if sample.finished]
        cut_samples = [sample for sample in earlier_samples if not sample.finished]
        jobs = [self._again(sample, asking.get("min_version", 0)) for sample in cut_samples] + self._jobs(fresh, asking)
        most = len(finished_samples) + len(jobs)
        if not 1 <= count <= most:
            raise Reason.FIELD_INVALID.error(f"count is {count}; it must be from 1 to {most}", field="count")
        tasks = {asyncio.create_task(self._run(job, _deadline(timeout_s), timeout_s)): job for job in jobs}
        running = set(tasks)
        try:
            finished = len(finished_samples)
            while running and finished < count:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    finished += task.result().finished
                if any(_refused(task.result()) for task in done):
                    break
            await stop([tasks[task] for task in running])
            if running:
                await asyncio.wait(running, timeout=STOP_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        samples = finished_samples + [
            job.progress.result(self.latest) if task.cancelled() else task.result() for task, job in tasks.items()
        ]
        ended = [sample for sample in samples if sample.finished]
        rest = [sample for sample in samples if not sample.finished]
        refusal = next((sample.error for sample in rest if _refused(sample)), None)
        if refusal is not None or len(ended) < count:
            cause = refusal or next((sample.error for sample in rest if sample.error), None)
            raise _failed(cause or Reason.CANCELLED.error("the samples were aborted"), samples)
        return ended, rest

    async def complete(
        self,
        sample: RolloutSample,
        *,
        timeout_s: float = GENERATE_S,
        credentials: Credentials = None,
        place: Place = ANYWHERE,
        told: OnProgress | None = None,
    ) -> RolloutSample:
        """Generate a sample of :func:`rlctl.rollout.continuation.begin` to its end, and return the sample.

        An error that cuts the sample is not raised: the sample has it as ``error``.

        For a gateway: ``credentials`` are the caller's, and ``told`` gets new output at once. The first request to a
        stage has the sample's own ``rid``, if set. Cancellation ends the sample at the engine. Raises RID_IN_USE.
        """
        job = _Job(sample, bearer(credentials), told, place)
        with self._naming(sample.request.rid, job):
            return await self._run(job, _deadline(timeout_s), timeout_s)

    @contextlib.contextmanager
    def forwarding(
        self,
        *,
        adapter: str = "",
        rid: str = "",
        session_id: str = "",
        min_version: int = 0,
        timeout_s: float = GENERATE_S,
        credentials: Credentials = None,
        place: Place = ANYWHERE,
    ) -> Iterator[Forwarding]:
        """Manage a request that the caller sends to stages itself, in the engines' own form.

        Samples and forwarded requests share load, stage failures, sessions and request ids. A request without
        ``session_id`` has its own session for its duration. Raises RID_IN_USE.
        """
        session = session_id or secrets.token_hex(16)

        def wanting() -> Wanted:
            return self._wanting(adapter, min_version, session, place)

        forwarding = Forwarding(
            self._dispatch,
            wanting,
            bearer(credentials),
            rid=rid,
            deadline=_deadline(timeout_s),
            timeout_s=timeout_s,
            retries=self._retries,
        )
        with self._naming(rid, forwarding):
            try:
                yield forwarding
            finally:
                if not session_id:
                    self._router.finish(session)

    @contextlib.contextmanager
    def _naming(self, rid: str, request: Running) -> Iterator[None]:
        """Register the request under its id while it runs; "" is not registered. Raises RID_IN_USE."""
        if rid in self._named:
            raise Reason.RID_IN_USE.error(f"Duplicate request ID: {rid!r} is running", field="rid")
        if rid:
            self._named[rid] = request
        try:
            yield
        finally:
            if rid:
                del self._named[rid]

    @property
    def data_routes(self) -> frozenset[str]:
        """Routes such as "POST /generate" that every stage's data port has; empty if stages form pairs."""
        return self._router.candidates(self._lines.view.stages, self.model).data_routes

    @property
    def placed(self) -> int:
        """Number of samples and forwarded requests at stages. Each counts twice at a pair of stages."""
        return self._router.load.total()

    def inflight_at(self, slot: str) -> int:
        """Return the number of samples and forwarded requests at a stage."""
        return self._router.load[slot]

    async def stop(self, rids: Sequence[str]) -> list[str]:
        """Stop samples of :meth:`complete` and requests of :meth:`forwarding`. Return the ids that ran here.

        Stopped samples are returned as cut.
        """
        own_rids = [rid for rid in rids if rid in self._named]
        await stop([self._named[rid] for rid in own_rids])
        return own_rids

    async def finish_session(self, session_id: str) -> None:
        """End a session. Otherwise a session ends after ``session_idle_s`` without requests."""
        self._router.finish(session_id)

    # One sample.

    def _jobs(self, prompts: Sequence[Prompt], asking: Asking) -> list[_Job]:
        settings: dict[str, Any] = dict(asking)
        settings.pop("timeout_s", None)
        n, session = settings.pop("n", 1), settings.pop("session_id", "")
        if n < 1:
            raise Reason.FIELD_INVALID.error(f"n is {n}; it must be 1 or more", field="sampling_params.n")
        fields = {
            "model": self.model,
            "adapter": settings.pop("adapter", ""),
            "min_version_seq": settings.pop("min_version", 0),
            "return_logprob": settings.pop("return_logprob", True),
            "top_logprobs_num": settings.pop("top_logprobs_num", 0),
            "engine_fields": settings.pop("engine_fields", None),
        }
        jobs: list[_Job] = []
        for number, prompt in enumerate(prompts):
            request, group = build_request(prompt, settings, **fields), secrets.token_hex(16)
            if self._resume == "continue":
                check_continuable(request.sampling_params)
            samples = (begin(request, prompt=number, index=i, group=group, session_id=session) for i in range(n))
            jobs += (_Job(sample, self._lines.metadata) for sample in samples)
        return jobs

    def _again(self, sample: RolloutSample, min_version: int) -> _Job:
        if sample.whole.output_ids:
            check_resumable(sample.request.sampling_params, sample.prompt_ids)
        request = GenerateRequest()
        request.CopyFrom(sample.request)
        request.min_version_seq = max(request.min_version_seq, min_version)
        return _Job(dataclasses.replace(sample, request=request, error=None), self._lines.metadata)

    async def _run_all(self, jobs: Sequence[_Job], timeout_s: float) -> list[RolloutSample]:
        deadline = _deadline(timeout_s)
        if len(jobs) == 1:  # no task needed
            return [await self._run(jobs[0], deadline, timeout_s)]
        return await asyncio.gather(*(self._run(job, deadline, timeout_s) for job in jobs))

    async def _run(self, job: _Job, deadline: float, timeout_s: float) -> RolloutSample:
        """Return the sample at its end, with the error that cut it."""
        error: RlctlError | None = None
        placed: bool | None = False
        try:
            if self._places is not None or not self._lines.view.is_known:
                placed = await job.wait(self._place(deadline, timeout_s))
            error = await self._attempts(job, deadline, timeout_s)
        except RlctlError as failure:
            error = without_frames(failure)
        finally:
            if placed and self._places is not None:
                self._places.release()
            if job.sample.own_session:
                self._router.finish(job.sample.session_id)
        return job.progress.result(self.latest, error)

    async def _place(self, deadline: float, timeout_s: float) -> bool:
        """Wait for the fleet view, and for a place within ``max_inflight_samples`` if set.

        Returns True if a place was taken.
        """
        cause = "the coordinator sent no view of the fleet"
        try:
            async with asyncio.timeout_at(deadline):
                await self._lines.view.reported()
                cause = f"there was no place among max_inflight_samples={self._most}"
                return self._places is not None and await self._places.acquire()
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error(f"{cause} within {timeout_s:g} s") from None

    async def _attempts(self, job: _Job, deadline: float, timeout_s: float) -> RlctlError | None:
        """Send requests until the sample has ended or may not be repeated. Return the final failure."""
        progress, faults, cuts = job.progress, 0, 0
        failure: RlctlError | None = None
        while not job.stopped:
            next_attempt = self._dispatch.at_once(self._wanted(job), deadline) or await job.wait(
                self._dispatch.attempt(lambda: self._wanted(job), deadline, timeout_s)
            )
            if next_attempt is None:
                return None
            with next_attempt as attempt:
                if job.stopped:  # at the moment that the stage was found
                    return None
                tokens_before = progress.tokens
                try:
                    request = progress.attempt(attempt.floor)
                except Unsupported:
                    if failure is None:
                        raise
                    return failure
                failure = None if progress.finished else await self._stream(job, attempt, request, deadline)
                if progress.finished or job.stopped:
                    return None
                if failure is None and progress.ended:
                    cuts += 1
                    if self._resume == "return" or cuts > self._max_cuts:
                        return None
                    if progress.tokens == tokens_before:
                        attempt.failed(
                            Reason.STAGE_NOT_SERVING.error("the stage aborted the request without producing tokens")
                        )
                    continue
                failure = failure or Reason.ENGINE_FAILED.error("the stream ended before the sample")
                if progress.full(failure):
                    return None
                if not attempt.failed(failure):
                    return failure
                faults += failure.reason in FAULTS
                if faults > self._retries:
                    return await attempt.explained(failure)
        return None

    def _wanted(self, job: _Job) -> Wanted:
        request = job.sample.request
        return self._wanting(request.adapter, request.min_version_seq, job.sample.session_id, job.place)

    def _wanting(self, adapter: str, min_version: int, session: str, place: Place) -> Wanted:
        return Wanted(
            self.model,
            adapter=adapter,
            slot=place.slot if place.only else "",
            preferred="" if place.only else place.slot,
            floor=self.admission.floor(self._known, min_version),
            session=session,
            prefill=place.prefill,
        )

    async def _stream(
        self, job: _Job, attempt: Attempt, request: GenerateRequest, deadline: float
    ) -> RlctlError | None:
        """Add the output of a stage. Return the error that interrupted the stream, or None."""
        job.running = attempt.line, request.rid
        try:
            async with contextlib.aclosing(attempt.stream(request, deadline, job.metadata)) as parts:
                async for response in parts:
                    attempt.answered()
                    job.progress.take(response)
                    if job.on_progress is not None:
                        for part in response.samples:
                            job.on_progress(job.progress, part)
                    if job.progress.finished and not any(s.HasField("finish_reason") for s in response.samples):
                        return None  # a stop string across the cut, unknown to the engine
        except RlctlError as error:
            return without_frames(error)
        finally:
            job.running = None
        return None

    def _refuse_failed(self, samples: Sequence[RolloutSample]) -> None:
        """Raise a refused request's error and, unless resume="return", an error that cut a sample."""
        cause = next((sample.error for sample in samples if _refused(sample)), None)
        if cause is None and self._resume == "continue":
            cause = next((sample.error for sample in samples if sample.error is not None), None)
        if cause is not None:
            raise _failed(cause, samples)


def _failed(cause: RlctlError, samples: Sequence[RolloutSample]) -> RlctlError:
    """Return the cause, or RolloutFailed with the samples if any sample has tokens."""
    return RolloutFailed(cause, samples) if any(sample.output_ids for sample in samples) else cause


def _refused(sample: RolloutSample) -> bool:
    """Return whether the request itself was refused."""
    return isinstance(sample.error, _REFUSALS) and not sample.output_ids


def _deadline(timeout_s: float) -> float:
    return asyncio.get_running_loop().time() + timeout_s

"""The SDK for asyncio. :mod:`rlctl.sdk.blocking` has the same methods for blocking code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack

from rlctl.client.admin import AsyncAdmin
from rlctl.client.connection import Connection
from rlctl.contract.errors import Reason
from rlctl.rollout.dispatch import Lines
from rlctl.rollout.picking.admission import Admission
from rlctl.rollout.requests import GENERATE_S, Generator, Sampling, batch_of, build_request
from rlctl.rollout.rollout import AsyncRollout, Resume
from rlctl.runtime.addresses import refuse_unreachable
from rlctl.sdk.sglang_names import AsyncEngine
from rlctl.transport.auth import load_token
from rlctl.transport.channel import Credentials
from rlctl.transport.tls.credentials import Tls, load_tls
from rlctl.v1.fleet_pb2 import Model, Stage
from rlctl.v1.rollout_pb2 import GenerateRequest, GenerateResponse

if TYPE_CHECKING:
    from rlctl.trainer.publisher import AsyncPublisher

CONNECT_S = 10.0


class Generating(Sampling, total=False):
    """The arguments of :meth:`AsyncFleet.generate` beside the prompt."""

    model: str
    adapter: str
    rid: str
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    min_version_seq: int
    engine_fields: Mapping[str, Any]
    return_engine_meta: bool
    slot: str
    timeout_s: float


_REQUEST_FIELDS = Generating.__annotations__.keys() - Sampling.__annotations__.keys()


class Rollouts(TypedDict, total=False):
    """The settings of :meth:`AsyncFleet.rollout`."""

    policy: str
    admission: str | Admission
    resume: Resume
    max_inflight_samples: int | None
    max_cuts: int | None
    retries: int
    session_idle_s: float


async def connect(
    address: str,
    *,
    token: str | None = None,
    tls: Tls | Literal[False] | None = None,
    timeout_s: float = CONNECT_S,
    client: str = "sdk",
) -> AsyncFleet:
    """Connect to a coordinator at ``host:port`` or ``unix:PATH``.

    The token is the argument, else RLCTL_TOKEN_FILE, else RLCTL_TOKEN, else none. ``tls``: by default the files in
    RLCTL_TLS_CA, RLCTL_TLS_CERT and RLCTL_TLS_KEY, plain text without them; False: plain text. ``client``: name of the
    program, recorded in operations. Raises UNREACHABLE, TLS_FAILED, TLS_INVALID; FIELD_INVALID for any other form of
    address.
    """
    refuse_unreachable(address)
    tls = load_tls() if tls is None else tls or None
    connection = Connection(address, token if token is not None else load_token(), tls, client=client)
    try:
        await connection.ready(timeout_s)
        return AsyncFleet(connection)
    except BaseException:
        await connection.close()
        raise


class AsyncFleet(AsyncAdmin):
    """A fleet: admin verbs (:class:`rlctl.client.admin.AsyncAdmin`), generation, and publishers of weights."""

    def __init__(self, connection: Connection, lines: Lines | None = None) -> None:
        """``lines``: the lines of another fleet object, for shared use."""
        super().__init__(connection)
        self._lines = lines or Lines(connection)
        self._generator = Generator(self._lines)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def on_behalf_of(self, credentials: Credentials) -> AsyncFleet:
        """Return the same fleet with the credentials of a different caller. Do not close the returned object."""
        if (credentials or None) == (self.connection.credentials or None):
            return self
        return AsyncFleet(self.connection.on_behalf_of(credentials), self._lines.on_behalf_of(credentials))

    async def close(self) -> None:
        """Wait up to 10 s for updates in commit, then close the connection."""
        await self.committed()
        await self._lines.close()
        await self.connection.close()

    def publisher(self, model: str, **settings: Any) -> AsyncPublisher:
        """Return the publisher of a model for this process; see :class:`rlctl.trainer.publisher.AsyncPublisher`."""
        from rlctl.trainer.publisher import AsyncPublisher  # loads torch

        return AsyncPublisher(self, model, **settings)

    async def engine(self, slot: str) -> AsyncEngine:
        """Return an engine with the method names of SGLang's own API. Raises STAGE_NOT_FOUND."""
        for stage in (await self.status()).stages:
            if stage.registration.slot == slot:
                return AsyncEngine(self, self._generator, slot, stage.registration.model)
        raise Reason.STAGE_NOT_FOUND.error(f"there is no stage {slot!r}", field="slot")

    async def models(self, timeout_s: float = CONNECT_S) -> list[Model]:
        """Return the models by name, as last reported by the coordinator. Raises DEADLINE_EXCEEDED."""
        await self._fleet_known(timeout_s)
        return self._lines.view.models

    async def stages(self, timeout_s: float = CONNECT_S) -> list[Stage]:
        """Return the stages by slot, as last reported by the coordinator. Raises DEADLINE_EXCEEDED."""
        await self._fleet_known(timeout_s)
        return list(self._lines.view.stages)

    async def _fleet_known(self, timeout_s: float) -> None:
        if self._lines.view.is_known:
            self._lines.view.check()
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._lines.view.reported()
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error(
                f"the coordinator has not reported the fleet within {timeout_s:g} s"
            ) from None

    # Generation.

    def rollout(self, model: str, **settings: Unpack[Rollouts]) -> AsyncRollout:
        """Return a rollout, for samples of a model across pauses, updates and failures.

        ``policy``: least_connections (default), round_robin, or consistent_hashing, which keeps a session at a stage
        and drops it after ``session_idle_s`` (600). ``admission``: the versions at which tokens may be generated:
        latest (default), max_staleness=VERSIONS, any. ``resume``: a sample that a pause or an abort cuts continues at
        any admitted stage (continue, default), or is returned (return). ``max_inflight_samples``: limit of samples at a
        time, over all calls. ``max_cuts``: pauses and aborts after which a sample continues (None: no limit).
        ``retries``: stage failures that a sample survives (4). Raises FIELD_INVALID.
        """
        return AsyncRollout(self._lines, model, **settings)

    async def generate(self, prompt: str | Sequence[int], **settings: Unpack[Generating]) -> GenerateResponse:
        """Generate on a routable stage.

        ``prompt`` is text or token ids. ``settings``: see :class:`Generating`, with the fields of SamplingParams:
        max_new_tokens, n, stop, ... ``adapter`` is a LoRA adapter of the model. ``engine_fields``: further fields of
        the engine, in its names. ``return_engine_meta``: return the engine's own data about each sample. ``slot``: at
        this stage only. Raises MODEL_NOT_FOUND, ADAPTER_NOT_FOUND, and NO_ROUTABLE_STAGE if no stage accepts the
        request within ``timeout_s``.
        """
        request, timeout_s, slot = _request(prompt, settings)
        return await self._generator.generate(request, timeout_s, slot=slot)

    async def generate_batch(
        self, prompts: Iterable[str | Sequence[int]], **settings: Unpack[Generating]
    ) -> list[GenerateResponse]:
        """Call :meth:`generate` for all prompts concurrently. Returns the results in the order of the prompts.

        The first failure cancels the rest and is raised after their end. With a ``seed``, prompt i gets ``seed + i``:
        equal prompts are sampled independently, and the batch is repeatable.
        """
        prompts = batch_of(prompts)
        requests: list[Generating] = [settings.copy() for _ in prompts]
        for index, request in enumerate(requests):
            if request.get("seed") is not None:
                request["seed"] += index
        try:
            async with asyncio.TaskGroup() as group:
                calls = zip(prompts, requests, strict=True)
                tasks = [group.create_task(self.generate(prompt, **request)) for prompt, request in calls]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def generate_stream(
        self, prompt: str | Sequence[int], **settings: Unpack[Generating]
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Generate as :meth:`generate`, and yield new output on arrival."""
        request, timeout_s, slot = _request(prompt, settings)
        async for response in self._generator.stream(request, timeout_s, slot=slot):
            yield response


def _request(prompt: str | Sequence[int], settings: Generating) -> tuple[GenerateRequest, float, str]:
    """Return (request, time limit, slot)."""
    values: dict[str, Any] = {**settings}
    timeout_s, slot = values.pop("timeout_s", GENERATE_S), values.pop("slot", "")
    fields = {name: values.pop(name) for name in _REQUEST_FIELDS & values.keys()}
    return build_request(prompt, values, **fields), timeout_s, slot

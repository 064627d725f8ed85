"""Generation behind the routes: samples through a rollout of the SDK, each with the token of its caller."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.sampling import MOST_SAMPLES
from rlctl.gateway.backend.data_ports import DataPorts
from rlctl.gateway.backend.generation_spans import generating, note_sample
from rlctl.gateway.backend.tokenizers import Tokenizers
from rlctl.rollout.picking.admission import Admission
from rlctl.rollout.rollout import ANYWHERE, AsyncRollout, Place, Resume, Told
from rlctl.rollout.sample import RolloutSample
from rlctl.sdk.aio import AsyncFleet
from rlctl.transport.channel import Credentials, refuse_large
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.rollout_pb2 import GenerateRequest

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

MOST_BYTES = 256 << 20
"""Of one call's samples together, as they are sent: of as many as may be under way, each with 10,000 tokens of prompt.
Here they take some ten times as much.
"""

MOST_INFLIGHT_BYTES = 1 << 30
"""Of all samples under way, as they are sent: of as many as may be under way, each with 40,000 tokens of prompt."""


DEFAULT = "default"
"""Model name of clients without a configured model: SkyRL's, Omni's and OpenAI's clients send it."""


@dataclass(frozen=True)
class Settings:
    """How the gateway generates.

    Attributes:
        model: for requests that name none; "": the fleet's only one.
        policy: see :meth:`rlctl.sdk.aio.AsyncFleet.rollout`, as for admission, retries and session_idle_s.
        resume: "return" gives a sample that a pause or an abort cuts to the caller, as engines do; "continue" goes on.
        timeout_s: how long a request may take, waiting for a stage included; a forwarded one, until its answer begins.
        max_cuts: cuts that a sample goes on from, with resume="continue"; None: any number.
        admin_api_key: SGLang-Omni's dialect: what admin requests must bring, beside being let in by the coordinator.
        tokenizer: directory of the models' tokenizer, instead of their checkpoints.
        max_inflight: most samples and forwarded requests that are under way here at a time; more are refused.
    """

    model: str = ""
    policy: str = "consistent_hashing"
    admission: str | Admission = "latest"
    resume: Resume = "return"
    max_cuts: int | None = None
    retries: int = 4
    session_idle_s: float = 600.0
    timeout_s: float = 600.0
    max_inflight: int = 8192
    admin_api_key: str = field(default="", repr=False)
    tokenizer: str = ""


class Generation:
    """Generates with the models of one fleet. On one event loop.

    Attributes:
        fleet: the fleet, with the gateway's own token.
        settings: as given.
        tokenizers: of its models.
        ports: the client of the data ports of stages.
        inflight: samples and forwarded requests under way.
        inflight_bytes: of their requests.
        tracer: makes spans of samples and forwarded requests; None: there are none.
        any_model: OpenAI's ``model`` may be any text where it can mean one model only.
    """

    def __init__(self, fleet: AsyncFleet, settings: Settings | None = None) -> None:
        self.fleet = fleet
        self.settings = settings or Settings()
        self.tokenizers = Tokenizers(fleet, self.settings.tokenizer)
        self.ports = DataPorts(fleet.connection.tls)
        self.inflight = self.inflight_bytes = 0
        self.any_model = False
        self.tracer: Tracer | None = None
        self._rollouts: dict[str, AsyncRollout] = {}

    def with_settings(self, settings: Settings) -> Generation:
        """Generates otherwise, with the same models, tokenizers and connections to stages."""
        other = self._like(settings)
        other.tokenizers, other.ports, other.any_model = self.tokenizers, self.ports, self.any_model
        other.tracer = self.tracer
        return other

    def _like(self, settings: Settings) -> Generation:
        return Generation(self.fleet, settings)

    async def model(self, named: str = "") -> str:
        """The model of a request. Beside its name, a model is named by the path of a checkpoint that its engines hold
        or were started with, and by :data:`DEFAULT` if the gateway serves only one model.

        Raises MODEL_NOT_FOUND, and FIELD_REQUIRED for an ambiguous name.
        """
        name = named or self.settings.model
        known = [model.name for model in await self.fleet.models()]
        if name in known:
            return name
        if name and name != DEFAULT:
            return await self._of_checkpoint(name, known)
        if name and self.settings.model in known:
            return self.settings.model
        if len(known) != 1:
            raise Reason.FIELD_REQUIRED.error(
                f"name one of the models: {_listed(known)}",
                field="model",
                next_step="Or start the gateway with --model.",
            )
        return known[0]

    async def _of_checkpoint(self, path: str, known: Sequence[str]) -> str:
        paths = {(model.name, model.checkpoint) for model in await self.fleet.models()}
        for stage in await self.fleet.stages():
            model, started = stage.registration.model, stage.registration.checkpoint
            paths |= {(model, started), (model, stage.report.checkpoint)}
        owners = {model for model, held in paths if model in known and _same_path(held, path)}
        if self.settings.model in owners:
            return self.settings.model
        if len(owners) > 1:
            raise Reason.FIELD_INVALID.error(f"{path!r} is the checkpoint of {_listed(sorted(owners))}", field="model")
        if not owners:
            raise Reason.MODEL_NOT_FOUND.error(f"there is no model {path!r}, but {_listed(known)}", field="model")
        return owners.pop()

    async def named(self, name: str = "", *, checked: bool = False) -> tuple[str, str]:
        """The model and the adapter that an OpenAI client's ``model`` means: a model, an adapter of one, or
        "MODEL:ADAPTER". ``checked``: also where :attr:`any_model` is true. Raises as :meth:`model`.
        """
        known = {model.name: {adapter.name for adapter in model.adapters} for model in await self.fleet.models()}
        base, _, adapter = name.partition(":")
        holders = [model for model, adapters in known.items() if name in adapters]
        if name in known or not name:
            return await self.model(name), ""
        if adapter in known.get(base, ()):
            return base, adapter
        if len(holders) > 1 and self.settings.model in holders:
            return self.settings.model, name
        if len(holders) == 1:
            return holders[0], name
        try:
            return await self.model(name), ""
        except RlctlError as error:
            only = self.settings.model or next(iter(known), "")
            # With adapters or several models, an unknown name may be a misspelled one.
            ambiguous = adapter or known.get(only) or (len(known) > 1 and not self.settings.model)
            if error.reason is not Reason.MODEL_NOT_FOUND or ambiguous or checked or not self.any_model:
                raise
            return await self.model(), ""

    def check_samples(self, wanted: Sequence[int], n: str, prompts: str) -> None:
        """Raise FIELD_INVALID for a call with more samples of its prompts than can ever be under way together, before
        they are made. ``n`` and ``prompts`` are the fields that say how many.
        """
        for count in wanted:
            if not 1 <= count <= MOST_SAMPLES:
                raise Reason.FIELD_INVALID.error(f"n is {count}; it must be from 1 to {MOST_SAMPLES}", field=n)
        self.check_count(sum(wanted), n if max(wanted) > 1 else prompts)

    def check_count(self, samples: int, field: str) -> None:
        """Raise FIELD_INVALID for more samples than can ever be under way together."""
        if samples > self.settings.max_inflight:
            raise Reason.FIELD_INVALID.error(
                f"{samples} samples are more than may be under way in this gateway, {self.settings.max_inflight}",
                field=field,
            )

    @staticmethod
    def check_bytes(size: int, together: int) -> None:
        """Raise MESSAGE_TOO_LARGE for a request that no stage takes, and for a call whose samples' requests are
        together larger than is taken: each of them has the prompt, and what else it is asked with.
        """
        refuse_large(GenerateRequest.DESCRIPTOR.name, size)
        if together > MOST_BYTES:
            raise Reason.MESSAGE_TOO_LARGE.error(
                f"the requests for its samples have {together} bytes or more together; {MOST_BYTES} are taken",
                field="body",
                next_step="Ask for fewer at a time.",
            )

    def rollout(self, model: str) -> AsyncRollout:
        """What generates with a model."""
        if model not in self._rollouts:
            settings = self.settings
            self._rollouts[model] = self.fleet.rollout(
                model,
                policy=settings.policy,
                admission=settings.admission,
                resume=settings.resume,
                max_cuts=settings.max_cuts,
                retries=settings.retries,
                session_idle_s=settings.session_idle_s,
            )
        return self._rollouts[model]

    async def complete(
        self, sample: RolloutSample, *, credentials: Credentials, place: Place = ANYWHERE, told: Told | None = None
    ) -> RolloutSample:
        """One sample, whose request names its model, to its end, or to where it was cut.

        Raises what it failed with, unless it has tokens: those are not lost; and TOO_MANY_REQUESTS.
        """
        model = sample.request.model
        with self.under_way(sample.request.ByteSize()), generating(self.tracer, model) as span:
            ended = await self.rollout(model).complete(
                sample, timeout_s=self.settings.timeout_s, credentials=credentials, place=place, told=told
            )
            if span is not None:
                stages: list[Stage] = []
                with contextlib.suppress(RlctlError):  # the sample is complete without them
                    stages = await self.fleet.stages(timeout_s=0.0)
                note_sample(span, ended, stages)
        if ended.error is not None and not ended.output_ids:
            if ended.error.reason is Reason.PROMPT_TOO_LONG:
                ended.error.field = ended.error.field or str(sample.request.WhichOneof("prompt"))
            raise ended.error
        return ended

    @contextlib.contextmanager
    def under_way(self, size: int) -> Iterator[None]:
        """Count a sample, or a forwarded request, of these bytes. Raises TOO_MANY_REQUESTS."""
        if self.inflight >= self.settings.max_inflight:
            raise Reason.TOO_MANY_REQUESTS.error(f"{self.inflight} samples are under way in this gateway")
        if self.inflight_bytes + size > MOST_INFLIGHT_BYTES:
            raise Reason.TOO_MANY_REQUESTS.error(
                f"the requests of the samples under way in this gateway have {self.inflight_bytes} bytes, this one has "
                f"{size}; {MOST_INFLIGHT_BYTES} are taken at a time"
            )
        self.inflight += 1
        self.inflight_bytes += size
        try:
            yield
        finally:
            self.inflight -= 1
            self.inflight_bytes -= size

    @property
    def placed(self) -> int:
        """Samples and forwarded requests from here that a stage has; a pair of stages counts twice."""
        return sum(rollout.placed for rollout in self._rollouts.values())

    def inflight_at(self, slot: str) -> int:
        """Samples under way from here at a stage."""
        return sum(rollout.inflight_at(slot) for rollout in self._rollouts.values())

    async def stop(self, rids: Sequence[str]) -> list[str]:
        """End samples and forwarded requests by their rids; returns those that ran here."""
        stopped = await asyncio.gather(*(rollout.stop(rids) for rollout in self._rollouts.values()))
        return [rid for each in stopped for rid in each]

    async def finish_session(self, session_id: str) -> None:
        """The session sends nothing more."""
        for rollout in self._rollouts.values():
            await rollout.finish_session(session_id)


def _same_path(one: str, other: str) -> bool:
    return bool(one) and os.path.normpath(one) == os.path.normpath(other)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"

"""Generation behind the routes: samples through a rollout of the SDK, each with its caller's token."""

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
from rlctl.rollout.rollout import ANYWHERE, AsyncRollout, OnProgress, Place, Resume
from rlctl.rollout.sample import RolloutSample
from rlctl.sdk.aio import AsyncFleet
from rlctl.transport.channel import Credentials, refuse_large
from rlctl.transport.denials import Denials
from rlctl.transport.quotas import Quotas
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.rollout_pb2 import GenerateRequest

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

MOST_BYTES = 256 << 20
"""Limit for the encoded requests of a call's samples together.

Enough for the default ``max_inflight`` samples with prompts of 10,000 tokens. In memory these take about ten times as
much.
"""

MOST_INFLIGHT_BYTES = 1 << 30
"""Limit for the encoded requests of all samples under way.

Enough for the default ``max_inflight`` samples with prompts of 40,000 tokens.
"""


DEFAULT = "default"
"""Model name of clients without a configured model: clients of SkyRL, Omni and OpenAI send this name."""


@dataclass(frozen=True)
class Settings:
    """Settings of generation in a gateway.

    Attributes:
        model: default model; "" for the fleet's only model.
        policy: see :meth:`rlctl.sdk.aio.AsyncFleet.rollout`, also for admission, retries and session_idle_s.
        resume: "return" returns a sample cut by a pause or an abort, as engines do; "continue" continues the sample.
        timeout_s: time limit of a request, including the wait for a stage; for a forwarded request, until its response
            begins.
        max_cuts: number of cuts after which a sample still continues, with resume="continue"; None for any number.
        admin_api_key: for SGLang-Omni's dialect: key of admin requests, in addition to the coordinator's access check.
        tokenizer: directory of the models' tokenizer, instead of the checkpoints.
        max_inflight: most samples and forwarded requests under way at a time; further requests are refused.
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
    """Generates with the models of a fleet. On one event loop.

    Attributes:
        fleet: the fleet, with the gateway's own token.
        ports: client of the data ports of stages.
        inflight: samples and forwarded requests under way.
        inflight_bytes: size of the requests under way.
        quotas: quotas of the callers, in samples and forwarded requests.
        tracer: makes spans of samples and forwarded requests, if set.
        any_model: accept any text as OpenAI's ``model`` if only one model can be meant.
    """

    def __init__(self, fleet: AsyncFleet, settings: Settings | None = None) -> None:
        self.fleet = fleet
        self.settings = settings or Settings()
        self.tokenizers = Tokenizers(fleet, self.settings.tokenizer, self.settings.timeout_s)
        self.ports = DataPorts(fleet.connection.tls)
        self.inflight = self.inflight_bytes = 0
        self.any_model = False
        self.tracer: Tracer | None = None
        self.quotas = Quotas(Denials())
        self._rollouts: dict[str, AsyncRollout] = {}

    def with_settings(self, settings: Settings) -> Generation:
        """Return a generation with other settings and the same fleet, tokenizers and connections to stages."""
        generation = self._like(settings)
        generation.tokenizers, generation.ports, generation.any_model = self.tokenizers, self.ports, self.any_model
        generation.tracer, generation.quotas = self.tracer, self.quotas
        return generation

    def _like(self, settings: Settings) -> Generation:
        return Generation(self.fleet, settings)

    async def model(self, named: str = "") -> str:
        """Return the model of a request.

        A model also has the names of checkpoints that its engines hold or were started with. :data:`DEFAULT` names the
        configured model or the fleet's only model.

        Raises MODEL_NOT_FOUND, FIELD_REQUIRED without a name if the fleet has several models, and FIELD_INVALID for a
        checkpoint of several models.
        """
        name = named or self.settings.model
        names = [model.name for model in await self.fleet.models()]
        if name in names:
            return name
        if name and name != DEFAULT:
            return await self._of_checkpoint(name, names)
        if name and self.settings.model in names:
            return self.settings.model
        if len(names) != 1:
            raise Reason.FIELD_REQUIRED.error(
                f"model is required; models of the fleet: {_listed(names)}",
                field="model",
                next_step="Name a model, or start the gateway with --model.",
            )
        return names[0]

    async def _of_checkpoint(self, path: str, model_names: Sequence[str]) -> str:
        paths = {(model.name, model.checkpoint) for model in await self.fleet.models()}
        for stage in await self.fleet.stages():
            model, started = stage.registration.model, stage.registration.checkpoint
            paths |= {(model, started), (model, stage.report.checkpoint)}
        owners = {model for model, checkpoint in paths if model in model_names and _same_path(checkpoint, path)}
        if self.settings.model in owners:
            return self.settings.model
        if len(owners) > 1:
            raise Reason.FIELD_INVALID.error(f"{path!r} is the checkpoint of {_listed(sorted(owners))}", field="model")
        if not owners:
            raise Reason.MODEL_NOT_FOUND.error(
                f"there is no model {path!r}; there are: {_listed(model_names)}", field="model"
            )
        return owners.pop()

    async def named(self, name: str = "", *, checked: bool = False) -> tuple[str, str]:
        """Return model and adapter of an OpenAI client's ``model``: a model, an adapter, or "MODEL:ADAPTER".

        ``checked`` refuses unknown names even if :attr:`any_model` is true. Raises as :meth:`model`.
        """
        adapters_by_model = {
            model.name: {adapter.name for adapter in model.adapters} for model in await self.fleet.models()
        }
        base, _, adapter = name.partition(":")
        holders = [model for model, adapters in adapters_by_model.items() if name in adapters]
        if name in adapters_by_model or not name:
            return await self.model(name), ""
        if adapter in adapters_by_model.get(base, ()):
            return base, adapter
        if len(holders) > 1 and self.settings.model in holders:
            return self.settings.model, name
        if len(holders) == 1:
            return holders[0], name
        try:
            return await self.model(name), ""
        except RlctlError as error:
            only = self.settings.model or next(iter(adapters_by_model), "")
            # With adapters or several models, an unknown name may be misspelled.
            ambiguous = (
                adapter or adapters_by_model.get(only) or (len(adapters_by_model) > 1 and not self.settings.model)
            )
            if error.reason is not Reason.MODEL_NOT_FOUND or ambiguous or checked or not self.any_model:
                raise
            return await self.model(), ""

    def check_samples(self, wanted: Sequence[int], n: str, prompts: str) -> None:
        """Raise FIELD_INVALID for a call with more samples than may be under way together, before the samples are made.

        ``n`` and ``prompts`` name the fields for the error.
        """
        for count in wanted:
            if not 1 <= count <= MOST_SAMPLES:
                raise Reason.FIELD_INVALID.error(f"n is {count}; it must be from 1 to {MOST_SAMPLES}", field=n)
        self.check_count(sum(wanted), n if max(wanted) > 1 else prompts)

    def check_count(self, samples: int, field: str) -> None:
        """Raise FIELD_INVALID for more samples than may be under way together, here or of the caller."""
        if samples > self.settings.max_inflight:
            raise Reason.FIELD_INVALID.error(
                f"{samples} samples are more than may be under way in this gateway, {self.settings.max_inflight}",
                field=field,
            )
        self.quotas.check_count(samples, field)

    @staticmethod
    def check_bytes(size: int, together: int) -> None:
        """Raise MESSAGE_TOO_LARGE for a request above a stage's limit, or for a call above ``MOST_BYTES``.

        The request of each sample contains the prompt and all parameters.
        """
        refuse_large(GenerateRequest.DESCRIPTOR.name, size)
        if together > MOST_BYTES:
            raise Reason.MESSAGE_TOO_LARGE.error(
                f"the requests for its samples have {together} bytes or more together; {MOST_BYTES} are taken",
                field="body",
                next_step="Ask for fewer at a time.",
            )

    def rollout(self, model: str) -> AsyncRollout:
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
        self,
        sample: RolloutSample,
        *,
        credentials: Credentials,
        place: Place = ANYWHERE,
        on_progress: OnProgress | None = None,
    ) -> RolloutSample:
        """Generate a sample of the request's model until its end or a cut.

        Raises TOO_MANY_REQUESTS, and the error of a sample without tokens. A sample with tokens is returned.
        """
        model = sample.request.model
        with self.under_way(sample.request.ByteSize()), generating(self.tracer, model) as span:
            ended = await self.rollout(model).complete(
                sample, timeout_s=self.settings.timeout_s, credentials=credentials, place=place, told=on_progress
            )
            if span is not None:
                stages: list[Stage] = []
                with contextlib.suppress(RlctlError):  # not needed for the sample
                    stages = await self.fleet.stages(timeout_s=0.0)
                note_sample(span, ended, stages)
        if ended.error is not None and not ended.output_ids:
            if ended.error.reason is Reason.PROMPT_TOO_LONG:
                ended.error.field = ended.error.field or str(sample.request.WhichOneof("prompt"))
            raise ended.error
        return ended

    @contextlib.contextmanager
    def under_way(self, size: int) -> Iterator[None]:
        """Count a sample or forwarded request of this size. Raises TOO_MANY_REQUESTS."""
        if self.inflight >= self.settings.max_inflight:
            raise Reason.TOO_MANY_REQUESTS.error(f"{self.inflight} samples are under way in this gateway")
        if self.inflight_bytes + size > MOST_INFLIGHT_BYTES:
            raise Reason.TOO_MANY_REQUESTS.error(
                f"the requests of the samples under way in this gateway have {self.inflight_bytes} bytes, "
                f"this request has {size}; the limit is {MOST_INFLIGHT_BYTES}"
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
        """Number of this gateway's samples and forwarded requests at stages. A pair of stages counts each twice."""
        return sum(rollout.placed for rollout in self._rollouts.values())

    def inflight_at(self, slot: str) -> int:
        """Return the number of this gateway's samples and forwarded requests at a stage."""
        return sum(rollout.inflight_at(slot) for rollout in self._rollouts.values())

    async def stop(self, rids: Sequence[str]) -> list[str]:
        """Stop samples and forwarded requests. Return the ids that ran here."""
        stopped = await asyncio.gather(*(rollout.stop(rids) for rollout in self._rollouts.values()))
        return [rid for each in stopped for rid in each]

    async def finish_session(self, session_id: str) -> None:
        for rollout in self._rollouts.values():
            await rollout.finish_session(session_id)


def _same_path(one: str, other: str) -> bool:
    return bool(one) and os.path.normpath(one) == os.path.normpath(other)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"

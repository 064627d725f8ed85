"""verl over an rlctl fleet: the engine that sends a trainer's weights, and the replica that generates.

Names as verl 0.9.1 has them (``verl/checkpoint_engine/base.py``, ``verl/workers/rollout/replica.py``); the patch in
``examples/integrations/verl`` registers both under "rlctl". The engines are the fleet's: verl starts none, and its
trainer's ranks are the update's, all of which gather while rank 0 sends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

import rlctl
from rlctl.contract.errors import Reason
from rlctl.integrations.verl.weights import TrainingWeights
from rlctl.rollout.requests import GENERATE_S
from rlctl.weights.tensor.cuda_ordering import trainer_stream

if TYPE_CHECKING:
    from rlctl.rollout.rollout import AsyncRollout
    from rlctl.trainer.publisher import Publisher

NAME = "rlctl"
"""Of the checkpoint engine's backend, and of the rollout."""


@dataclass(frozen=True)
class Settings:
    """``rollout.checkpoint_engine.engine_kwargs.rlctl``.

    Attributes:
        coordinator: of the fleet, ``host:port``.
        model: of the fleet, whose weights the trainer's are.
        publisher: settings of :class:`rlctl.trainer.publisher.AsyncPublisher`, ``backend`` say.
        update: settings of its ``update``, ``pause`` say.
        rollout: settings of :meth:`rlctl.sdk.aio.AsyncFleet.rollout`, ``policy`` say.
        timeout_s: how long a sample may take, updates that it goes on over included.
    """

    coordinator: str
    model: str = "actor"
    publisher: Mapping[str, Any] = field(default_factory=dict)
    update: Mapping[str, Any] = field(default_factory=dict)
    rollout: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 6 * GENERATE_S

    @classmethod
    def of(cls, engine_kwargs: Mapping[str, Any]) -> Settings:
        """Raises FIELD_INVALID for a key that there is not, and without a coordinator."""
        try:
            return cls(**engine_kwargs)
        except TypeError as error:
            field = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{NAME}"
            raise Reason.FIELD_INVALID.error(str(error), field=field) from None


@CheckpointEngineRegistry.register(NAME)
class FleetCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """At every rank of the trainer: ``send_weights`` is one update of the fleet.

    The group between trainer and engines is the publisher's, which keeps it from one update to the next. The update
    pauses what is generated and lets it go on, at the new version.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
        """``bucket_size``: bytes that are sent together. ``is_master``: unused; rank 0 leads. ``settings``: see
        :class:`Settings`.
        """
        del is_master
        self._settings = Settings.of(settings)
        self._bucket_bytes = bucket_size
        self._publisher: Publisher | None = None
        self._weights: TrainingWeights | None = None

    def _of_the_fleet(self, *_: Any, **__: Any) -> Any:
        """What verl's engines do with its own rollout workers. Raises UNSUPPORTED."""
        raise Reason.UNSUPPORTED.error(
            "the fleet's engines take weights in, and verl has no rollout workers",
            field="actor_rollout_ref.rollout.checkpoint_engine",
            next_step="Apply the patch, which has verl's manager leave this to the fleet.",
        )

    prepare = build_topology = init_process_group = finalize = receive_weights = _of_the_fleet

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Make the weights of a training engine the version ``str(global_steps)`` of the fleet; returns metrics.

        ``weights``: verl's engine (``BaseEngine``), whose ``get_per_tensor_param`` is gone through once, and twice in
        the first update. Every rank calls it. Raises FIELD_REQUIRED without a step, and as
        :meth:`rlctl.trainer.publisher.AsyncPublisher.update`.
        """
        if global_steps is None:
            raise Reason.FIELD_REQUIRED.error("a version is called after its step", field="global_steps")
        stream = trainer_stream(None)
        return await asyncio.to_thread(self._send, weights, str(global_steps), stream)

    def _send(self, engine: Any, version: str, stream: torch.cuda.Stream | None) -> dict[str, float]:
        if self._weights is None or self._weights.engine is not engine:
            with torch.cuda.stream(stream):
                self._weights = TrainingWeights(engine)
        if self._publisher is None:
            self._publisher = self._join()
        result = self._publisher.update(self._weights, version=version, stream=stream, **self._settings.update)
        seconds = {"pause_s": result.pause_s, "transfer_s": result.transfer_s, "total_s": result.total_s}
        return {f"checkpoint_engine/{name}": value for name, value in seconds.items()}

    def _join(self) -> Publisher:
        """A trainer that starts again is a new incarnation: it may be at an earlier step than the one before."""
        leads = dist.get_rank() == 0
        settings = {
            "trainer_group": dist.group.WORLD if dist.get_world_size() > 1 else None,
            "bucket_bytes": self._bucket_bytes,
            "host": ray.util.get_node_ip_address().strip("[]"),
            "incarnation": int(time.time()),
            **self._settings.publisher,
        }
        fleet = rlctl.connect(self._settings.coordinator) if leads else None
        return rlctl.publisher(fleet, self._settings.model, **settings)


class FleetReplica(RolloutReplica):  # type: ignore[misc]
    """All engines of the fleet, as one replica: as many of it as there are to be processes that ask them.

    It has no workers and no servers that verl would put to sleep, abort or update: the fleet's update does that.
    """

    async def init_standalone(self) -> None:
        """Start what asks the fleet; it takes no GPU."""
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Raises UNSUPPORTED for a replica on the trainer's GPUs, and UNREACHABLE."""
        if self.rollout_mode is not RolloutMode.STANDALONE:
            raise Reason.UNSUPPORTED.error(
                "a fleet's engines are not on the trainer's ranks",
                field="trainer.v1.trainer_mode",
                next_step="Set it to separate_async, and actor_rollout_ref.hybrid_engine to false.",
            )
        settings = Settings.of(self.config.checkpoint_engine.engine_kwargs.get(NAME, {}))
        actor = ray.remote(FleetServer).options(max_concurrency=self.max_concurrency)
        server: Any = actor.remote(settings, self.config.prompt_length, self.config.response_length)
        await server.connect.remote()
        self._server_handle, self._server_address = server, f"{settings.coordinator}/{self.replica_rank}"


class FleetServer:
    """A Ray actor that generates at the fleet's engines, each of which it asks itself."""

    def __init__(self, settings: Settings, prompt_length: int, response_length: int) -> None:
        """``prompt_length``, ``response_length``: tokens, verl's limits of a request that names none."""
        self._settings = settings
        self._prompt_length = prompt_length
        self._response_length = response_length
        self._rollout: AsyncRollout | None = None

    async def connect(self) -> None:
        """Raises UNREACHABLE."""
        fleet = await rlctl.aio.connect(self._settings.coordinator)
        self._rollout = fleet.rollout(self._settings.model, **self._settings.rollout)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        **unknown: Any,
    ) -> TokenOutput:
        """One sample, over pauses, updates and engines that die. ``extra_fields`` has the steps of its versions.

        Raises UNSUPPORTED for images, video and audio, FIELD_INVALID for a sampling parameter that the fleet does not
        have, and as :meth:`rlctl.rollout.rollout.AsyncRollout.generate`.
        """
        del request_id
        assert self._rollout is not None
        unknown |= {"image_data": image_data, "video_data": video_data}
        if given := [name for name, value in unknown.items() if value is not None]:
            raise Reason.UNSUPPORTED.error("verl's prompts to a fleet are tokens alone", field=given[0])
        asked = dict(sampling_params)
        logprobs = bool(asked.pop("logprobs", False))
        room = min(self._response_length, self._prompt_length + self._response_length - len(prompt_ids))
        asked.setdefault("max_new_tokens", asked.pop("max_tokens", max(0, room)))
        samples = await self._rollout.generate(
            list(prompt_ids), return_logprob=logprobs, timeout_s=self._settings.timeout_s, **asked
        )
        sample = samples[0]
        steps = [int(version.label) for version in sample.versions if version and version.label.isdecimal()]
        return TokenOutput(
            token_ids=sample.output_ids,
            log_probs=sample.logprobs if logprobs else None,
            stop_reason=sample.finish,
            extra_fields={
                "global_steps": steps[-1] if steps else None,
                "min_global_steps": min(steps, default=None),
                "max_global_steps": max(steps, default=None),
            },
        )

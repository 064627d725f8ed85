"""verl over an rlctl fleet: the engine that sends a trainer's weights, and the replica that generates.

Names are verl 0.9.1's (``verl/checkpoint_engine/base.py``, ``verl/workers/rollout/replica.py``). The patch in
``examples/integrations/verl`` registers both under "rlctl". The engines are the fleet's: verl starts no engine. The
ranks of verl's trainer are the ranks of the update: all ranks gather while rank 0 sends.
"""

from __future__ import annotations

import asyncio
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
from rlctl.integrations.verl.incarnations import next_incarnation
from rlctl.integrations.verl.weights import TrainingWeights
from rlctl.rollout.requests import GENERATE_S
from rlctl.weights.tensor.cuda_ordering import trainer_stream

if TYPE_CHECKING:
    from rlctl.rollout.rollout import AsyncRollout
    from rlctl.trainer.publisher import Publisher

NAME = "rlctl"
"""Name of the checkpoint engine's backend, and of the rollout."""


@dataclass(frozen=True)
class Settings:
    """``rollout.checkpoint_engine.engine_kwargs.rlctl``.

    Attributes:
        coordinator: of the fleet, ``host:port``.
        model: the fleet's model that gets the trainer's weights.
        publisher: settings of :class:`rlctl.trainer.publisher.AsyncPublisher`, for example ``backend``.
        update: settings of its ``update``, for example ``pause``.
        rollout: settings of :meth:`rlctl.sdk.aio.AsyncFleet.rollout`, for example ``policy``.
        timeout_s: longest time of a sample, including updates in between, seconds.
    """

    coordinator: str
    model: str = "actor"
    publisher: Mapping[str, Any] = field(default_factory=dict)
    update: Mapping[str, Any] = field(default_factory=dict)
    rollout: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 6 * GENERATE_S

    @classmethod
    def of(cls, engine_kwargs: Mapping[str, Any]) -> Settings:
        """Return the settings. Raises FIELD_INVALID for an unknown key, and without a coordinator."""
        try:
            return cls(**engine_kwargs)
        except TypeError as error:
            field = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{NAME}"
            raise Reason.FIELD_INVALID.error(str(error), field=field) from None


@CheckpointEngineRegistry.register(NAME)
class FleetCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """The checkpoint engine at every rank of the trainer: ``send_weights`` is one update of the fleet.

    The publisher owns the group between trainer and engines, and keeps the group between updates. The update pauses
    running generation, and generation continues at the new version.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
        """``bucket_size``: bytes per bucket. ``is_master``: unused: rank 0 leads. ``settings``: :class:`Settings`."""
        del is_master
        self._settings = Settings.of(settings)
        self._bucket_bytes = bucket_size
        self._publisher: Publisher | None = None
        self._weights: TrainingWeights | None = None

    def _of_the_fleet(self, *_: Any, **__: Any) -> Any:
        """Raise UNSUPPORTED in place of the calls that verl makes to its own rollout workers."""
        raise Reason.UNSUPPORTED.error(
            "the fleet's engines take weights in, and verl has no rollout workers",
            field="actor_rollout_ref.rollout.checkpoint_engine",
            next_step="Apply the patch, which has verl's manager leave this to the fleet.",
        )

    prepare = build_topology = init_process_group = finalize = receive_weights = _of_the_fleet

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish the weights of a training engine as the version ``str(global_steps)`` of the fleet; return metrics.

        ``weights``: verl's engine (``BaseEngine``). The engine's ``get_per_tensor_param`` is iterated once, in the
        first update twice. Every rank calls this method. Raises FIELD_REQUIRED without a step, and as
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
        """Make the publisher. A restarted trainer is a new incarnation, because it may resume at an earlier step."""
        fleet = rlctl.connect(self._settings.coordinator) if dist.get_rank() == 0 else None
        settings = {
            "trainer_group": dist.group.WORLD if dist.get_world_size() > 1 else None,
            "bucket_bytes": self._bucket_bytes,
            "host": ray.util.get_node_ip_address().strip("[]"),
            "incarnation": 0 if fleet is None else next_incarnation(fleet, self._settings.model),
            **self._settings.publisher,
        }
        return rlctl.publisher(fleet, self._settings.model, **settings)


class FleetReplica(RolloutReplica):  # type: ignore[misc]
    """All engines of the fleet as one replica; the number of replicas is the number of processes that send requests.

    A replica has no workers or servers for verl to put to sleep, abort or update: the fleet's update does this.
    """

    async def init_standalone(self) -> None:
        """Start the actor that sends requests to the fleet; the actor takes no GPU."""
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Start the actor. Raises UNSUPPORTED for a replica on the trainer's GPUs, and UNREACHABLE."""
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
    """A Ray actor that generates at the fleet's engines, through direct requests to each engine."""

    def __init__(self, settings: Settings, prompt_length: int, response_length: int) -> None:
        """``prompt_length``, ``response_length``: tokens, verl's limits of a request without its own limits."""
        self._settings = settings
        self._prompt_length = prompt_length
        self._response_length = response_length
        self._rollout: AsyncRollout | None = None

    async def connect(self) -> None:
        """Connect to the fleet. Raises UNREACHABLE."""
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
        """Generate a sample, across pauses, updates and lost engines. ``extra_fields`` has the steps of its versions.

        Raises UNSUPPORTED for images, video and audio, FIELD_INVALID for a sampling parameter unknown to the fleet, and
        as :meth:`rlctl.rollout.rollout.AsyncRollout.generate`.
        """
        del request_id
        assert self._rollout is not None
        unknown |= {"image_data": image_data, "video_data": video_data}
        if unsupported := [name for name, value in unknown.items() if value is not None]:
            raise Reason.UNSUPPORTED.error("verl's prompts to a fleet are tokens alone", field=unsupported[0])
        sampling = dict(sampling_params)
        logprobs = bool(sampling.pop("logprobs", False))
        room = min(self._response_length, self._prompt_length + self._response_length - len(prompt_ids))
        sampling.setdefault("max_new_tokens", sampling.pop("max_tokens", max(0, room)))
        samples = await self._rollout.generate(
            list(prompt_ids), return_logprob=logprobs, timeout_s=self._settings.timeout_s, **sampling
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

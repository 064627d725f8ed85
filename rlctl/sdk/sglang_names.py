"""An engine under the names of SGLang's own Python API, for code written against that API.

The names are from ``sglang.srt.entrypoints.engine.Engine`` and from SGLang's HTTP routes. Behind each name is an
operation of the fleet, for engines of every kind. Differences to SGLang:

- Methods return operations and raise :class:`rlctl.contract.errors.OperationFailed`.
- Weights belong to a model and reach all engines of the model under a single version.
- Tensors are passed whole: rlctl announces, sends and verifies tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlctl.client.admin import AsyncAdmin
from rlctl.contract.enums import number
from rlctl.contract.errors import Reason
from rlctl.ports import new_uuid7
from rlctl.rollout.requests import GENERATE_S, Generator, build_request
from rlctl.sglang_api.rows import rows_of
from rlctl.trainer.update_result import UpdateResult
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.results_pb2 import Operation, RankResult
from rlctl.v1.rollout_pb2 import GenerateResponse

if TYPE_CHECKING:
    import torch

PAUSE = "retract"


class AsyncEngine:
    """An engine of a fleet.

    Attributes:
        slot: slot of the engine's stage.
        model: model that the stage serves.
    """

    def __init__(self, fleet: AsyncAdmin, generator: Generator, slot: str, model: str) -> None:
        """Use :meth:`rlctl.sdk.aio.AsyncFleet.engine`."""
        self._fleet = fleet
        self._generator = generator
        self.slot = slot
        self.model = model

    # Requests.

    async def generate(
        self,
        prompt: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        input_ids: Sequence[int] | None = None,
        *,
        return_logprob: bool = False,
        logprob_start_len: int | None = None,
        top_logprobs_num: int = 0,
        lora_path: str = "",
        rid: str = "",
        engine_fields: Mapping[str, Any] | None = None,
    ) -> GenerateResponse:
        """Generate at this engine; ``engine_meta`` has the engine's own data about each sample.

        ``lora_path``: name of a loaded adapter. ``engine_fields``: further fields of the engine. Raises FIELD_REQUIRED
        without a prompt, FIELD_CONFLICT with two, and as :meth:`rlctl.sdk.aio.AsyncFleet.generate`.
        """
        if prompt is not None and input_ids is not None:
            raise Reason.FIELD_CONFLICT.error("set either prompt or input_ids", field="input_ids")
        prompt_input = input_ids if prompt is None else prompt
        if prompt_input is None:
            raise Reason.FIELD_REQUIRED.error("prompt or input_ids is required", field="prompt")
        request = build_request(
            prompt_input,
            sampling_params or {},
            adapter=lora_path,
            rid=rid,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            engine_fields=engine_fields,
            return_engine_meta=True,
        )
        return await self._generator.generate(request, GENERATE_S, slot=self.slot)

    async def abort_request(self, rid: str = "", abort_all: bool = False) -> Operation:
        """Abort the request ``rid``, or all requests of this engine."""
        return await self._fleet.abort_requests([rid] if rid else [], abort_all=abort_all, slots=[self.slot])

    async def pause_generation(self, mode: str = "abort") -> Operation:
        """Stop generation. Modes: abort, retract, in_place, and drain (if supported by the engine)."""
        return await self._fleet.pause_generation(mode, slots=[self.slot])

    async def continue_generation(self, torch_empty_cache: bool = True) -> Operation:
        """Start generation again after a pause."""
        request = verbs_pb2.ContinueGenerationRequest(torch_empty_cache=torch_empty_cache)
        return await self._fleet.call(request, slots=[self.slot])

    async def flush_cache(self, idle_timeout_s: float = 0.0) -> Operation:
        """Empty the KV caches. Waits at most ``idle_timeout_s`` seconds for requests to end."""
        return await self._fleet.flush_cache(idle_timeout_s=idle_timeout_s or None, slots=[self.slot])

    async def release_memory_occupation(self, tags: Sequence[str] | None = None) -> Operation:
        """Release memory regions: kv_cache, weights, cuda_graph; None: all."""
        return await self._fleet.release_memory(tags or (), slots=[self.slot])

    async def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> Operation:
        """Allocate released memory regions again; None: all."""
        return await self._fleet.resume_memory(tags or (), slots=[self.slot])

    # Weights of the model, at all engines of the model.

    async def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
        torch_empty_cache: bool = False,
        keep_pause: bool = False,
        recapture_cuda_graph: bool = False,
        token_step: int = 0,
        flush_cache: bool = True,
    ) -> Operation:
        """Load a checkpoint at every engine of the model. ``model_path`` is the path at the engines.

        Running requests are retracted and continue with the new weights; with ``abort_all_requests`` they are aborted.
        """
        options = verbs_pb2.UpdateOptions(
            pause=_pause(abort_all_requests),
            abort_all_requests=abort_all_requests,
            flush_cache=flush_cache,
            after=verbs_pb2.AFTER_UPDATE_STAY_PAUSED if keep_pause else verbs_pb2.AFTER_UPDATE_RESUME,
            recapture_cuda_graph=recapture_cuda_graph,
            torch_empty_cache=torch_empty_cache,
        )
        request = verbs_pb2.UpdateWeightsFromDiskRequest(
            model_path=model_path,
            load_format=load_format or "",
            weight_version=weight_version or "",
            token_step=token_step,
            options=options,
        )
        return await self._fleet.call(request, model=self.model)

    async def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
        *,
        weight_version: str = "",
        abort_all_requests: bool = False,
    ) -> UpdateResult:
        """Send full tensors under checkpoint names, through memory shared with the engines.

        ``weight_version``: label; "" for a label made of the time. Raises UNSUPPORTED for a load format.
        """
        return await self._update("ipc", named_tensors, load_format, flush_cache, weight_version, abort_all_requests)

    async def update_weights_from_distributed(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
        *,
        weight_version: str = "",
        abort_all_requests: bool = False,
    ) -> UpdateResult:
        """Broadcast full tensors under checkpoint names, over a process group formed for the update.

        SGLang's own method takes names, dtypes and shapes, and the caller broadcasts; this method takes pairs of name
        and tensor. Otherwise as :meth:`update_weights_from_tensor`. Raises FIELD_INVALID for names, dtypes and shapes.
        """
        return await self._update(
            "broadcast", named_tensors, load_format, flush_cache, weight_version, abort_all_requests
        )

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> Operation:
        """Join the engine's ranks to a process group of the caller, which listens at the address.

        Updates of rlctl form their own groups and do not need this group.
        """
        request = verbs_pb2.InitWeightsUpdateGroupRequest(
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )
        return await self._fleet.call(request, slots=[self.slot])

    async def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> Operation:
        """Make the engine's ranks leave a process group."""
        request = verbs_pb2.DestroyWeightsUpdateGroupRequest(group_name=group_name)
        return await self._fleet.call(request, slots=[self.slot])

    # Adapters of the model, at all engines of the model.

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> Operation:
        """Load a LoRA adapter at every engine of the model. ``lora_path`` is the path at the engines."""
        return await self._fleet.load_adapter(lora_name, lora_path, pinned=pinned, model=self.model)

    async def unload_lora_adapter(self, lora_name: str) -> Operation:
        """Unload an adapter at every engine of the model."""
        return await self._fleet.unload_adapter(lora_name, model=self.model)

    # Reads.

    async def get_model_info(self) -> verbs_pb2.ModelInfo:
        """Return the model that the engine has loaded."""
        return (await self._first(verbs_pb2.GetModelInfoRequest())).model_info

    async def get_server_info(self) -> verbs_pb2.ServerInfo:
        """Return the settings with which the engine was started."""
        return (await self._first(verbs_pb2.GetServerInfoRequest())).server_info

    async def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """Return the first rows of a tensor as nested lists, by checkpoint name; for debugging."""
        request = verbs_pb2.CheckWeightsRequest(action=verbs_pb2.CHECK_ACTION_READ, tensor=name, rows=truncate_size)
        (result,) = (await self._fleet.call(request, slots=[self.slot])).stage_results
        rows: list[Any] = rows_of([rank.check.values for rank in result.rank_results if rank.check.HasField("values")])
        return rows

    async def _first(self, request: Any) -> RankResult:
        operation = await self._fleet.call(request, slots=[self.slot])
        return operation.stage_results[0].rank_results[0]

    async def _update(
        self,
        path: str,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        load_format: str | None,
        flush_cache: bool,
        weight_version: str,
        abort_all_requests: bool,
    ) -> UpdateResult:
        if isinstance(named_tensors, Sequence) and any(isinstance(named, str) for named in named_tensors):
            raise Reason.FIELD_INVALID.error(
                "pairs of name and tensor are given here, not names with their dtypes and shapes",
                field="named_tensors",
                next_step="Pass the tensors too: rlctl forms the group, and announces and broadcasts the tensors.",
            )
        if load_format:
            raise Reason.UNSUPPORTED.error(
                "how tensors travel is rlctl's choice; full tensors are given", field="load_format"
            )
        from rlctl.trainer.publisher import AsyncPublisher  # loads torch

        publisher = AsyncPublisher(self._fleet, self.model, path=path)
        try:
            return await publisher.update(
                named_tensors,
                version=weight_version or f"tensors-{new_uuid7()[-12:]}",
                pause="abort" if abort_all_requests else PAUSE,
                abort_all_requests=abort_all_requests,
                flush=flush_cache,
            )
        finally:
            await publisher.close()


def _pause(abort: bool) -> Any:
    return number(common_pb2.PauseMode.DESCRIPTOR, "abort" if abort else PAUSE, "pause")

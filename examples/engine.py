"""An engine plug-in: a table of 128 characters, in which each row scores the next character (docs/guides/engine.md)."""
# ruff: noqa: D101, D102, ARG002

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call, Engine, EngineConfig, EngineInfo
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as verbs
from rlctl.v1.fleet_pb2 import Capabilities, StageLayout
from rlctl.weights.checkpoint.checkpoint import open_checkpoint
from rlctl.weights.shards.shard_map import Shard, ShardMap
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.tensors import to_proto

TENSOR = "next.weight"


class TableEngine(Engine):
    name = "table"

    def __init__(self, config: EngineConfig, on_failure: Callable[[RlctlError], None]) -> None:
        self.config, self.version, self.step = config, common.WeightVersion(), threading.Lock()
        self.paused, self.running = False, dict[str, bool]()  # by request id: whether it goes on

    def setup(self) -> dict[str, str]:
        return {}  # one rank: no follower joins

    async def start(self, setup: Mapping[str, str]) -> EngineInfo:
        with contextlib.closing(open_checkpoint(self.config.model_path)) as stored:
            self.table = torch.zeros(stored.metas[TENSOR].shape)
            self.shards = ShardMap({TENSOR: Shard(stored.metas[TENSOR], self.table)})
            self.shards.load(stored)
        workers = [common.WorkerCoordinates(node=self.config.node, device="cpu")]
        capabilities = Capabilities(
            pause_modes=[common.PAUSE_MODE_ABORT, common.PAUSE_MODE_RETRACT],
            transports=[common.TRANSPORT_DISK],
            verification=[common.VERIFICATION_LEVEL_EXPECTED, common.VERIFICATION_LEVEL_REPLICA],
            check_actions=[verbs.CHECK_ACTION_CHECKSUM],
        )
        layout = StageLayout(tp_size=1, pp_size=1, dp_size=1, ep_size=1, workers=workers)
        return EngineInfo(layout, capabilities, checkpoint=self.config.model_path, model_digest=self.digest())

    async def stop(self) -> None:
        self.end(list(self.running))

    def set_version(self, version: common.WeightVersion) -> None:
        self.version = version

    async def get_model_info(self, request: verbs.GetModelInfoRequest, call: Call) -> verbs.ModelInfo:
        return verbs.ModelInfo(reference=[to_proto(meta) for meta in self.shards.reference.values()])

    async def pause_generation(self, request: verbs.PauseGenerationRequest, call: Call) -> None:
        with self.step:  # a step under way ends first
            self.paused = True
        self.end([] if request.mode == common.PAUSE_MODE_RETRACT else list(self.running))

    async def continue_generation(self, request: verbs.ContinueGenerationRequest, call: Call) -> None:
        self.paused = False

    async def prepare_update(self, request: verbs.PrepareUpdateRequest, call: Call) -> None:
        if self.running and not self.paused:
            raise Reason.ACTIVE_REQUESTS.error(f"{len(self.running)} requests run")  # outcome REJECTED

    async def update_weights_from_disk(self, request: verbs.UpdateWeightsFromDiskRequest, call: Call) -> None:
        with contextlib.closing(open_checkpoint(request.model_path)) as stored:
            self.shards.load(stored)  # raises with outcome REJECTED, or with DIRTY once a byte was written

    # The table has one tensor and no KV entries, so three verbs have no work.
    async def commit_update(self, request: verbs.CommitUpdateRequest, call: Call) -> None: ...

    async def abort_update(self, request: verbs.AbortUpdateRequest, call: Call) -> None: ...

    async def flush_cache(self, request: verbs.FlushCacheRequest, call: Call) -> None: ...

    async def check_weights(self, request: verbs.CheckWeightsRequest, call: Call) -> verbs.CheckReport:
        return verbs.CheckReport(action=request.action, tensor_count=1, model_digest=self.digest())

    def digest(self) -> str:
        digest = ModelDigest()
        digest.add(TENSOR, self.table)
        return digest.digest()

    async def generate(self, request: rollout.GenerateRequest) -> AsyncGenerator[rollout.GenerateResponse, None]:
        tokens, limit = list(request.input_ids.ids or request.text.encode()), request.sampling_params.max_new_tokens
        start = len(tokens)
        if request.rid in self.running:
            raise Reason.RID_IN_USE.error(f"request {request.rid} is running", field="rid")
        self.running[request.rid] = True
        try:
            while True:
                count = len(tokens) - start
                sample = rollout.Sample(completion_tokens=count)
                with self.step:
                    if not self.running[request.rid]:
                        sample.finish_reason.type = rollout.FINISH_TYPE_ABORT
                    elif count >= (limit or 16):
                        sample.finish_reason.type = rollout.FINISH_TYPE_LENGTH
                    elif not self.paused:
                        tokens.append(int(self.table[tokens[-1]].argmax()))
                        sample = rollout.Sample(output_ids=tokens[-1:], text=chr(tokens[-1]))
                        sample.versions.add(version=self.version, start=count, end=count + 1)
                if sample.output_ids or sample.finish_reason.type:
                    yield rollout.GenerateResponse(rid=request.rid, prompt_tokens=start, samples=[sample])
                if sample.finish_reason.type:
                    return
                await asyncio.sleep(0.001)
        finally:
            del self.running[request.rid]

    async def abort(self, request: rollout.AbortRequest) -> rollout.AbortResponse:
        return rollout.AbortResponse(aborted=self.end(list(self.running) if request.abort_all else request.rids))

    def end(self, rids: Sequence[str]) -> int:
        found = [rid for rid in rids if rid in self.running]
        self.running.update(dict.fromkeys(found, False))
        return len(found)

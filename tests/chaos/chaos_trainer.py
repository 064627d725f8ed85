"""A trainer as a process of its own: ``python chaos_trainer.py KIND ADDRESS DEADLINE_S LABEL...``.

KIND "null" speaks the contract itself, to fake engines, whose weights become the label. "torch" sends the demo's model
by the SDK's publisher, seeded by the number in the label, half of it from a second process, which its first line names.
For each label it prints one JSON line as it begins and one as it has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import rlctl
from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason
from rlctl.ports import new_uuid7
from rlctl.runtime.server_process import end_with_parent
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import PAUSE_MODE_RETRACT, Fence, Outcome, RequestHeader
from rlctl.v1.results_pb2 import OperationState

LEASE_S = 5.0
PER_TENSOR_S = 0.05


class NullTrainer:
    """Begins, joins, writes and commits; nothing is sent over the groups."""

    def __init__(self, fleet: Fleet, deadline_s: float) -> None:
        self._fleet = fleet
        self._deadline_s = deadline_s
        self._boot_id = new_uuid7()

    def update(self, label: str) -> tuple[Any, int]:
        ends = time.monotonic() + self._deadline_s
        plan = self._call(
            "BeginWeightUpdate",
            u.BeginWeightUpdateRequest(
                header=RequestHeader(timeout=duration(self._deadline_s)),
                model="actor",
                version=label,
                trainer=u.Trainer(name="trainer", boot_id=self._boot_id),
                options=v.UpdateOptions(pause=PAUSE_MODE_RETRACT),
                lease_ttl=duration(LEASE_S),
            ),
            ends,
        )
        try:
            header = RequestHeader(fence=Fence(update_id=plan.update_id))
            group = plan.groups[0]
            if not group.formed:
                self._verb(
                    v.InitWeightsUpdateGroupRequest(
                        header=header,
                        master_address="127.0.0.1",
                        master_port=1,
                        world_size=group.world_size,
                        group_name=group.group_name,
                        backend=group.backend,
                    ),
                    ends,
                )
            bucket = v.TensorBucket(names=[label], dtypes=["torch.float32"], shapes=[v.Shape()])
            self._verb(
                v.UpdateWeightsFromDistributedRequest(header=header, group_name=group.group_name, buckets=[bucket]),
                ends,
            )
            commit = u.CommitWeightUpdateRequest(
                update_id=plan.update_id,
                fencing_token=plan.fencing_token,
                expected_digest=hashlib.sha256(label.encode()).hexdigest(),
            )
            return self._call("CommitWeightUpdate", commit, ends), plan.version.sequence
        except rlctl.RlctlError:
            self._abort(plan)
            raise

    def _abort(self, plan: u.BeginWeightUpdateResponse) -> None:
        request = u.AbortWeightUpdateRequest(
            update_id=plan.update_id, fencing_token=plan.fencing_token, reason="the trainer failed"
        )
        with contextlib.suppress(rlctl.RlctlError):  # its lease ends it
            self._call("AbortWeightUpdate", request, time.monotonic() + 1)

    def _verb(self, request: Any, ends: float) -> None:
        self._fleet.call(request, timeout_s=max(0.1, ends - time.monotonic()))

    def _call(self, method: str, request: Any, ends: float) -> Any:
        remaining = max(0.1, ends - time.monotonic())
        return self._fleet.loop.call(self._fleet.aio.connection.call(method, request, remaining))


class Share:
    """Every second tensor of a model, which take a while to go through, so that something can happen meanwhile."""

    def __init__(self, model: Any, rank: int) -> None:
        from rlctl.weights.tensor.source import as_source

        self._source = as_source(model)
        self._rank = rank

    def metas(self) -> list[Any]:
        return self._source.metas()[self._rank :: 2]

    def local(self) -> Any:
        return self._source.local()

    def tensors(self) -> Iterator[tuple[str, Any]]:
        for pair in itertools.islice(self._source.tensors(), self._rank, None, 2):
            time.sleep(PER_TENSOR_S)
            yield pair


class TorchTrainer:
    """The SDK's publisher, in a trainer of two ranks, each of which sends its share."""

    def __init__(self, fleet: Fleet | None, deadline_s: float, store: str) -> None:
        import torch.distributed as dist

        self._deadline_s = deadline_s
        rank = int(fleet is None)
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        self._rank = rank
        self._publisher = rlctl.publisher(
            fleet, "actor", trainer_group=dist.group.WORLD, source=rank, bucket_bytes=16 << 10
        )

    def update(self, label: str) -> tuple[Any, int]:
        from rlctl.demo import tiny

        model = tiny.make(seed=int(label.rpartition("-")[2]))
        try:
            result = self._publisher.update(Share(model, self._rank), version=label, deadline_s=self._deadline_s)
        except RuntimeError as error:  # of the trainer's own collectives, when a rank was killed
            raise Reason.SOURCE_FAILED.error(str(error)) from error
        return result.operation, result.version.sequence


def begin_source(store: str, deadline_s: float, labels: Sequence[str]) -> None:
    """Fork the second rank, which ends with this process, and name it."""
    import torch

    torch.set_num_threads(1)
    ends_with_parent, self_open = os.pipe()
    if pid := os.fork():
        os.close(ends_with_parent)
        say(source=pid)
        return
    os.close(self_open)
    os.dup2(ends_with_parent, sys.stdin.fileno())
    end_with_parent()
    source = TorchTrainer(None, deadline_s, store)
    for label in labels:
        with contextlib.suppress(rlctl.RlctlError):
            source.update(label)
    os._exit(0)


def said(operation: Any, sequence: int) -> dict[str, Any]:
    return {
        "state": OperationState.Name(operation.state).removeprefix("OPERATION_STATE_"),
        "sequence": sequence,
        "error": operation.error.message,
        "ranks": {
            stage.slot: [Outcome.Name(rank.outcome).removeprefix("OUTCOME_") for rank in stage.rank_results]
            for stage in operation.stage_results
        },
        "excluded": [stage.slot for stage in operation.excluded],
    }


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts | {"time": time.monotonic()}) + "\n")
    sys.stdout.flush()


def main() -> None:
    kind, address, limit_s, *labels = sys.argv[1:]
    deadline_s = float(limit_s)
    trainer: NullTrainer | TorchTrainer
    if kind == "torch":
        store = str(Path(tempfile.mkdtemp(prefix="rlctl-chaos-")) / "store")
        begin_source(store, deadline_s, labels)  # before this process has threads
        trainer = TorchTrainer(rlctl.connect(address), deadline_s, store)
    else:
        trainer = NullTrainer(rlctl.connect(address), deadline_s)
    for label in labels:
        say(begun=label)
        try:
            outcome = said(*trainer.update(label))
        except rlctl.OperationFailed as error:
            outcome = said(error.operation, 0)
        except rlctl.RlctlError as error:
            outcome = {"state": "", "error": str(error)}
        say(ended=label, **outcome)
    # A group of which a rank was killed cannot be taken apart in order.
    os._exit(0)


if __name__ == "__main__":
    main()

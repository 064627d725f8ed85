"""A trainer as a process of its own: ``python chaos_trainer.py KIND ADDRESS DEADLINE_S LABEL...``.

KIND "null" speaks the contract itself, to fake engines, whose weights become the label; "torch" sends the demo's model
by the SDK's publisher, seeded by the number in the label. For each label it prints one JSON line as it begins and one as
it has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import rlctl
from rlctl.client.fleet import Fleet
from rlctl.ports import new_uuid7
from rlctl.times import duration
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import PAUSE_MODE_RETRACT, Fence, Outcome, RequestHeader
from rlctl.v1.results_pb2 import OperationState

LEASE_S = 5.0


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

    def close(self) -> None:
        pass


class TorchTrainer:
    """The SDK's publisher."""

    def __init__(self, fleet: Fleet, deadline_s: float) -> None:
        import torch

        torch.set_num_threads(1)
        self._publisher = fleet.publisher("actor", bucket_bytes=16 << 10)
        self._deadline_s = deadline_s

    def update(self, label: str) -> tuple[Any, int]:
        from rlctl.demo import tiny

        model = tiny.make(seed=int(label.rpartition("-")[2]))
        result = self._publisher.update(model, version=label, deadline_s=self._deadline_s)
        return result.operation, result.version.sequence

    def close(self) -> None:
        self._publisher.close()


KINDS: dict[str, Callable[[Fleet, float], Any]] = {"null": NullTrainer, "torch": TorchTrainer}


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
    kind, address, deadline_s, *labels = sys.argv[1:]
    with rlctl.connect(address) as fleet:
        trainer = KINDS[kind](fleet, float(deadline_s))
        for label in labels:
            say(begun=label)
            try:
                outcome = said(*trainer.update(label))
            except rlctl.OperationFailed as error:
                outcome = said(error.operation, 0)
            except rlctl.RlctlError as error:
                outcome = {"state": "", "error": str(error)}
            say(ended=label, **outcome)
        trainer.close()


if __name__ == "__main__":
    main()

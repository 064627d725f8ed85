"""What rank 0 sends arrives as it was sent."""

from __future__ import annotations

import pytest
from rlctl_torch.steps.step_plan import Batch, Order, Plan, decode, encode, length_of

from rlctl.contract.errors import Reason

BATCH = Batch(
    rows=[3, 0], starts=[0, 17], lengths=[3, 1], tokens=[5, 6, 7, 151_000], slots=[9, 8, 7, 1], outputs=[2, 3]
)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(1),
        Plan(2**40, batch=BATCH),
        Plan(3, orders=(Order("0190-ä"), Order("other"))),
        Plan(4, stop=True),
    ],
)
def test_plans_survive_the_wire(plan: Plan) -> None:
    data = encode(plan)
    assert length_of(data[:8]) == len(data)
    assert decode(data + b"what an earlier plan left behind") == plan


def test_refusals_keep_their_reason_field_and_facts() -> None:
    refusal = Reason.ACTIVE_REQUESTS.error("3 requests", field="abort_all_requests", metadata={"count": "3"})
    (order,) = decode(encode(Plan(5, orders=(Order("id", refusal),)))).orders
    assert order.refusal is not None
    assert order.refusal.reason is Reason.ACTIVE_REQUESTS
    assert order.refusal.detail() == refusal.detail()

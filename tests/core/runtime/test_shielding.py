"""Work whose caller has disconnected: it goes on, and its errors go nowhere but to the log."""

from __future__ import annotations

import asyncio
import gc

import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime.shielding import answer, shielded


async def _left(error: Exception) -> None:
    """Fail after the caller has disconnected."""
    may_fail = asyncio.Event()

    async def work() -> None:
        await may_fail.wait()
        raise error

    call = asyncio.ensure_future(answer(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    may_fail.set()
    for _ in range(3):
        await asyncio.sleep(0)
    del call
    gc.collect()  # asyncio reports an error that nobody has retrieved when the task is collected


async def test_a_refusal_after_the_caller_has_disconnected_is_no_error_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await _left(Reason.FIELD_INVALID.error("x"))
    assert not caplog.records


async def test_a_defect_after_the_caller_has_disconnected_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    await _left(ValueError("x"))
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)


async def test_a_caller_that_waits_gets_the_error(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise Reason.FIELD_INVALID.error("x")

    with pytest.raises(RlctlError):
        await shielded(asyncio.ensure_future(work()))
    gc.collect()
    assert not caplog.records

"""Every reason survives the way to the wire and back."""

from __future__ import annotations

import pickle
import urllib.parse

import grpc
import grpc.aio
import pytest

from rlctl.contract.errors import OperationFailed, Reason, RlctlError, from_detail
from rlctl.rollout.sample import RolloutFailed
from rlctl.transport import status
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN, ErrorDetail
from rlctl.v1.results_pb2 import Operation


class _Context:
    """Records what a handler aborts with."""

    async def abort(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...]) -> None:
        self.code, self.details, self.metadata = code, details, metadata
        raise InterruptedError


async def over_the_wire(error: RlctlError) -> RlctlError:
    context = _Context()
    with pytest.raises(InterruptedError):
        await status.abort(context, error)
    failed = grpc.aio.AioRpcError(
        context.code, grpc.aio.Metadata(), grpc.aio.Metadata(*context.metadata), details=context.details
    )
    return status.from_grpc(failed)


@pytest.mark.parametrize(
    "error",
    [
        Reason.FIELD_CONFLICT.error(
            "the cause", field="a.b", next_step="then", metadata={"k": "v"}, outcome=OUTCOME_UNKNOWN
        ),
        OperationFailed(Operation(operation_id="o", error=Reason.FIELD_CONFLICT.error("the cause").detail())),
        RolloutFailed(Reason.FIELD_CONFLICT.error("the cause"), []),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_another_process(error: RlctlError) -> None:
    """As Ray's actors and multiprocessing hand it over."""
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("reason", list(Reason), ids=lambda r: r.name)
async def test_a_reason_survives_the_wire(reason: Reason) -> None:
    error = reason.error("the cause, in words", field="a.b[0]", metadata={"k": "v"})
    back = await over_the_wire(error)
    assert type(back) is reason.exception
    assert (back.reason, back.message, back.field, back.metadata) == (
        reason,
        "the cause, in words",
        "a.b[0]",
        {"k": "v"},
    )
    assert back.next_step == reason.next_step
    assert str(back) == str(error)


async def test_cause_and_next_step_are_two_sentences_and_come_apart_again() -> None:
    error = Reason.STAGE_NOT_SERVING.error("actor-0 is PAUSED")
    assert str(error) == "STAGE_NOT_SERVING: actor-0 is PAUSED. Use another stage, or wait."
    assert str(Reason.STAGE_NOT_SERVING.error("It is PAUSED.")) == (
        "STAGE_NOT_SERVING: It is PAUSED. Use another stage, or wait."
    )
    assert (await over_the_wire(error)).message == "actor-0 is PAUSED"


def test_a_web_server_is_not_taken_for_a_coordinator_of_another_version() -> None:
    failed = grpc.aio.AioRpcError(
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        details="Received http2 header with status: 404",
    )
    error = status.from_grpc(failed)
    assert error.reason is Reason.UNREACHABLE
    assert "no gRPC server" in error.message
    assert error.outcome != OUTCOME_UNKNOWN, "it would be tried again until the time is up"


def test_a_call_that_ended_while_it_was_written_to_is_no_defect() -> None:
    """Python's gRPC has not heard the status then and says one of its own."""
    failed = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), details="Internal error from Core"
    )
    error = status.from_grpc(failed)
    assert (error.reason, error.outcome) == (Reason.UNREACHABLE, OUTCOME_UNKNOWN)


@pytest.mark.parametrize(
    ("side", "limit", "outcome"),
    [
        ("client", "grpc.max_send_message_length", OUTCOME_REJECTED),
        ("server", "grpc.max_receive_message_length", OUTCOME_REJECTED),
        ("server", "grpc.max_send_message_length", OUTCOME_UNKNOWN),
        ("client", "grpc.max_receive_message_length", OUTCOME_UNKNOWN),
    ],
)
async def test_an_answer_that_is_too_large_says_nothing_of_what_was_done(side: str, limit: str, outcome: int) -> None:
    async def echo(data: bytes, context: object) -> bytes:
        return data

    options = {"client": [], "server": [], side: [(limit, 100)]}
    server = grpc.aio.server(options=options["server"])
    methods = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options["client"]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test/Echo")(bytes(1000))
    await server.stop(None)
    error = status.from_grpc(caught.value)
    assert (error.reason, error.outcome) == (Reason.MESSAGE_TOO_LARGE, outcome)


async def test_the_status_code_is_the_exceptions() -> None:
    for reason in Reason:
        context = _Context()
        with pytest.raises(InterruptedError):
            await status.abort(context, reason.error())
        assert context.code.name == reason.exception.status


def test_a_reason_of_a_newer_version_becomes_internal_and_keeps_its_name() -> None:
    error = from_detail(ErrorDetail(reason="FROM_THE_FUTURE", message="x"))
    assert error.reason is Reason.INTERNAL
    assert "FROM_THE_FUTURE: x" in str(error)


def test_a_failed_operation_carries_itself_and_its_cause() -> None:
    operation = Operation(operation_id="o", error=Reason.RANK_LOST.error("rank 1 is gone").detail())
    error = OperationFailed(operation)
    assert error.operation.operation_id == "o"
    assert error.reason is Reason.RANK_LOST
    assert "rank 1 is gone" in str(error)


@pytest.mark.parametrize(
    ("verb", "update", "helps"),
    [
        ("WeightUpdate", "x", "Send the update again."),
        ("UpdateWeightsFromDistributed", "of it", "Send the update again."),
        ("UpdateWeightsFromDisk", "x", "Repeat with the same request_id."),
        ("PauseGeneration", "", "Repeat with the same request_id."),
    ],
)
def test_a_trainers_update_whose_outcome_is_lost_is_not_repeated_by_a_request_id(
    verb: str, update: str, helps: str
) -> None:
    """It is many calls, and the SDK has no way to give an id to all of them."""
    lost = Reason.LINK_LOST.error("the coordinator was restarted while the operation ran").detail()
    assert OperationFailed(Operation(operation_id="x", update_id=update, verb=verb, error=lost)).next_step == helps


def test_reasons_have_a_meaning_and_no_two_share_one() -> None:
    meanings = [reason.meaning for reason in Reason]
    assert all(meanings)
    assert len(set(meanings)) == len(meanings)


@pytest.mark.parametrize("sign", ["x", "é", "😀"])
async def test_what_is_said_fits_into_trailers_however_large_the_request_was(sign: str) -> None:
    context = _Context()
    with pytest.raises(InterruptedError):
        await status.abort(context, Reason.FIELD_INVALID.error(f"{100_000 * sign} is none", field="f"))
    trailers = sum(len(key) + len(value) for key, value in context.metadata)
    assert len(urllib.parse.quote(context.details)) + trailers * 4 / 3 < 8000
    told = await over_the_wire(Reason.FIELD_INVALID.error(100_000 * sign, field="f"))
    assert (told.reason, told.field) == (Reason.FIELD_INVALID, "f")
    assert len(told.message) > 300


async def test_what_is_no_text_is_written_out_so_that_it_can_be_told() -> None:
    """A name in somebody's JSON, or of a file: an error that could not be sent would be no answer at all."""
    said = "\ud800"
    error = Reason.FIELD_INVALID.error(
        f"no such tensor: {said}", field=f"weights[{said}]", next_step=f"Remove {said}.", metadata={said: said}
    )
    told = from_detail(ErrorDetail.FromString(error.detail().SerializeToString()))
    for back in (told, await over_the_wire(error)):
        assert str(back) == str(error)
        assert (back.message, back.metadata) == (error.message, error.metadata)
        assert r"no such tensor: \ud800" in str(back)


def test_a_message_is_no_larger_than_one_can_read() -> None:
    assert len(Reason.FIELD_INVALID.error(100_000 * "\ud800").message) < 2100
    error = Reason.FIELD_INVALID.error(f"'{100_000 * 'x'}' must be one of a, b")
    assert len(error.message) < 2100
    assert error.message.endswith("must be one of a, b")

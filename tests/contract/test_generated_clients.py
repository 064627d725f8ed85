"""Generated clients of blocking gRPC, as hand-written trainers use them: calls that are no streams, without sockets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc_testing
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from rlctl.transport import grpc
from rlctl.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    fleet_pb2,
    rollout_pb2,
    rollout_pb2_grpc,
    stage_pb2,
    stage_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

MODULES = (
    (coordinator_pb2, coordinator_pb2_grpc),
    (stage_pb2, stage_pb2_grpc),
    (worker_pb2, worker_pb2_grpc),
    (rollout_pb2, rollout_pb2_grpc),
    (trainer_pb2, trainer_pb2_grpc),
)
STUBS = {
    service: getattr(calls, f"{service.name}Stub")
    for messages, calls in MODULES
    for service in messages.DESCRIPTOR.services_by_name.values()
}
METHODS = [
    pytest.param(service, method, id=f"{service.name}.{method.name}")
    for service in STUBS
    for method in service.methods
    if not (method.client_streaming or method.server_streaming)
]


@pytest.mark.parametrize(("service", "method"), METHODS)
def test_a_call_reaches_its_method_with_its_request_and_returns_the_answer(
    service: ServiceDescriptor, method: MethodDescriptor
) -> None:
    channel = grpc_testing.channel([service], grpc_testing.strict_real_time())
    call: Any = getattr(STUBS[service](channel), method.name)
    request, answer = (GetMessageClass(kind)() for kind in (method.input_type, method.output_type))
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(call, request, timeout=30)
        _, sent, rpc = channel.take_unary_unary(method)
        rpc.terminate(answer, (), grpc.StatusCode.OK, "")
        assert type(sent) is type(request)
        assert type(pending.result(30)) is type(answer)


def test_a_refusal_is_raised_with_its_status() -> None:
    service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
    channel = grpc_testing.channel([service], grpc_testing.strict_real_time())
    stub: Any = STUBS[service](channel)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(stub.GetFleet, coordinator_pb2.GetFleetRequest(model="actor"), timeout=30)
        _, sent, rpc = channel.take_unary_unary(service.methods_by_name["GetFleet"])
        rpc.terminate(fleet_pb2.Fleet(), (), grpc.StatusCode.NOT_FOUND, "no stage serves model 'actor'")
        with pytest.raises(grpc.RpcError) as refused:
            pending.result(30)
    assert sent.model == "actor"
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND

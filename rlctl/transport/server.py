"""A gRPC server with the parts of every rlctl service: token, TLS, health, reflection, graceful stop."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rlctl.contract.errors import Reason
from rlctl.runtime.addresses import join, refuse_insecure, refuse_taken, refuse_used, split
from rlctl.transport.auth import Access, AccessGuard
from rlctl.transport.channel import FLOW_CONTROL, MAX_MESSAGE_BYTES
from rlctl.transport.denials import Denials
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.peers import PeerGuard, peer_identity

MAX_PENDING = 100_000
"""Calls that may wait for acceptance. gRPC's default: from 1,000 on, random calls are cancelled as if by the caller."""

OPTIONS: tuple[tuple[str, int], ...] = (
    *FLOW_CONTROL,
    ("grpc.so_reuseport", 0),  # two servers must not share a port silently
    # Clients ping every 10 s. By default gRPC disconnects clients that ping more often than every 5 minutes ("too many
    # pings").
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client of a dead machine is noticed after a minute, not after gRPC's two hours. Until then a rank without its
    # rank 0 holds a GPU in vain, and a stage without its coordinator registers nowhere. A stopped client has the same
    # time.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 30_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

GRACE_S = 5.0


class _Pool:
    """The pool of descriptors for reflection, with methods: `grpcurl describe` asks for methods by name."""

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """Return the file that defines a symbol. Raises KeyError."""
        pool = descriptor_pool.Default()
        service, _, method = symbol.rpartition(".")
        with contextlib.suppress(KeyError):
            descriptor = pool.FindServiceByName(service)
            if method in descriptor.methods_by_name:
                return descriptor.file
        return pool.FindFileContainingSymbol(symbol)

    def __getattr__(self, name: str) -> Any:
        return getattr(descriptor_pool.Default(), name)


class GrpcServer:
    """Serves a set of services at one address, on the running loop."""

    def __init__(
        self,
        services: Sequence[tuple[ServiceDescriptor, grpc.GenericRpcHandler]],
        *,
        token: str | None,
        access_file: str = "",
        insecure: bool = False,
        tls: Tls | None = None,
        denials: Denials | None = None,
    ) -> None:
        """``token``: the fleet's own; ``access_file``: further principals. ``tls``: callers need a certificate with an
        identity that may call the service; None: plain text. Raises FIELD_INVALID for an unreadable file.
        """
        access = Access(token, access_file)
        guards: list[grpc.aio.ServerInterceptor] = [AccessGuard(access, denials or Denials(), peer_identity)]
        if tls is not None:
            guards.append(PeerGuard(tls.identity))
        self._tls = tls
        self._token = token or access_file or None
        self._insecure = insecure
        self._server = grpc.aio.server(interceptors=guards, options=OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = [service.full_name for service, _ in services]
        self._server.add_generic_rpc_handlers(tuple(handler for _, handler in services))
        reflected = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, self._server, pool=cast(DescriptorPool, _Pool()))

    async def start(self, listen: str) -> str:
        """Bind ``host:port`` (port 0: any) or ``unix:PATH`` and serve; return the bound address.

        Raises INSECURE_BIND, or FIELD_INVALID if the address cannot be bound.
        """
        refuse_insecure(listen, token=self._token, insecure=self._insecure or self._tls is not None)
        refuse_taken(listen)
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, self._tls.server_credentials())
        except RuntimeError as error:
            refuse_used(listen)
            raise Reason.FIELD_INVALID.error(f"{listen} cannot be bound: {error}", field="listen") from None
        await self._server.start()
        await self.serving(True)
        if listen.startswith("unix:"):
            return listen
        return join(split(listen, "listen")[0], port)

    async def serving(self, serving: bool) -> None:
        """Set the health service's answer for the server and each of its services."""
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, state)

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Answer NOT_SERVING, accept no new calls, and end running calls after ``grace_s``."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

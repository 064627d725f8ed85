"""The cause of a failed connection: gRPC retries, and names the cause in words of its TLS library, if at all."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime.addresses import split
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.identity import Role

TRY_S = 2.0

_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_EOF", "RECORD_LAYER_FAILURE")
_EXPIRED, _NOT_YET, _NAME, _IP = 10, 9, 62, 64  # X509_V_ERR_*


async def handshake_failure(address: str, tls: Tls | None, role: Role) -> RlctlError | None:
    """Return TLS_FAILED with the cause of a failed connection to a peer; None if TLS is not the cause."""
    return await asyncio.to_thread(_failure, address, tls, role)


def _failure(address: str, tls: Tls | None, role: Role) -> RlctlError | None:
    try:
        connection = _connect(address)
    except (OSError, RlctlError):
        return None
    with connection:
        return _without(address, connection) if tls is None else _with(address, connection, tls, role)


def _connect(address: str) -> socket.socket:
    if not address.startswith("unix:"):
        return socket.create_connection(split(address), TRY_S)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(TRY_S)
        connection.connect(address.removeprefix("unix:"))
    except BaseException:
        connection.close()
        raise
    return connection


def _without(address: str, connection: socket.socket) -> RlctlError | None:
    """Return the error if the peer accepts TLS, which this process does not use."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError):
        context.wrap_socket(connection).close()
        return Reason.TLS_FAILED.error(
            f"{address} accepts TLS connections only, and this process has no certificate",
            next_step="Set RLCTL_TLS_CA, RLCTL_TLS_CERT and RLCTL_TLS_KEY.",
        )
    return None


def _with(address: str, connection: socket.socket, tls: Tls, role: Role) -> RlctlError | None:
    name, files, handshake_done = tls.peer_name(role), tls.files, False
    context = tls.client_context()
    try:
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(connection, server_hostname=name) as wrapped:
            handshake_done = True
            if wrapped.recv(1):  # in TLS 1.3 a refusal of the own certificate follows the handshake
                return None
            why = f"it refused {files.cert} ({tls.identity})"
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (_EXPIRED, _NOT_YET):
            why = f"its certificate is not valid now: {error.verify_message}"
        elif error.verify_code in (_NAME, _IP):
            why = f"its certificate is not of {name}, so it is not the {role} of this fleet"
        else:
            why = f"its certificate was not issued by the CA in {files.ca}: {error.verify_message}"
    except ssl.SSLError as error:
        if (not handshake_done and error.reason in _NO_TLS) or (
            isinstance(error, ssl.SSLEOFError) and not handshake_done
        ):
            why = "it does not speak TLS"
        else:
            why = f"it refused {files.cert} ({tls.identity}): {error.reason or error}"
    except TimeoutError:
        return None
    except OSError as error:
        why = f"it refused {files.cert} ({tls.identity}): {error}" if handshake_done else "it does not speak TLS"
    return Reason.TLS_FAILED.error(f"{address}: {why}")

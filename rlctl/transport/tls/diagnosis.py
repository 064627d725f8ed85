"""The cause of a failed connection: gRPC retries, and names the cause in words of its TLS library, if at all.

A certificate that is not valid now is named with its identity and its dates, and so is the clock that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import TYPE_CHECKING

from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime.addresses import split
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.files import NEW_CA, names_of, not_valid_now, renewal
from rlctl.transport.tls.identity import Identity, Role, only_identity

if TYPE_CHECKING:
    from cryptography import x509

TRY_S = 2.0

_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_EOF", "RECORD_LAYER_FAILURE")
COMPARE = "Compare the CA on both sides, and the clocks of both hosts (`timedatectl`). The peer's log has the cause."
"""Next step for a refused certificate that is valid here."""

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


def presented(address: str) -> tuple[Identity, x509.Certificate] | None:
    """Return the certificate of a server with its identity, for a diagnosis: nothing of it is verified.

    None: the server is not reached, or presents no certificate with an identity.
    """
    from cryptography import x509

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with _connect(address) as connection, context.wrap_socket(connection) as wrapped:
            encoded = wrapped.getpeercert(binary_form=True)
        certificate = x509.load_der_x509_certificate(encoded or b"")
    except (OSError, RlctlError, ValueError):
        return None
    identity = only_identity(names_of(certificate).get_values_for_type(x509.UniformResourceIdentifier))
    return None if identity is None else (identity, certificate)


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
    name, files, handshake_done, next_step = tls.peer_name(role), tls.files, False, ""
    context = tls.client_context()
    try:
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(connection, server_hostname=name) as wrapped:
            handshake_done = True
            if wrapped.recv(1):  # in TLS 1.3 a refusal of the own certificate follows the handshake
                return None
            why, next_step = _refused(tls)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (_EXPIRED, _NOT_YET):
            why, next_step = _not_valid(address, tls, error.verify_message)
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
            why, next_step = _refused(tls, error.reason or str(error))
    except TimeoutError:
        return None
    except OSError as error:
        why, next_step = _refused(tls, str(error)) if handshake_done else ("it does not speak TLS", "")
    return Reason.TLS_FAILED.error(f"{address}: {why}", next_step=next_step)


def _refused(tls: Tls, cause: str = "") -> tuple[str, str]:
    """Return that a peer refused the own certificate, why, and the next step."""
    text = f"it refused {tls.files.cert} ({tls.identity}), which"
    if why := not_valid_now(tls.material.certificate):
        return f"{text} {why}", renewal(tls.identity)
    # The peer's alert is often lost: gRPC closes the connection at once.
    return f"{text} is valid by this host's clock: {cause}".removesuffix(": "), COMPARE


def _not_valid(address: str, tls: Tls, cause: str) -> tuple[str, str]:
    """Return why the certificate of a peer, or the CA, is not valid by this host's clock, and the next step."""
    peer = presented(address)
    if peer is not None and (why := not_valid_now(peer[1])):
        return f"its certificate, of {peer[0]}, {why}", renewal(peer[0])
    return f"the CA in {tls.files.ca} is not valid now: {cause}", NEW_CA

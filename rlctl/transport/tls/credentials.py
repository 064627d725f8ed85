"""All credentials of a process: for gRPC channels and servers, and for HTTP.

Servers look at the files at every handshake and channels when they are opened, so the next connection uses a renewed
certificate.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterable, Mapping
from typing import Any

import grpc

from rlctl.contract.errors import Reason, RlctlError
from rlctl.transport.tls.files import Material, TlsFiles, TlsMaterial, tls_files
from rlctl.transport.tls.identity import Identity, Role, only_identity, refusal, server_name


class Tls:
    """Certificate, key and CA of a process.

    Attributes:
        identity: in the certificate.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises TLS_INVALID, UNSUPPORTED."""
        self._material = TlsMaterial(files)
        self.identity: Identity = self._material.now().identity
        self._contexts: dict[tuple[bool, bool], tuple[Material, ssl.SSLContext]] = {}

    @property
    def files(self) -> TlsFiles:
        return self._material.files

    @property
    def material(self) -> Material:
        """Return the present content of the files."""
        return self._material.now()

    def require(self, *roles: Role, name: str = "") -> None:
        """Raise TLS_INVALID unless the certificate has one of the roles, and the name if set."""
        identity = self.identity
        if identity.role not in roles or (name and identity.name != name):
            needed = " or ".join(f"{role}/{name}" if name else str(role) for role in roles)
            raise Reason.TLS_INVALID.error(
                f"{self.files.cert}: it is of {identity}, and this process needs {needed}", field="tls_cert"
            )

    def peer_name(self, role: Role) -> str:
        """Return the DNS name in the certificate of a peer of this role."""
        return server_name(self.identity.fleet, role)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        material = self.material
        return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a server: callers need a certificate of the CA."""
        used = self.material

        def configuration(now: Material) -> Any:
            return grpc.ssl_server_certificate_configuration([(now.key, now.cert)], root_certificates=now.ca)

        def renewed() -> Any:
            nonlocal used
            now = self.material
            if now is used:
                return None
            used = now
            return configuration(now)

        return grpc.dynamic_ssl_server_credentials(configuration(used), renewed, require_client_authentication=True)

    def client_context(self) -> ssl.SSLContext:
        """Return the context of an HTTP client; a new context after the files change."""
        return self._context(serves=False)

    def server_context(self, *, mutual: bool) -> ssl.SSLContext:
        """Return the context of an HTTP server; ``mutual``: a caller's certificate is required, otherwise optional."""

        def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._context(serves=True, mutual=mutual)

        # Made from the files, as their content was checked: a later change may be unusable.
        listening = self._context(serves=True, mutual=mutual)
        listening.sni_callback = renew
        return listening

    def _context(self, *, serves: bool, mutual: bool = True) -> ssl.SSLContext:
        now, cached = self.material, self._contexts.get((serves, mutual))
        if cached is None or cached[0] is not now:
            try:
                context = self._make(serves=serves, mutual=mutual)
            except RlctlError:  # the files are being replaced
                if cached is None:
                    raise
                return cached[1]
            cached = self._contexts[serves, mutual] = (now, context)
        return cached[1]

    def _make(self, *, serves: bool, mutual: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(cadata=self.material.ca.decode())
        if serves:
            context.verify_mode = ssl.CERT_REQUIRED if mutual else ssl.CERT_OPTIONAL
        try:
            context.load_cert_chain(self.files.cert, self.files.key)
        except (OSError, ssl.SSLError) as error:
            raise Reason.TLS_INVALID.error(f"{self.files.cert}: {error}", field="tls_cert") from None
        return context

    def http_refusal(self, transport: asyncio.BaseTransport | None, service: str) -> RlctlError | None:
        """Return the refusal of the caller of an HTTP service at the other end, or None."""
        return refusal(self.identity, http_identity(transport), service)


def http_identity(transport: asyncio.BaseTransport | None) -> Identity | None:
    """Return the identity in an HTTP caller's certificate; None without TLS or without exactly one identity."""
    peer = None if transport is None else transport.get_extra_info("peercert")
    names: Iterable[tuple[str, str]] = (peer or {}).get("subjectAltName", ())
    return only_identity(value for kind, value in names if kind == "URI")


def load_tls(environment: Mapping[str, str] = os.environ, *, ca: str = "", cert: str = "", key: str = "") -> Tls | None:
    """Return TLS from flags, else from RLCTL_TLS_CA, RLCTL_TLS_CERT and RLCTL_TLS_KEY; None if all are empty.

    Raises FIELD_REQUIRED, TLS_INVALID, UNSUPPORTED.
    """
    files = tls_files(environment, ca=ca, cert=cert, key=key)
    return None if files is None else Tls(files)

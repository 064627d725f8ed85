"""The files of a process: its certificate, its key and the CA of its peers, read, checked and reread."""

from __future__ import annotations

import datetime
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.contract.errors import Reason, RlctlError
from rlctl.transport.tls.identity import SCHEME, Identity, Role, only_identity

if TYPE_CHECKING:
    from cryptography import x509

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Wait before a reread of files that could not be used, if they have not changed."""

VARIABLES = {"ca": "RLCTL_TLS_CA", "cert": "RLCTL_TLS_CERT", "key": "RLCTL_TLS_KEY"}
"""Setting → environment variable."""


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files.

    Attributes:
        ca: certificates of the authorities that peers are checked against.
        cert: certificate of this process, followed by intermediate certificates.
        key: private key of this process.
    """

    ca: Path
    cert: Path
    key: Path

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment of a process that uses these files."""
        return {variable: str(getattr(self, name)) for name, variable in VARIABLES.items()}


PLAIN_TEXT = dict.fromkeys(VARIABLES.values(), "")
"""The environment of a process without TLS, in place of the parent's TLS variables."""


def tls_files(
    environment: Mapping[str, str] = os.environ, *, ca: str = "", cert: str = "", key: str = ""
) -> TlsFiles | None:
    """Return the files of flags, else of RLCTL_TLS_CA, RLCTL_TLS_CERT and RLCTL_TLS_KEY; None if all are empty.

    Raises FIELD_REQUIRED if only some are set: a typing error must not switch TLS off.
    """
    flags = {"ca": ca, "cert": cert, "key": key}
    paths = {name: flags[name] or environment.get(variable, "") for name, variable in VARIABLES.items()}
    if not any(paths.values()):
        return None
    for name, path in paths.items():
        if not path:
            raise Reason.FIELD_REQUIRED.error(
                "TLS needs a CA, a certificate and a key",
                field=f"tls_{name}",
                next_step=f"Set --tls-{name} or {VARIABLES[name]}.",
            )
    return TlsFiles(**{name: Path(path).expanduser() for name, path in paths.items()})


@dataclass(frozen=True)
class Material:
    """The content of the files at one time.

    Attributes:
        ca: PEM. As ``cert`` and ``key``.
        identity: in the certificate.
        certificate: the first of ``cert``, parsed.
    """

    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    identity: Identity
    certificate: x509.Certificate = field(repr=False)

    @property
    def expires(self) -> datetime.datetime:
        return self.certificate.not_valid_after_utc


class TlsMaterial:
    """The files, reread after changes. Unusable content is logged, and the earlier content stays in use.

    Attributes:
        files: paths of the files.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises TLS_INVALID, with file, cause and next step; UNSUPPORTED without the extra."""
        self.files = files
        self._lock = threading.Lock()  # servers read in threads of gRPC
        self._stamp = self._stamps()
        self._now = read(files)
        self._failed: list[tuple[int, int, int]] | None = None
        """Stamps of the files at the last failed attempt."""
        self._retry = 0.0
        self._trouble = ""
        self._ended: Material | None = None
        """Content whose end is logged."""

    def now(self) -> Material:
        with self._lock:
            material = self._present()
            if material is not self._ended and datetime.datetime.now(datetime.UTC) > material.expires:
                self._ended = material
                log.error(
                    "%s: %s expired at %s; peers refuse new connections until it is renewed",
                    self.files.cert,
                    material.identity,
                    material.expires,
                )
            return material

    def _present(self) -> Material:
        stamp = self._stamps()
        if stamp == self._stamp or (stamp == self._failed and time.monotonic() < self._retry):
            return self._now
        try:
            self._now = self._again()
        except RlctlError as error:
            # Unreadable files may become readable without a further change.
            self._failed, self._retry = stamp, time.monotonic() + RETRY_S
            if error.message != self._trouble:
                log.error("%s; the earlier certificate stays in use until %s", error, self._now.expires)
            self._trouble = error.message
        else:
            self._stamp, self._failed, self._trouble = stamp, None, ""
        return self._now

    def _again(self) -> Material:
        material = read(self.files)
        if material.identity != self._now.identity:
            raise _invalid(self.files.cert, "cert", f"it is of {material.identity}, and was of {self._now.identity}")
        log.info("%s was read anew; it is valid until %s", self.files.cert, material.expires)
        return material

    def _stamps(self) -> list[tuple[int, int, int]]:
        stamps = []
        for path in (self.files.ca, self.files.cert, self.files.key):
            try:
                stat = path.stat()
            except OSError:
                stamps.append((0, 0, 0))
            else:
                stamps.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
        return stamps


def read(files: TlsFiles) -> Material:
    """Read and check the files. Raises TLS_INVALID, UNSUPPORTED."""
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError:
        raise Reason.UNSUPPORTED.error(
            "TLS needs cryptography, which is not installed here", next_step="pip install 'rlctl[tls]'"
        ) from None

    authorities, chain = _certificates(files.ca, "ca"), _certificates(files.cert, "cert")
    key = _content(files.key, "key")
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:  # TypeError: an encrypted key
        raise _invalid(files.key, "key", f"it has no private key without a passphrase: {error}") from None
    certificate = chain[0]
    if private.public_key() != certificate.public_key():
        raise _invalid(files.key, "key", f"it is not the key of {files.cert}")
    identity = _identity(files.cert, certificate)
    if why := not_valid_now(certificate):
        raise _invalid(files.cert, "cert", f"it {why}", renewal(identity))
    issuers = [authority for authority in authorities if _issued(chain[-1], authority)]
    if not issuers:
        raise _invalid(files.cert, "cert", f"it was not issued by the CA in {files.ca}")
    if all(map(not_valid_now, issuers)):
        why = f"the CA that issued {files.cert} {not_valid_now(issuers[0])}"
        raise _invalid(files.ca, "ca", why, NEW_CA)
    return Material(_content(files.ca, "ca"), _content(files.cert, "cert"), key, identity, certificate)


def not_valid_now(certificate: x509.Certificate) -> str:
    """Return why a certificate is not valid by this host's clock, or ""."""
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    if now > certificate.not_valid_after_utc:
        return f"expired at {certificate.not_valid_after_utc}, and this host's clock says {now}"
    if now < certificate.not_valid_before_utc:
        return f"is valid from {certificate.not_valid_before_utc} on, and this host's clock says {now}"
    return ""


def renewal(identity: Identity) -> str:
    """Return the next step for a certificate that is not valid now."""
    return (
        f"If the clock is right: `rlctl certs issue DIR {identity.path}` where the key of the CA is; the process reads"
        " the new files without a restart. If the clock is wrong: `timedatectl`."
    )


NEW_CA = (
    "If the clock is right: make a CA in another directory (`rlctl certs init`), and issue all certificates from it"
    " (docs/tls.md). If the clock is wrong: `timedatectl`."
)
"""Next step for a CA that is not valid now."""


def names_of(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    """Return the alternative names of a certificate."""
    from cryptography import x509

    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def _identity(path: Path, certificate: x509.Certificate) -> Identity:
    from cryptography import x509

    names = names_of(certificate)
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    identity = only_identity(uris)
    if identity is None:
        uri_list = ", ".join(uris) or "none"
        raise _invalid(
            path, "cert", f"it needs one URI {SCHEME}FLEET/ROLE among its alternative names; it has {uri_list}"
        )
    dns: Iterable[str] = names.get_values_for_type(x509.DNSName)
    if identity.role is not Role.CLIENT and identity.server_name not in dns:
        raise _invalid(path, "cert", f"it lacks the DNS name {identity.server_name} that callers require")
    return identity


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # noqa: BLE001 a ValueError, TypeError or InvalidSignature: it is another's
        return False
    return True


def _certificates(path: Path, name: str) -> list[x509.Certificate]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(_content(path, name))
    except ValueError as error:
        raise _invalid(path, name, f"it has no PEM certificate: {error}") from None


def _content(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _invalid(path, name, f"it cannot be read: {error.strerror}") from None


def _invalid(path: Path, name: str, why: str, next_step: str = "") -> RlctlError:
    return Reason.TLS_INVALID.error(f"{path}: {why}", field=f"tls_{name}", next_step=next_step)

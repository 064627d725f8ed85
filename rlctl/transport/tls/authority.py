"""A private CA in a directory: ``ca.crt`` and ``ca.key``, and certificates at the paths of their identities.

A fleet with a CA of its own (cert-manager, Vault) does not need this module: ``files.py`` lists the needs of a
certificate.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime import private_files
from rlctl.transport.tls.files import PLAIN_TEXT, TlsFiles, read
from rlctl.transport.tls.identity import SCHEME, Identity, Role, server_name

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

CA_DAYS = 3650
DAYS = 90
"""Validity of a certificate. Launchers renew their certificates in the last third."""

_SKEW = datetime.timedelta(days=1)
"""Tolerated delay of other hosts' clocks, which refuse a certificate before it begins."""

_CALLED_BY_HOST = (Role.COORDINATOR, Role.GATEWAY)
"""Roles with certificates that also name this host: clients without roles check the host."""


class Authority:
    """The directory. Issues certificates if the CA's key is present."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.expanduser().absolute()
        self._ensured: dict[str, tuple[str, ...]] = {}

    @classmethod
    def init(cls, directory: Path, fleet: str, days: int = CA_DAYS) -> Authority:
        """Make the CA of a fleet. Raises TLS_INVALID; OPERATION_CONFLICT if the directory already has a CA."""
        authority = cls(directory)
        Identity.parse(fleet, Role.COORDINATOR)
        try:
            private_files.make_directory(authority.directory)
        except OSError as error:
            raise _unwritable(authority.certificate, error) from None
        with authority._locked():
            if authority.certificate.exists():
                raise Reason.OPERATION_CONFLICT.error(
                    f"{authority.certificate} exists",
                    field="directory",
                    next_step="A new CA would make every certificate of the fleet invalid. Name another directory.",
                )
            authority._begin(fleet, days)
        return authority

    def _begin(self, fleet: str, days: int) -> None:
        from cryptography import x509

        key = _new_key()
        name = _named(f"rlctl CA of {fleet}")
        valid = (datetime.datetime.now(datetime.UTC), days)
        builder = _builder(name, name, key, valid).add_extension(x509.BasicConstraints(True, 0), critical=True)
        builder = builder.add_extension(_usage(signs=True), critical=True)
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{SCHEME}{fleet}")]), critical=False
        )
        _write(self.certificate, self.key, builder, key, key)

    def issue(
        self, path: str, *, hosts: Iterable[str] = (), days: int = DAYS, begins: datetime.datetime | None = None
    ) -> TlsFiles:
        """Make the certificate of an identity, "stage/actor-0", with these hosts. Raises TLS_INVALID.

        ``begins``: start of its validity, by default now.
        """
        with self._locked():
            return self._issue(path, hosts, days, begins or datetime.datetime.now(datetime.UTC))

    def _issue(self, path: str, hosts: Iterable[str], days: int, begins: datetime.datetime) -> TlsFiles:
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        authority, signing = self._ca(), self._signing_key()
        identity = Identity.parse(_fleet(self.certificate, authority), path)
        files, key = self.files(path), _new_key()
        expires = authority.not_valid_after_utc
        if expires < begins + datetime.timedelta(days=days):
            raise _invalid(self.certificate, f"it expires at {expires}, before a certificate of {days} days does")
        names = [
            x509.UniformResourceIdentifier(str(identity)),
            *_dns_names(identity),
            *map(_host, _hosts(identity, hosts)),
        ]
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if identity.role is not Role.CLIENT:
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        builder = _builder(_named(str(identity)), authority.subject, key, (begins, days), authority)
        builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
        builder = builder.add_extension(_usage(signs=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        _write(files.cert, files.key, builder, key, signing)
        return files

    def files(self, path: str) -> TlsFiles:
        """Return the paths of an identity's certificate."""
        base = self.directory / path
        return TlsFiles(self.certificate, base.with_name(f"{base.name}.crt"), base.with_name(f"{base.name}.key"))

    def ensured(self, path: str, *, hosts: Iterable[str] = ()) -> TlsFiles:
        """Return the certificate of an identity; with the CA's key, issued if missing, renewed in its last third.

        No certificate outlives the CA. Raises TLS_INVALID if the certificate is missing or unusable, and the CA's key
        is not here or the CA ends within a day.
        """
        self._ensured[path] = tuple(hosts)
        files = self.files(path)
        if self.key.exists():
            with self._locked():
                now = datetime.datetime.now(datetime.UTC)
                days = max(1, min(DAYS, (self._ca().not_valid_after_utc - now).days))
                try:
                    usable = files.cert.exists() and not _is_due(files, now, now + datetime.timedelta(days=days))
                except RlctlError:  # the certificate has expired, or is damaged
                    usable = False
                return files if usable else self._issue(path, hosts, days, now)
        if not files.cert.exists():
            raise _invalid(files.cert, "it is missing", f"`rlctl certs issue {self.directory} {path}` where the CA is.")
        read(files)
        return files

    def renew(self) -> None:
        """Ensure every certificate again that this process has ensured. Raises TLS_INVALID."""
        for path, hosts in list(self._ensured.items()):
            self.ensured(path, hosts=hosts)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other processes that issue here: their keys and certificates would mix."""
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(private_files.locked(self.directory))
            except OSError as error:
                step = f"`rlctl certs init {self.directory}` makes a CA."
                raise _invalid(self.directory, f"it cannot be locked: {error.strerror}", step) from None
            yield

    @property
    def certificate(self) -> Path:
        return self.directory / "ca.crt"

    @property
    def key(self) -> Path:
        return self.directory / "ca.key"

    def _ca(self) -> x509.Certificate:
        from cryptography import x509

        try:
            return x509.load_pem_x509_certificates(self.certificate.read_bytes())[0]
        except OSError as error:
            step = f"`rlctl certs init {self.directory}` makes one."
            raise _invalid(self.certificate, f"it cannot be read: {error.strerror}", step) from None
        except ValueError as error:
            raise _invalid(self.certificate, f"it has no PEM certificate: {error}") from None

    def _signing_key(self) -> Any:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            return load_pem_private_key(self.key.read_bytes(), None)
        except OSError as error:
            step = "Issue certificates where the key of the CA is, and copy them here."
            raise _invalid(self.key, f"it cannot be read: {error.strerror}", step) from None
        except (ValueError, TypeError) as error:
            raise _invalid(self.key, f"it has no private key without a passphrase: {error}") from None


def certificate_variables(authority: Authority | None, path: str, hosts: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of a process of this identity, in place of the parent's TLS variables."""
    return PLAIN_TEXT if authority is None else authority.ensured(path, hosts=hosts).variables


def _fleet(path: Path, authority: x509.Certificate) -> str:
    from cryptography import x509

    try:
        names = authority.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uri = names.get_values_for_type(x509.UniformResourceIdentifier)[0]
    except (x509.ExtensionNotFound, IndexError):
        raise _invalid(path, f"it has no URI {SCHEME}FLEET, so `rlctl certs init` did not make it") from None
    return uri.removeprefix(SCHEME)


def _is_due(files: TlsFiles, now: datetime.datetime, next_end: datetime.datetime) -> bool:
    """Whether a certificate is in its last third, and a new one, which ends at ``next_end``, is valid for a day
    longer.
    """
    from cryptography import x509

    read(files)
    certificate = x509.load_pem_x509_certificate(files.cert.read_bytes())
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return now > ends - (ends - begins) / 3 and next_end - ends > datetime.timedelta(days=1)


def _dns_names(identity: Identity) -> list[Any]:
    from cryptography import x509

    if identity.role is Role.CLIENT:
        return []
    roles = [identity.role]
    if identity.role is Role.COORDINATOR:
        roles.append(Role.TRAINER)  # embedded in a trainer that leads its ranks
    return [x509.DNSName(server_name(identity.fleet, role)) for role in roles]


def _hosts(identity: Identity, hosts: Iterable[str]) -> list[str]:
    own = ("localhost", "127.0.0.1", "::1", socket.gethostname()) if identity.role in _CALLED_BY_HOST else ()
    return list(dict.fromkeys((*own, *hosts)))


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise Reason.TLS_INVALID.error(f"{host!r} is no host name: {error}", field="host") from None


def _new_key() -> ec.EllipticCurvePrivateKey:
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise Reason.UNSUPPORTED.error(
            "certificates need cryptography, which is not installed here", next_step="pip install 'rlctl[tls]'"
        ) from None
    return ec.generate_private_key(ec.SECP256R1())


def _named(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    valid: tuple[datetime.datetime, int],
    authority: x509.Certificate | None = None,
) -> x509.CertificateBuilder:
    from cryptography import x509

    begins, days = valid
    public = key.public_key()
    issuer_key: Any = public if authority is None else authority.public_key()
    return (
        x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
        .not_valid_before(begins - _SKEW)
        .not_valid_after(begins + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _write(
    certificate: Path, key_path: Path, builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, signing: Any
) -> None:
    """Put both files in place, the key first. A reader between the two sees a pair that does not match, and waits.

    Raises TLS_INVALID.
    """
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem = builder.sign(signing, hashes.SHA256()).public_bytes(Encoding.PEM)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        private_files.make_directory(certificate.parent)
        for path, content in ((key_path, private), (certificate, pem)):
            private_files.replace(path, content.decode())
    except OSError as error:
        raise _unwritable(certificate, error) from None


def _unwritable(path: Path, error: OSError) -> RlctlError:
    step = "Check the rights and the room of the directory."
    return _invalid(path, f"it cannot be written: {error.strerror}", step)


def _invalid(path: Path, why: str, step: str = "") -> RlctlError:
    return Reason.TLS_INVALID.error(f"{path}: {why}", field="tls", next_step=step)

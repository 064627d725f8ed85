"""The files of a process: each defect is an error that names the file, the cause and the next step."""

from __future__ import annotations

import datetime
import logging
import os
import stat
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from rlctl.contract.errors import Reason, RlctlError
from rlctl.transport.tls import authority as authority_module
from rlctl.transport.tls import files as tls_files_module
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls, load_tls
from rlctl.transport.tls.files import Material, TlsFiles, TlsMaterial, read, tls_files
from rlctl.transport.tls.identity import Role


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.init(tmp_path / "tls", "lab")


def names(certificate: Path) -> tuple[list[str], list[str], list[str]]:
    loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
    san = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    ips = [str(ip) for ip in san.get_values_for_type(x509.IPAddress)]
    return san.get_values_for_type(x509.UniformResourceIdentifier), san.get_values_for_type(x509.DNSName), ips


def days_ago(days: int) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)


def test_an_issued_certificate_has_its_identity_its_role_and_its_hosts(authority: Authority) -> None:
    uris, dns, ips = names(authority.issue("coordinator", hosts=["rl.example.com", "10.0.0.5"]).cert)
    assert uris == ["rlctl://lab/coordinator"]
    assert {"coordinator.lab.rlctl.internal", "trainer.lab.rlctl.internal", "localhost", "rl.example.com"} <= {*dns}
    assert {"127.0.0.1", "::1", "10.0.0.5"} <= {*ips}
    stage = authority.issue("stage/actor-0")
    assert names(stage.cert) == (["rlctl://lab/stage/actor-0"], ["stage.lab.rlctl.internal"], [])
    assert str(read(stage).identity) == "rlctl://lab/stage/actor-0"


def test_a_second_ca_of_the_same_moment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_key = authority_module._new_key
    with ThreadPoolExecutor(1) as thread:

        def meanwhile() -> Any:
            monkeypatch.undo()
            seconds.append(thread.submit(Authority.init, tmp_path, "lab"))
            with pytest.raises(TimeoutError):
                seconds[0].result(0.3)
            return new_key()

        seconds: list[Future[Authority]] = []
        monkeypatch.setattr(authority_module, "_new_key", meanwhile)
        first = Authority.init(tmp_path, "lab")
        with pytest.raises(RlctlError) as caught:
            seconds[0].result(20)
    assert caught.value.reason is Reason.OPERATION_CONFLICT
    assert read(first.issue("client/alice")).identity


def test_keys_are_for_their_owner_only_and_a_ca_is_never_replaced(authority: Authority) -> None:
    files = authority.issue("client/alice")
    for key in (files.key, authority.directory / "ca.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with pytest.raises(RlctlError, match=r"ca\.crt exists") as caught:
        Authority.init(authority.directory, "lab")
    assert caught.value.reason is Reason.OPERATION_CONFLICT


def test_all_files_are_set_or_none() -> None:
    assert tls_files({}) is None
    with pytest.raises(RlctlError) as caught:
        tls_files({"RLCTL_TLS_CA": "ca.crt", "RLCTL_TLS_CERT": "own.crt"})
    assert caught.value.reason is Reason.FIELD_REQUIRED
    assert "RLCTL_TLS_KEY" in caught.value.next_step
    flags = tls_files({"RLCTL_TLS_CA": "a", "RLCTL_TLS_CERT": "b", "RLCTL_TLS_KEY": "c"}, cert="flag")
    assert flags == TlsFiles(Path("a"), Path("flag"), Path("c"))


def encrypted(files: TlsFiles) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")))


def of_another(files: TlsFiles, authority: Authority, tmp_path: Path) -> None:
    other = Authority.init(tmp_path / "other", "lab").issue("stage/a")
    os.replace(other.cert, files.cert)
    os.replace(other.key, files.key)


@pytest.mark.parametrize(
    ("spoil", "file", "why"),
    [
        (lambda files, *_: files.cert.unlink(), "a.crt", "cannot be read: No such file or directory"),
        (lambda files, *_: files.key.unlink(), "a.key", "cannot be read: No such file or directory"),
        (lambda files, *_: files.ca.write_text("nothing"), "ca.crt", "it has no PEM certificate"),
        (lambda files, *_: files.cert.write_bytes(files.key.read_bytes()), "a.crt", "it has no PEM certificate"),
        (lambda files, *_: encrypted(files), "a.key", "no private key without a passphrase"),
        (lambda files, ca, _: os.replace(ca.issue("stage/b").key, files.key), "a.key", "it is not the key of"),
        (lambda files, ca, tmp: of_another(files, ca, tmp), "a.crt", "it was not issued by the CA in"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_reason(
    authority: Authority, tmp_path: Path, spoil: Callable[..., object], file: str, why: str
) -> None:
    files = authority.issue("stage/a")
    spoil(files, authority, tmp_path)
    with pytest.raises(RlctlError) as caught:
        load_tls(files.variables)
    assert caught.value.reason is Reason.TLS_INVALID
    assert caught.value.message.partition(": ")[0].endswith(file)
    assert why in caught.value.message
    assert "rlctl certs issue" in caught.value.next_step


def test_an_expired_certificate_is_refused(authority: Authority) -> None:
    files = authority.issue("stage/a", days=1, begins=days_ago(2))
    with pytest.raises(RlctlError, match="it expired at"):
        read(files)


def test_a_certificate_that_is_not_valid_yet_is_refused(authority: Authority) -> None:
    files = authority.issue("stage/a", begins=days_ago(-2))
    with pytest.raises(RlctlError, match=r"a\.crt: it is valid from .* on, and this host's clock says") as caught:
        read(files)
    assert "rlctl certs issue DIR stage/a" in caught.value.next_step
    assert "timedatectl" in caught.value.next_step


def test_a_certificate_of_an_expired_ca_is_refused(authority: Authority) -> None:
    files = authority.issue("stage/a")
    ca = x509.load_pem_x509_certificate(files.ca.read_bytes())
    builder = x509.CertificateBuilder(ca.issuer, ca.subject, ca.public_key(), serial_number=1)
    builder = builder.not_valid_before(days_ago(3)).not_valid_after(days_ago(1))
    for extension in ca.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    key: Any = load_pem_private_key(authority.key.read_bytes(), None)
    files.ca.write_bytes(builder.sign(key, SHA256()).public_bytes(Encoding.PEM))
    with pytest.raises(RlctlError, match=r"ca\.crt: the CA that issued .*a\.crt expired at") as caught:
        read(files)
    assert "rlctl certs init" in caught.value.next_step


def test_the_end_of_a_certificate_in_use_is_logged_once(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    material = TlsMaterial(authority.issue("stage/a"))
    assert material.now().expires > days_ago(-89)
    assert not caplog.text
    later = days_ago(-91)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return later

    monkeypatch.setattr(tls_files_module.datetime, "datetime", Later)
    for _ in range(2):
        assert material.now().identity.name == "a", "it stays in use: connections go on"
    assert caplog.text.count("rlctl://lab/stage/a expired at") == 1


def test_a_certificate_of_another_role_or_slot_is_refused(authority: Authority) -> None:
    tls = Tls(authority.issue("stage/a"))
    tls.require(Role.STAGE, name="a")
    with pytest.raises(RlctlError, match="it is of rlctl://lab/stage/a, and this process needs coordinator"):
        tls.require(Role.COORDINATOR)
    with pytest.raises(RlctlError, match="this process needs stage/b"):
        tls.require(Role.STAGE, name="b")


def test_a_renewed_certificate_is_read_and_a_spoilt_one_is_not(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue("stage/a")
    material = TlsMaterial(files)
    first = material.now()
    assert material.now() is first
    authority.issue("stage/a")
    second = material.now()
    assert second.cert != first.cert
    files.cert.write_text("half of a certif")
    with caplog.at_level(logging.ERROR):
        assert material.now() is second
        assert material.now() is second
    assert len(caplog.records) == 1, "the defect is logged once"
    os.replace(authority.issue("stage/b").cert, files.cert)
    os.replace(authority.files("stage/b").key, files.key)
    assert material.now() is second, "the identity of a process does not change"


def test_launchers_issue_what_is_missing_and_renew_in_the_last_third(authority: Authority) -> None:
    first = authority.ensured("stage/a").cert.read_bytes()
    assert authority.ensured("stage/a").cert.read_bytes() == first
    for age, renewed in ((59, False), (61, True), (91, True)):
        made = authority.issue("stage/a", days=90, begins=days_ago(age)).cert.read_bytes()
        assert (authority.ensured("stage/a").cert.read_bytes() != made) is renewed, age


def test_a_damaged_certificate_is_issued_again(authority: Authority) -> None:
    files = authority.ensured("stage/a")
    files.cert.write_text("")
    assert authority.ensured("stage/a").cert.read_text().startswith("-----BEGIN CERTIFICATE")


def test_near_the_end_of_the_ca_certificates_end_with_it(tmp_path: Path) -> None:
    authority = Authority.init(tmp_path, "lab", days=39)
    first = authority.issue("stage/a", days=90, begins=days_ago(61)).cert.read_bytes()
    renewed = authority.ensured("stage/a").cert.read_bytes()
    assert renewed != first, "it was in its last third"
    assert authority.ensured("stage/a").cert.read_bytes() == renewed
    last = authority.issue("stage/b", days=128, begins=days_ago(90)).cert.read_bytes()
    assert authority.ensured("stage/b").cert.read_bytes() == last, "a new one would end no later"


def test_a_supervisor_renews_what_it_has_issued_with_the_same_hosts(authority: Authority) -> None:
    files = authority.ensured("gateway/g", hosts=["10.0.0.5"])
    old = authority.issue("gateway/g", days=90, begins=days_ago(61)).cert.read_bytes()
    authority.renew()
    assert files.cert.read_bytes() != old
    assert "10.0.0.5" in names(files.cert)[2]


def test_without_the_key_of_the_ca_nothing_is_issued(authority: Authority) -> None:
    made = authority.ensured("stage/a")
    (authority.directory / "ca.key").unlink()
    assert authority.ensured("stage/a") == made
    with pytest.raises(RlctlError, match=r"stage/b\.crt: it is missing") as caught:
        authority.ensured("stage/b")
    assert f"rlctl certs issue {authority.directory} stage/b" in caught.value.next_step


@pytest.mark.parametrize("path", ["stage/../ca", "../x", "stage", "client/a/b"])
def test_an_identity_cannot_leave_the_directory(authority: Authority, path: str) -> None:
    with pytest.raises(RlctlError) as caught:
        authority.issue(path)
    assert caught.value.reason is Reason.TLS_INVALID


def test_processes_that_issue_one_certificate_at_once_leave_a_pair_that_matches(authority: Authority) -> None:
    with ThreadPoolExecutor(4) as threads:
        issuing = [threads.submit(Authority(authority.directory).issue, "client/a") for _ in range(16)]
        (files,) = {each.result() for each in issuing}
    assert str(read(files).identity) == "rlctl://lab/client/a"


def test_a_certificate_that_cannot_be_written_is_named_with_the_reason(authority: Authority, tmp_path: Path) -> None:
    (authority.directory / "stage").write_text("")
    with pytest.raises(RlctlError, match=r"stage/a\.crt: it cannot be written: File exists"):
        authority.ensured("stage/a")
    with pytest.raises(RlctlError, match=r"ca\.crt: it cannot be written: Not a directory"):
        Authority.init(authority.directory / "ca.crt" / "tls", "lab")


def test_files_that_could_not_be_read_once_are_read_again(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue("stage/a")
    material = TlsMaterial(files)
    before = material.now()
    authority.issue("stage/a")
    now = 1000.0
    attempts = 0

    def fails(_: TlsFiles) -> Material:
        nonlocal attempts
        attempts += 1
        raise Reason.TLS_INVALID.error("Input/output error")

    monkeypatch.setattr(tls_files_module.time, "monotonic", lambda: now)
    monkeypatch.setattr(tls_files_module, "read", fails)
    for _ in range(3):
        for _ in range(5):
            assert material.now() is before
        now += tls_files_module.RETRY_S
    assert attempts == 3
    assert caplog.text.count("Input/output error") == 1
    monkeypatch.setattr(tls_files_module, "read", read)
    assert material.now().cert == files.cert.read_bytes() != before.cert

"""The access file: principals with their scopes, hashes of their tokens, and their certificates. JSON.

SHA-256 is enough to protect a token of 32 random bytes: 2^256 values cannot be tried. Slow hashes protect passwords of
little entropy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlctl.contract import quotas
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.scopes import PRINCIPAL, RESERVED, Grant, Principal
from rlctl.runtime import private_files

log = logging.getLogger(__name__)

VERSION = 1

LOOK_S = 1.0
"""Interval of a server's checks for changes of the file, seconds."""

ID_LENGTH = 8

_HEX = frozenset("0123456789abcdef")


def make_token() -> str:
    """Return a new token. Its prefix lets scanners of secrets find tokens in logs and commits."""
    return f"rlctl_{secrets.token_urlsafe(32)}"


def hash_of(token: str) -> str:
    """Return the stored form of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True)
class TokenHash:
    """A token of a principal. ``expires``: expiry in seconds since the epoch; None: never."""

    sha256: str
    created: float
    expires: float | None = None

    @property
    def id(self) -> str:
        """Return the name of the token in lists."""
        return self.sha256[:ID_LENGTH]

    def valid(self, now: float) -> bool:
        return self.expires is None or now < self.expires


@dataclass(frozen=True)
class Entry:
    """A principal.

    Attributes:
        certificates: URIs of the identities that authenticate the principal.
        max_in_flight: quota of requests in flight at each server; None: the quota of the file.
    """

    name: str
    scopes: tuple[Grant, ...]
    tokens: tuple[TokenHash, ...] = ()
    certificates: tuple[str, ...] = ()
    max_in_flight: int | None = None

    def principal(self, max_in_flight: int | None) -> Principal:
        """Return the principal. ``max_in_flight``: the quota of the file."""
        own = self.max_in_flight
        return Principal(self.name, frozenset(self.scopes), max_in_flight if own is None else own)


class Principals(dict[str, Entry]):
    """The principals of a file, by name.

    Attributes:
        max_in_flight: quota of each principal without a quota of its own; None: no quota.
    """

    max_in_flight: int | None = None


def read(path: Path) -> Principals:
    """Return the principals of a file by name. Raises FIELD_INVALID that names the invalid entry."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _invalid(path, f"it cannot be read: {error}") from None
    top = _fields(path, "the file", document, {"version": int, "principals": list}, {"max_in_flight": int})
    if top["version"] != VERSION:
        raise _invalid(path, f"version is {top['version']}; this rlctl reads version {VERSION}")
    entries = Principals()
    entries.max_in_flight = _quota(path, "max_in_flight", top)
    hashes: set[str] = set()
    subjects: set[str] = set()
    for index, each in enumerate(top["principals"]):
        entry = _entry(path, f"principals[{index}]", each)
        entry_hashes = {token.sha256 for token in entry.tokens}
        if entry.name in entries or entry_hashes & hashes or subjects.intersection(entry.certificates):
            raise _invalid(path, f"principals[{index}]: its name, a token or a certificate stands twice in the file")
        hashes |= entry_hashes
        subjects.update(entry.certificates)
        entries[entry.name] = entry
    return entries


@contextlib.contextmanager
def changing(path: Path, *, new: bool = False) -> Iterator[Principals]:
    """Yield the principals of a file, and write them at the end of the block. An exception leaves the file unchanged.

    Other changes on this host wait for the end of the block. ``new``: a missing file has no principals. Raises
    FIELD_INVALID.
    """
    with contextlib.ExitStack() as lock:
        try:
            if new:
                private_files.make_directory(path.parent)
            lock.enter_context(private_files.locked(path.parent))
        except OSError as error:
            raise _invalid(path, f"its directory cannot be locked: {error}") from None
        entries = Principals() if new and not path.exists() else read(path)
        yield entries
        write(path, entries, max_in_flight=entries.max_in_flight)


def write(path: Path, entries: Mapping[str, Entry], *, max_in_flight: int | None = None) -> None:
    """Replace the file atomically, so that a server never reads half of the file.

    ``max_in_flight``: quota of each principal without a quota of its own.
    """
    quota = {} if max_in_flight is None else {"max_in_flight": max_in_flight}
    principals = [_document(entry) for _, entry in sorted(entries.items())]
    document = {"version": VERSION, **quota, "principals": principals}
    try:
        private_files.make_directory(path.parent)
        private_files.replace(path, json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise _invalid(path, f"it cannot be written: {error}") from None


@dataclass
class AccessFile:
    """The principals of a file, reread after changes. Safe on several threads.

    Attributes:
        revision: grows with each reread of the file, and when a token expires or, by a clock set back, is valid again.
    """

    path: Path
    revision: int = 0
    _by_hash: dict[str, tuple[Principal, TokenHash]] = field(default_factory=dict)
    _by_certificate: dict[str, Principal] = field(default_factory=dict)
    _by_name: dict[str, Principal] = field(default_factory=dict)
    _seen: tuple[int, int, int] | None = None
    _looked: float = 0.0
    _trouble: str = ""
    _valid: frozenset[str] = frozenset()
    """Hashes of the tokens that were valid at the last look."""

    def __post_init__(self) -> None:
        """Read the file. Raises FIELD_INVALID."""
        self._seen = self._stamp()
        self._take(read(self.path))
        self._looked = time.monotonic()

    def of_token(self, token: str) -> Principal | None:
        self.refresh()
        entry = self._by_hash.get(hash_of(token))
        return entry[0] if entry is not None and entry[1].valid(time.time()) else None

    def expiry(self, token: str) -> str:
        """Return when a token of the file has expired, as a text; "": the file has no such token."""
        principal, entry = self._by_hash.get(hash_of(token), (None, None))
        if principal is None or entry is None or entry.expires is None:
            return ""
        expired, now = _written(entry.expires), _written(time.time())
        return f"the token {entry.id} of {principal.name} expired at {expired}, and the server's clock says {now}"

    def of_certificate(self, uri: str) -> Principal | None:
        self.refresh()
        return self._by_certificate.get(uri)

    def of_name(self, name: str) -> Principal | None:
        self.refresh()
        return self._by_name.get(name)

    def refresh(self) -> None:
        """Read the file again if it has changed. An unreadable file leaves the earlier content in force."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        valid = self._valid_now()
        if valid != self._valid:
            self._valid = valid
            self.revision += 1
        stamp = self._stamp()
        if stamp == self._seen:
            return
        try:
            self._take(read(self.path))
        except RlctlError as error:
            if error.message != self._trouble:
                log.error("the earlier principals stay in force: %s", error)
            self._trouble = error.message
            return  # and retry: an unreadable file may become readable without a further change
        self._seen, self._trouble = stamp, ""
        log.info("%s was read again: %d principals", self.path, len(self._by_name))

    def _take(self, entries: Principals) -> None:
        hashes, certificates, names = {}, {}, {}
        for entry in entries.values():
            principal = names[entry.name] = entry.principal(entries.max_in_flight)
            hashes.update({token.sha256: (principal, token) for token in entry.tokens})
            certificates.update(dict.fromkeys(entry.certificates, principal))
        self._by_hash, self._by_certificate, self._by_name = hashes, certificates, names
        self._valid = self._valid_now()
        self.revision += 1

    def _valid_now(self) -> frozenset[str]:
        now = time.time()
        return frozenset(sha256 for sha256, (_, token) in self._by_hash.items() if token.valid(now))

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _entry(path: Path, where: str, value: object) -> Entry:
    optional = {"tokens": list, "certificates": list, "max_in_flight": int}
    fields = _fields(path, where, value, {"name": str, "scopes": list}, optional)
    name = fields["name"]
    if not PRINCIPAL.fullmatch(name) or name in RESERVED:
        raise _invalid(path, f"{where}.name: {name!r} is no name of a principal")
    scopes = []
    for text in _texts(path, f"{where}.scopes", fields["scopes"]):
        try:
            scopes.append(Grant.parse(text))
        except RlctlError as error:
            raise _invalid(path, f"{where}.scopes: {error.message}") from None
    tokens = tuple(
        _token(path, f"{where}.tokens[{index}]", each) for index, each in enumerate(fields.get("tokens", []))
    )
    certificates = tuple(_texts(path, f"{where}.certificates", fields.get("certificates", [])))
    return Entry(name, tuple(scopes), tokens, certificates, _quota(path, f"{where}.max_in_flight", fields))


def _quota(path: Path, where: str, fields: Mapping[str, Any]) -> int | None:
    quota: int | None = fields.get("max_in_flight")
    if quota is not None and not 1 <= quota <= quotas.LARGEST:
        raise _invalid(path, f"{where} is {quota}; it must be from 1 to {quotas.LARGEST}")
    return quota


def _token(path: Path, where: str, value: object) -> TokenHash:
    fields = _fields(path, where, value, {"sha256": str, "created": str}, {"expires": str})
    sha256 = fields["sha256"]
    if len(sha256) != 64 or not _HEX.issuperset(sha256):
        raise _invalid(path, f"{where}.sha256 is not 64 hexadecimal digits")
    try:
        created = datetime.fromisoformat(fields["created"]).timestamp()
        expires = datetime.fromisoformat(fields["expires"]).timestamp() if "expires" in fields else None
    except (ValueError, OverflowError) as error:
        raise _invalid(path, f"{where}: {error}") from None
    return TokenHash(sha256, created, expires)


def _fields(
    path: Path, where: str, value: object, required: Mapping[str, type], optional: Mapping[str, type] | None = None
) -> dict[str, Any]:
    types = {**required, **(optional or {})}
    if not isinstance(value, dict):
        raise _invalid(path, f"{where} is not an object")
    if unknown := sorted(set(value) - set(types)):
        raise _invalid(path, f"{where} has unknown keys: {', '.join(unknown)}; it may have: {', '.join(types)}")
    if missing := [name for name in required if name not in value]:
        raise _invalid(path, f"{where} lacks {', '.join(missing)}")
    for name, each in value.items():
        if not isinstance(each, types[name]) or isinstance(each, bool):
            raise _invalid(path, f"{where}.{name} must be of type {types[name].__name__}")
    return value


def _texts(path: Path, where: str, values: list[object]) -> Iterator[str]:
    for each in values:
        if not isinstance(each, str) or not each:
            raise _invalid(path, f"{where}: {each!r} is no text")
        yield each


def _document(entry: Entry) -> dict[str, Any]:
    document: dict[str, Any] = {"name": entry.name, "scopes": [str(scope) for scope in entry.scopes]}
    if entry.tokens:
        document["tokens"] = [
            {
                "sha256": token.sha256,
                "created": _written(token.created),
                **({} if token.expires is None else {"expires": _written(token.expires)}),
            }
            for token in entry.tokens
        ]
    if entry.certificates:
        document["certificates"] = list(entry.certificates)
    if entry.max_in_flight is not None:
        document["max_in_flight"] = entry.max_in_flight
    return document


def _written(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


def _invalid(path: Path, why: str) -> RlctlError:
    return Reason.FIELD_INVALID.error(f"access file {path}: {why}", field="access_file")

"""``rlctl tokens``: the access file with the scopes of named tokens and certificates."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.app.types import DURATION
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import Table
from rlctl.contract import quotas
from rlctl.contract.errors import Reason
from rlctl.contract.scopes import DEFAULT, PRINCIPAL, RESERVED, Grant

if TYPE_CHECKING:
    from rlctl.transport.access_file import Entry, Principals, TokenHash

QUOTA = click.IntRange(1, quotas.LARGEST)

_file = click.option(
    "--file",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="RLCTL_ACCESS_FILE",
    show_envvar=True,
    help="The access file.",
)


@click.command("new", cls=Command)
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    metavar="SCOPE[:NAME]",
    help="viewer, rollout, weights[:MODEL], adapters[:ADAPTER], admin, gateway or fleet. Not for a further token of a"
    " principal, which has the scopes of the first.  [repeatable]",
)
@click.option("--expires", type=DURATION, metavar="DURATION", help="The token ends after this time.  [default: never]")
@click.option(
    "--certificate",
    "certificates",
    multiple=True,
    metavar="URI",
    help="Let the certificate rlctl://FLEET/client/NAME stand for the principal, instead of a new token.  [repeatable]",
)
@click.option(
    "--max-in-flight",
    type=QUOTA,
    metavar="NUMBER",
    help="Quota of a new principal: its most requests in flight at each server.  [default: the quota of the file]",
)
@_file
@pass_settings
def tokens_new(
    settings: Settings,
    name: str,
    scopes: tuple[str, ...],
    expires: float | None,
    certificates: tuple[str, ...],
    max_in_flight: int | None,
    file: Path,
) -> None:
    """Make a token, and print it: the file keeps only its hash.

    For a principal of the file, the new token is valid beside its earlier ones, until `rlctl tokens revoke NAME
    --keep-newest`. Servers read the file again within a second.
    """
    from rlctl.transport import access_file
    from rlctl.transport.tls.identity import Identity

    certificates = tuple(str(Identity.of(uri)) for uri in certificates)
    grants = tuple(Grant.parse(text) for text in scopes)
    if not PRINCIPAL.fullmatch(name) or name in RESERVED:
        raise Reason.FIELD_INVALID.error(
            f"{name!r} is no name of a principal: 1 to 128 letters, digits and . _ @ / -, none of "
            + ", ".join(sorted(RESERVED)),
            field="name",
        )
    now = time.time()
    token = "" if certificates else access_file.make_token()
    expiry = None if expires is None else now + expires
    hashes = (access_file.TokenHash(access_file.hash_of(token), now, expiry),) if token else ()
    with access_file.changing(file, new=True) as entries:
        entry = _extensible(entries, name, grants, max_in_flight)
        entry = entry or access_file.Entry(name, grants, max_in_flight=max_in_flight)
        entry = entries[name] = dataclasses.replace(
            entry,
            tokens=(*entry.tokens, *hashes),
            certificates=tuple(dict.fromkeys((*entry.certificates, *certificates))),
        )
    if token:
        show(settings, View({"name": name, "token": token}, lambda _: [Table(("TOKEN",), [[token]])], lambda: [token]))
    settings.say(f"{name} has {', '.join(map(str, entry.scopes))}." + " The token is not shown again." * bool(token))


@click.command("list", cls=Command)
@_file
@pass_settings
def tokens_list(settings: Settings, file: Path) -> None:
    """List the principals, with the ids of their tokens."""
    from rlctl.transport import access_file

    entries = access_file.read(file)
    rows = [row for entry in entries.values() for row in _rows(entry, entries.max_in_flight)]
    headers = ("NAME", "SCOPES", "QUOTA", "TOKEN", "CREATED", "EXPIRES", "CERTIFICATE")
    table = Table(headers, [[str(row[header.lower()] or "") for header in headers] for row in rows])
    show(settings, View(rows, lambda _: [table], lambda: list(dict.fromkeys(str(row["name"]) for row in rows))))


@click.command("revoke", cls=Command)
@click.argument("name")
@click.option("--token", "token_id", metavar="ID", help="Only the token of this id; `rlctl tokens list` shows it.")
@click.option("--keep-newest", is_flag=True, help="All tokens but the newest: the end of a rotation.")
@_file
@pass_settings
def tokens_revoke(settings: Settings, name: str, token_id: str | None, keep_newest: bool, file: Path) -> None:
    """Revoke tokens of a principal; without an option, the principal with all of its tokens and certificates.

    Calls with a revoked token are refused within a second, and streams end with their next message.
    """
    from rlctl.transport import access_file

    if token_id and keep_newest:
        raise Reason.FIELD_CONFLICT.error("--token and --keep-newest exclude each other", field="--token")
    whole = not token_id and not keep_newest
    if whole:
        entry = _of_name(file, access_file.read(file), name)
        settings.confirm(f"Revoke {name}, with {len(entry.tokens)} tokens?")
    with access_file.changing(file) as entries:  # the file may have changed during the question
        entry = _of_name(file, entries, name)
        remaining = () if whole else _remaining(entry, token_id)
        if whole:
            del entries[name]
        else:
            entries[name] = dataclasses.replace(entry, tokens=remaining)
    if whole:
        settings.say(f"{name} is revoked.")
    else:
        settings.say(f"{len(entry.tokens) - len(remaining)} tokens of {name} are revoked, {len(remaining)} remain.")


@click.command("limit", cls=Command)
@click.argument("name")
@click.argument("limit", metavar="NUMBER|none")
@_file
@pass_settings
def tokens_limit(settings: Settings, name: str, limit: str, file: Path) -> None:
    """Set the quota of a principal: its most requests in flight at each server.

    The name `default` sets the quota of the file, for principals without a quota of their own. `none` removes a quota.
    Later requests obey the change within a second; requests in flight go on.
    """
    from rlctl.transport import access_file

    quota = None if limit == "none" else QUOTA(limit, None, click.get_current_context())
    with access_file.changing(file) as entries:
        if name == DEFAULT:
            entries.max_in_flight = quota
        else:
            entry = entries[name] = dataclasses.replace(_of_name(file, entries, name), max_in_flight=quota)
    if name == DEFAULT:
        settings.say(f"Principals without a quota of their own have {_quota(quota)}.")
    else:
        settings.say(f"{name} has {_quota(entry.principal(entries.max_in_flight).max_in_flight)}.")


def _quota(limit: int | None) -> str:
    return "no quota" if limit is None else f"a quota of {limit} requests in flight at each server"


def _extensible(entries: Principals, name: str, grants: tuple[Grant, ...], max_in_flight: int | None) -> Entry | None:
    """Return the principal that gets a further token; None for a new principal.

    Raises FIELD_REQUIRED, and FIELD_CONFLICT for other scopes or another quota than those of the principal.
    """
    entry = entries.get(name)
    if entry is None:
        if not grants:
            raise Reason.FIELD_REQUIRED.error("a new principal needs a scope", field="--scope")
        return None
    if grants and set(grants) != set(entry.scopes):
        raise Reason.FIELD_CONFLICT.error(
            f"{name} has {', '.join(map(str, entry.scopes))}; all tokens of a principal have the same scopes",
            field="--scope",
            next_step="Leave --scope out, revoke the principal first, or choose another name.",
        )
    if max_in_flight not in (None, entry.max_in_flight):
        raise Reason.FIELD_CONFLICT.error(
            f"{name} is in the file; all tokens of a principal share one quota",
            field="--max-in-flight",
            next_step=f"Leave --max-in-flight out, and change the quota: `rlctl tokens limit {name} {max_in_flight}`.",
        )
    return entry


def _remaining(entry: Entry, token_id: str | None) -> tuple[TokenHash, ...]:
    """Return the tokens without this one; for None the newest. Raises FIELD_INVALID if no token is revoked."""
    remaining = tuple(token for token in entry.tokens if token.id != token_id) if token_id else entry.tokens[-1:]
    if len(remaining) == len(entry.tokens):
        token_ids = ", ".join(token.id for token in entry.tokens) or "none"
        raise Reason.FIELD_INVALID.error(
            f"there is nothing to revoke; {entry.name} has tokens: {token_ids}", field="--token"
        )
    return remaining


def _of_name(file: Path, entries: Principals, name: str) -> Entry:
    entry = entries.get(name)
    if entry is None:
        raise Reason.FIELD_INVALID.error(
            f"{file} has no principal {name!r}; it has: {', '.join(entries) or 'none'}", field="name"
        )
    return entry


def _rows(entry: Entry, max_in_flight: int | None) -> list[dict[str, Any]]:
    def row(**own: Any) -> dict[str, Any]:
        empty = {"token": "", "created": "", "expires": "", "certificate": ""}
        quota = entry.principal(max_in_flight).max_in_flight
        return {"name": entry.name, "scopes": ", ".join(map(str, entry.scopes)), "quota": quota, **empty, **own}

    rows = [
        row(token=token.id, created=_moment(token.created), expires=_moment(token.expires)) for token in entry.tokens
    ]
    rows += [row(certificate=subject) for subject in entry.certificates]
    return rows or [row()]


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))

"""The settings of every command: endpoint, output format, time limit.

Each setting is taken from the flag, else from the environment (RLCTL_*), else from the context, else the default. The
default of the endpoint is the only fleet of this machine that is up. A context is a named entry of ``config.yaml``::

    current: lab
    contexts:
      lab:
        endpoint: 10.0.0.5:5080
        token_file: ~/.config/rlctl/lab.token
        tls_ca: ~/.config/rlctl/lab/ca.crt
        tls_cert: ~/.config/rlctl/lab/client/alice.crt
        tls_key: ~/.config/rlctl/lab/client/alice.key
        output: wide
"""

from __future__ import annotations

import functools
import getpass
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from rlctl.cli.app.local_fleets import FleetChoice
from rlctl.cli.app.types import DURATION
from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.supervisor import fleet_state

if TYPE_CHECKING:
    from rlctl.transport.tls.credentials import Tls

FORMATS = ("table", "wide", "json", "jsonl", "yaml", "name")
MACHINE_FORMATS = ("json", "jsonl", "yaml")
COLORS = ("auto", "always", "never")
TLS_KEYS = ("tls_ca", "tls_cert", "tls_key")
CONTEXT_KEYS = ("endpoint", "token", "token_file", *TLS_KEYS, "output", "timeout", "color")

_TARGETING = ("--slot", "--stage", "--request-id")


class Settings:
    """The settings of a run. Read lazily: a broken context file does not stop ``rlctl version``."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self.arguments = list(arguments)
        self.flags: dict[str, Any] = {}
        self.request_id = ""
        self.mutating = False
        self.fleet_choice = FleetChoice()
        self._announced = False

    # Values.

    @property
    def endpoint(self) -> str:
        """Address of the coordinator. Raises as :meth:`FleetChoice.endpoint`."""
        return self.fleet_choice.endpoint(self._explicit_endpoint)

    @property
    def has_fleet(self) -> bool:
        """Whether an endpoint is set, or a fleet is up on this machine."""
        return self._explicit_endpoint is not None or bool(fleet_state.up())

    def fleet_name(self, explicit: str | None) -> str:
        """Return the name of a fleet on this machine, ``explicit`` if set. Raises as :meth:`FleetChoice.name`."""
        return self.fleet_choice.name(explicit, self._explicit_endpoint)

    @property
    def output(self) -> str:
        return self._choice("output", FORMATS)

    @property
    def color(self) -> str:
        return self._choice("color", COLORS)

    @property
    def timeout_s(self) -> float | None:
        """Time limit of the command, seconds; None: the command's default."""
        value = self._get("timeout", None)
        try:
            return None if value is None else DURATION.convert(value, None, None)
        except click.BadParameter as error:
            raise self._bad("timeout", error.message) from None

    @property
    def quiet(self) -> bool:
        return bool(self.flags.get("quiet"))

    @property
    def verbose(self) -> bool:
        """Logs on stderr."""
        return bool(self.flags.get("verbose"))

    @property
    def yes(self) -> bool:
        return bool(self.flags.get("yes"))

    @property
    def dry_run(self) -> bool:
        """Check everything, change nothing."""
        return bool(self.flags.get("dry_run"))

    @property
    def token(self) -> str | None:
        """The bearer token: RLCTL_TOKEN_FILE, RLCTL_TOKEN, the context's token_file or token."""
        from rlctl.transport.auth import load_token

        token = load_token()
        if token is None and self.context.get("token_file"):
            token = load_token({}, file=os.path.expanduser(str(self.context["token_file"])))
        return token or str(self.context.get("token", "")) or None

    @property
    def tls(self) -> Tls | Literal[False]:
        """The certificate: RLCTL_TLS_CA, _CERT and _KEY, else the context's, else that of a user of a local fleet.

        `rlctl up --tls` issues certificates for users of a fleet on this machine. Raises as
        :func:`~rlctl.transport.tls.credentials.load_tls`.
        """
        from rlctl.transport.tls.credentials import Tls, load_tls

        files = {key.removeprefix("tls_"): os.path.expanduser(str(self.context.get(key, ""))) for key in TLS_KEYS}
        tls = load_tls() or load_tls({}, **files)
        if tls is None and (directory := self.fleet_choice.certificates(self.endpoint)):
            from rlctl.transport.tls.authority import Authority

            tls = Tls(Authority(Path(directory)).ensured(f"client/{getpass.getuser()}"))
        return tls or False

    @functools.cached_property
    def context(self) -> dict[str, Any]:
        """The chosen entry of the context file; {} without an entry."""
        name, source = self.flags.get("context"), config_file()
        config = _load(source)
        name = name or config.get("current")
        if not name:
            return {}
        contexts = config["contexts"]
        if name not in contexts:
            context_names = ", ".join(sorted(contexts)) or "none"
            raise _broken(source, f"there is no context {name!r}; there are: {context_names}")
        return {key: value for key, value in contexts[name].items() if value is not None}

    def _get(self, name: str, default: Any) -> Any:
        if self.flags.get(name) is not None:
            return self.flags[name]
        return self.context.get(name, default)

    @property
    def _explicit_endpoint(self) -> str | None:
        endpoint = self._get("endpoint", None)
        return None if endpoint is None else str(endpoint)

    def _choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = str(self._get(name, choices[0]))
        if value not in choices:
            raise self._bad(name, f"it must be one of {', '.join(choices)}")
        return value

    def _bad(self, name: str, why: str) -> RlctlError:
        return _broken(config_file(), f"{name} is {self.context.get(name)!r}: {why}")

    # Output to the user.

    def say(self, text: str) -> None:
        """Print a text that is not data on stderr, unless --quiet is set."""
        if not self.quiet:
            click.echo(text, err=True)

    def announce_fleet(self, *, done: bool = False) -> None:
        """Print once, before a change, the fleet that was chosen without an explicit endpoint.

        In a machine format the line is printed when the change is ``done``: an error is the only line on stderr.
        """
        fleet = self.fleet_choice.fleet
        if fleet is not None and not self._announced and (done or self.output not in MACHINE_FORMATS):
            self._announced = True
            self.say(f"Fleet {fleet.name} at {fleet.endpoint}, the only fleet up on this machine.")

    def confirm(self, question: str, *, unasked: bool = True) -> None:
        """Ask the user, unless --yes is set or the terminal cannot answer. Raises click.Abort on no.

        Without a terminal and with ``unasked`` False the method raises FIELD_REQUIRED.
        """
        if self.yes:
            return
        if sys.stdin.isatty() and sys.stderr.isatty():
            click.confirm(question, abort=True, err=True)
        elif not unasked:
            raise Reason.FIELD_REQUIRED.error(
                "the command needs a confirmation, and there is no terminal to ask on",
                field="--yes",
                next_step="Add --yes.",
            )

    def command(self, *, request_id: str = "", slots: Sequence[str] = ()) -> str:
        """Return this command line with this request_id, or with these slots in place of the command's targets.

        A chosen fleet is named: later the only fleet that is up may be a different fleet.
        """
        words = ["rlctl", *_without(self.arguments, _TARGETING if slots else ("--request-id",))]
        if self.fleet_choice.fleet is not None:
            words += ["--endpoint", self.endpoint]
        for slot in slots:
            words += ["--slot", slot]
        if request_id:
            words += ["--request-id", request_id]
        return shlex.join(words)


def config_file() -> Path:
    """Return the file of contexts: XDG_CONFIG_HOME/rlctl/config.yaml."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(Path.home(), ".config")
    return Path(base) / "rlctl" / "config.yaml"


def _load(path: Path) -> dict[str, Any]:
    """Return the file's content, checked; names are texts."""
    if not path.exists():
        return {"contexts": {}}
    import yaml

    try:
        config = yaml.safe_load(path.read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _broken(path, str(error)) from None
    if not isinstance(config, dict) or set(config) - {"current", "contexts"}:
        raise _broken(path, "it may hold `current` and `contexts` only")
    contexts = config.get("contexts") or {}
    if not isinstance(contexts, dict):
        raise _broken(path, "contexts must map names to settings")
    for name, context in contexts.items():
        unknown = set(context) - set(CONTEXT_KEYS) if isinstance(context, dict) else {"its content"}
        if unknown:
            raise _broken(
                path,
                f"context {name!r}: {', '.join(sorted(map(str, unknown)))} is not among {', '.join(CONTEXT_KEYS)}",
            )
        for key, value in context.items():
            if isinstance(value, bool) or not isinstance(value, str | int | float | None):
                raise _broken(path, f"context {name!r}: {key} is {value!r}, which is no text")
    contexts_by_name = {str(name): context for name, context in contexts.items()}
    return {"current": str(config.get("current") or ""), "contexts": contexts_by_name}


def _broken(path: Path, why: str) -> RlctlError:
    return Reason.FIELD_INVALID.error(f"{path}: {why}", field="context")


def _without(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    remaining, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in options:
            skip = True
        elif argument.partition("=")[0] not in options:
            remaining.append(argument)
    return remaining

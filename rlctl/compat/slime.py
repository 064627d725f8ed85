"""What slime's rollout functions ask for: where each model answers.

Source of the names: slime's documentation of ``--sglang-config`` (``get_model_url``, ``args.sglang_model_routers``).
There a name that is not known becomes the default model; here it is an error.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from rlctl.cli import state
from rlctl.errors import Reason


def set_model_routers(args: Any, fleet: str = "default") -> dict[str, tuple[str, int]]:
    """Fill ``args.sglang_model_routers`` with the routers of a fleet that is up on this machine, and return it.

    ``fleet``: its name, as ``rlctl up --name`` or ``fleet.name`` has it. Maps model names to (host, port), as slime
    does: of a model's router, or of its gateway where it has none. Models without a gateway are left out. Raises
    UNREACHABLE: no fleet of that name is up.
    """
    found = state.read(fleet)
    if found is None or not found.alive:
        raise Reason.UNREACHABLE.error(
            f"no fleet {fleet!r} is up on this machine", field="fleet", next_step="`rlctl up` starts one."
        )
    routers = {}
    for model, url in {**found.gateways, **found.routers}.items():
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        routers[model] = (parts.hostname, parts.port)
    args.sglang_model_routers = routers
    return routers


def get_model_url(args: Any, name: str, path: str = "/generate") -> str:
    """URL of a path at a model's gateway, out of ``args.sglang_model_routers``.

    Raises MODEL_NOT_FOUND, naming the models that there are, and FIELD_REQUIRED where nothing has filled the attribute.
    """
    routers: dict[str, tuple[str, int]] | None = getattr(args, "sglang_model_routers", None)
    if routers is None:
        raise Reason.FIELD_REQUIRED.error(
            "args.sglang_model_routers is not set", field="sglang_model_routers",
            next_step="rlctl.compat.slime.set_model_routers(args, FLEET) fills it.",
        )  # fmt: skip
    if name not in routers:
        raise Reason.MODEL_NOT_FOUND.error(
            f"no model {name!r} has a gateway; there are: {', '.join(sorted(routers)) or 'none'}", field="name",
            next_step="`gateway: HOST:PORT` in its model, or `rlctl up --gateways HOST`, gives it one.",
        )  # fmt: skip
    host, port = routers[name]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/{path.removeprefix('/')}"

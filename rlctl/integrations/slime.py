"""slime's functions for rollouts: the URL of each model, and engines in the bundles of slime's trainer.

Source of the names: slime's documentation of ``--sglang-config`` (``get_model_url``, ``args.sglang_model_routers``),
and ``slime/ray/placement_group.py``, ``slime/ray/rollout.py`` (arguments of ``start_rollout_servers``). In slime an
unknown name becomes the default model; here an unknown name is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from rlctl.contract.errors import Reason
from rlctl.engine import known_options
from rlctl.integrations.child_fleet import Up, cluster_flags, given
from rlctl.launch.supervisor import fleet_state

SHARE = 0.2
"""A rank's share of its bundle: the share of slime's own engines, beside the 0.4 of slime's trainer."""

_FLAGS = ("hf_checkpoint", "rollout_num_gpus", "rollout_num_gpus_per_engine", "num_gpus_per_node",
          "prefill_num_servers", "router_policy", "sglang_config")  # fmt: skip
_NOT_SGLANG = ("config", "model_routers", "router_", "server_concurrency")
"""Settings named ``sglang_...`` in slime that are not arguments of SGLang."""


def start_rollout_servers(
    args: Any,
    pg: tuple[Any, Sequence[int], Sequence[int]],
    *,
    name: str = "slime",
    share: float = SHARE,
    flags: Sequence[str] = (),
) -> Up:
    """Start the engines of ``args`` in the bundles that slime's trainer reserves for rollouts.

    ``args``: slime's; only arguments that ``rlctl up`` has too are used. ``args.sglang_model_routers`` is filled.
    ``pg``: ``create_placement_groups(args)["rollout"]``: (placement group, bundle indices, GPU ids); the n-th GPU of
    the deployment plan is the n-th of these bundles. ``name``: of the fleet on this machine. ``share``: a rank's share
    of its bundle. ``flags``: further flags of ``rlctl up``, for example ``["--insecure"]``.

    Returns the fleet, which ends with this process. Raises the error of ``rlctl up``.
    """
    group, bundles, _ = pg
    fleet = Up(name, [*cluster_flags(), *given(group, bundles, share).flags, *_flags(args), *flags])
    try:
        set_model_routers(args, name)
    except BaseException:
        fleet.stop()
        raise
    return fleet


def _flags(args: Any) -> Iterator[str]:
    """Yield slime's arguments as flags of ``rlctl up``."""
    for name in _FLAGS:
        if (value := getattr(args, name, None)) is not None:
            yield from (f"--{name.replace('_', '-')}", str(value))
    options = known_options("sglang", {})
    for attribute, value in sorted(vars(args).items()):
        name = attribute.removeprefix("sglang_")
        if name == attribute or name.startswith(_NOT_SGLANG):
            continue
        if value is None or value is False or value in ("", []):  # zero is a valid value of an argument
            continue
        if options is None or (name in options.names and name not in options.taken):
            text = "true" if value is True else value if isinstance(value, str) else json.dumps(value)
            yield f"--sglang-{name.replace('_', '-')}={text}"


def set_model_routers(args: Any, fleet: str = "default") -> dict[str, tuple[str, int]]:
    """Fill ``args.sglang_model_routers`` with the routers of a running fleet on this machine, and return the routers.

    ``fleet``: name in ``rlctl up --name`` or ``fleet.name``. Maps model names to (host, TCP port), as slime does: of a
    model's router, else of its gateway. Models without a gateway are left out. Raises UNREACHABLE if no fleet of that
    name runs.
    """
    state = fleet_state.read(fleet)
    if state is None or not state.alive:
        raise Reason.UNREACHABLE.error(
            f"no fleet {fleet!r} is up on this machine", field="fleet", next_step="`rlctl up` starts a fleet."
        )
    routers = {}
    for model, url in {**state.gateways, **state.routers}.items():
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        routers[model] = (parts.hostname, parts.port)
    args.sglang_model_routers = routers
    return routers


def get_model_url(args: Any, name: str, path: str = "/generate") -> str:
    """Return the URL of a path at a model's gateway, from ``args.sglang_model_routers``.

    Raises MODEL_NOT_FOUND, with the known models, and FIELD_REQUIRED if the attribute is not filled.
    """
    routers: dict[str, tuple[str, int]] | None = getattr(args, "sglang_model_routers", None)
    if routers is None:
        raise Reason.FIELD_REQUIRED.error(
            "args.sglang_model_routers is not set", field="sglang_model_routers",
            next_step="rlctl.integrations.slime.set_model_routers(args, FLEET) fills it.",
        )  # fmt: skip
    if name not in routers:
        raise Reason.MODEL_NOT_FOUND.error(
            f"no model {name!r} has a gateway; there are: {', '.join(sorted(routers)) or 'none'}", field="name",
            next_step="`gateway: HOST:PORT` in its model, or `rlctl up --gateways HOST`, gives it one.",
        )  # fmt: skip
    host, port = routers[name]
    url_host = f"[{host}]" if ":" in host else host
    return f"http://{url_host}:{port}/{path.removeprefix('/')}"

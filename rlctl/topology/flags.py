"""The flags of the command line for a topology: slime's flags, and rlctl's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from rlctl.topology.problems import COMMAND_LINE, Problems

if TYPE_CHECKING:
    from rlctl.topology.document import Node


ADDRESSES = "--rollout-external-engine-addrs"
STANDS_FOR = {"name": "--model", "num_gpus": "--rollout-num-gpus", "external": ADDRESSES}
"""Keys of a file, each with the flag that sets its value without a file."""


@dataclass(frozen=True)
class Flags:
    """Flags of ``rlctl up``, ``plan`` and ``validate``; None or empty: not given. Fields have the names of flags, but:

    Attributes:
        num_gpus, num_gpus_per_engine, external, external_addresses: slime's ``--rollout-...``.
        sglang: ``--sglang-*`` by name without the prefix, below every other setting of SGLang engines.
        model: ``--model``, for a fleet without a file.
        options: ``--option``, settings of every engine, below the file's.
    """

    hf_checkpoint: str | None = None
    num_gpus: int | None = None
    num_gpus_per_engine: int | None = None
    num_gpus_per_node: int | None = None
    external: bool = False
    external_addresses: Sequence[str] = ()
    prefill_num_servers: int | None = None
    router_policy: str | None = None
    sglang: Mapping[str, str] = field(default_factory=dict)
    engine: str | None = None
    model: str | None = None
    device: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    listen: str | None = None
    name: str | None = None
    launcher: str | None = None
    gateways: str | None = None
    address: str | None = None
    placement_group: str | None = None
    bundles: Sequence[int] = ()
    bundle_share: float | None = None
    insecure: bool = False
    tls: str | None = None
    web: str | None = None


def exclusions(flags: Flags, problems: Problems, *, file: bool) -> None:
    """Report flags that slime refuses together: a file, --prefill-num-servers and --rollout-external are exclusive."""
    external = flags.external or bool(flags.external_addresses)
    reasons = {
        "--prefill-num-servers": (
            flags.prefill_num_servers is not None,
            "prefill and decode are groups of the file",
        ),
        "--rollout-external" if flags.external else ADDRESSES: (
            external, "servers that run already have a topology of their own; name them in the file with `external:`",
        ),
        "--model": (flags.model is not None, "the file names its models"),
    }  # fmt: skip
    if file:
        for flag, (is_set, why) in reasons.items():
            if is_set:
                problems.add(0, flag, f"it cannot be given with a file: {why}", source=COMMAND_LINE)
    elif external and flags.prefill_num_servers is not None:
        problems.add(
            0, "--prefill-num-servers", "it cannot be given with --rollout-external: nothing is started there",
            source=COMMAND_LINE,
        )  # fmt: skip
    if flags.external and not flags.external_addresses:
        problems.add(0, "--rollout-external", f"it needs {ADDRESSES}", source=COMMAND_LINE)
    for each in fields(flags):
        if getattr(flags, each.name) == "":
            problems.add(0, f"--{each.name.replace('_', '-')}", "it must not be empty", source=COMMAND_LINE)


def document_of(flags: Flags, problems: Problems) -> Node:
    """Return the document that the flags alone stand for."""
    from rlctl.topology import document  # loads yaml

    per_engine = flags.num_gpus_per_engine or 1
    total = flags.num_gpus if flags.num_gpus is not None else per_engine
    if total < 1 and not flags.external_addresses:
        problems.add(0, "--rollout-num-gpus", f"{total} GPUs start no engine; a fleet has one engine or more")
        total = per_engine
    groups: list[dict[str, object]]
    if flags.external_addresses:
        groups = [{"worker_type": "regular", "external": list(flags.external_addresses)}]
    elif flags.prefill_num_servers is not None:
        prefill = flags.prefill_num_servers * per_engine
        if not 0 < prefill < total:
            problems.add(
                0,
                "--prefill-num-servers",
                f"{flags.prefill_num_servers} prefill engines of {per_engine} GPUs take {prefill} of "
                f"--rollout-num-gpus {total}; prefill and decode both need some",
            )
        groups = [
            {"worker_type": "prefill", "num_gpus": max(prefill, 1)},
            {"worker_type": "decode", "num_gpus": max(total - prefill, 1)},
        ]
    else:
        groups = [{"worker_type": "regular", "num_gpus": total}]
    slime = flags.external_addresses or flags.prefill_num_servers is not None or flags.sglang
    models = [{"name": flags.model or "actor", "server_groups": groups}]
    return document.of({"sglang" if slime else "models": models})

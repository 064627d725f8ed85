"""Valid topologies that cannot be run, each with the reason.

Reasons of this version are errors of ``validate`` and ``up``. Reasons of this machine are refused by ``up``. ``plan``
shows both.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from rlctl.engine import brings_ranks, known_options, spans_nodes
from rlctl.topology.plan import Plan
from rlctl.topology.problems import Problem
from rlctl.topology.resolved import Group, Model, Topology
from rlctl.topology.schema import ROUTERS

PAIRED = ("prefill", "decode")

POLICIES = {
    "": ("consistent_hashing", "round_robin"),
    "sglang-router": ("cache_aware", "manual", "power_of_two", "random", "round_robin"),
}
"""Policies that a router offers, of the names that slime knows; "": policies of ``rlctl gateway`` itself."""


def unsupported(topology: Topology) -> list[Problem]:
    """Return the parts of a topology that this version of rlctl cannot run on any machine."""
    problems = []
    for model in topology.models:
        policies = POLICIES[model.router]
        if model.gateway and model.router_policy and model.router_policy not in policies:
            policy_owner = model.router or "the gateway"
            why = f"{policy_owner} has no policy {model.router_policy!r}; there are: {', '.join(policies)}"
            problems.append(Problem(topology.source, model.line, f"{model.path}.router_policy", why))
        for group in model.groups:
            reasons = _of_group(topology, model, group)
            problems += [Problem(topology.source, group.line, group.path, why) for why in reasons]
    return problems


def missing(plan: Plan, *, gpus: int, cores: int, routers: Collection[str] = ROUTERS) -> list[Problem]:
    """Return the routers, checkpoints, GPUs and cores that this machine lacks. A cluster is checked only at the start.

    ``routers``: installed router programs.
    """
    topology = plan.topology
    problems = [
        Problem(
            topology.source, model.line, f"{model.path}.router.backend",
            f"{model.router} is not installed here: pip install 'rlctl[router]'",
        )
        for model in topology.models
        if model.router and model.router not in routers
    ]  # fmt: skip
    if topology.bundles and plan.places > len(topology.bundles):
        short = (
            f"{len(topology.bundles)} bundles may be used, and the plan has places for {plan.places} (no engine is "
            f"over the end of a node of {topology.num_gpus_per_node})"
        )
        problems.append(Problem(topology.source, 0, "fleet.ray.bundles", short))
    if topology.launcher != "local":
        return problems
    for model in topology.models:
        engines = [engine for engine in plan.engines if engine.spec.model == model.name]
        if engines and not os.path.isdir(os.path.expanduser(model.model_path)):
            problems.append(
                Problem(
                    topology.source, model.line, f"{model.path}.model_path", f"there is no directory {model.model_path}"
                )
            )
    last = max((max(e.spec.gpus, default=-1) for e in plan.engines if e.spec.device == "cuda"), default=-1)
    if last >= gpus:
        problems.append(Problem(topology.source, 0, "", f"it needs {last + 1} GPUs, and this machine has {gpus}"))
    bound = sum(engine.spec.cpus_per_rank * engine.spec.ranks for engine in plan.engines)
    if bound > cores:
        problems.append(
            Problem(topology.source, 0, "", f"its ranks are bound to {bound} cores, and this machine has {cores}")
        )
    return problems


def _of_group(topology: Topology, model: Model, group: Group) -> list[str]:
    reasons = []
    if group.worker_type == "encoder":
        reasons.append(
            "encoder engines cannot be run yet: rlctl's requests are text and tokens, in which there is nothing for "
            "them; `rlctl plan` shows their arguments"
        )
    if group.worker_type in PAIRED and model.engine not in ("torch", "sglang"):
        reasons.append(f"engine {model.engine} has no {group.worker_type} engines")
    if group.worker_type in PAIRED and topology.launcher != "local":
        reasons.append(
            f"prefill and decode engines meet on one host, and launcher {topology.launcher} puts engines on several"
        )
    if model.update_weights and not group.external:
        options = known_options(model.engine, group.overrides)
        reasons += [
            f"{why}: it takes no updates; leave it out, or write update_weights: false"
            for why in (options.frozen.values() if options else ())
        ]
    if len(group.stages) > 1:
        reasons.append(f"no plug-in runs several pipeline stages yet, and {model.engine} has one")
    if group.pp_size > 1 and model.engine != "sglang":
        reasons.append(f"engine {model.engine} has no pipeline-parallel ranks")
    if group.num_gpus_per_engine > topology.num_gpus_per_node and not group.external:
        if topology.launcher == "ray":
            if brings_ranks(model.engine) and not spans_nodes(model.engine):
                reasons.append(f"engine {model.engine} starts no server over several nodes")
        elif group.device == "cuda":
            reasons.append("the local launcher has one node, and the engine needs several")
    return reasons

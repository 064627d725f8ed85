"""What a topology may say and this version cannot run, each with the reason: refused by ``up``, told by ``plan``."""

from __future__ import annotations

from pathlib import Path

from rlctl.engine import brings_ranks
from rlctl.topology.plan import Plan
from rlctl.topology.problems import Problem
from rlctl.topology.resolved import Group, Model

GATEWAY_POLICIES = ("consistent_hashing", "round_robin")
"""Those of slime's names that ``rlctl gateway`` has."""


def unsupported(plan: Plan) -> list[Problem]:
    """What cannot be run, whatever the machine."""
    topology = plan.topology
    found = []
    for model in topology.models:
        if model.gateway and model.router_policy and model.router_policy not in GATEWAY_POLICIES:
            why = f"the gateway has no policy {model.router_policy!r}; there are: {', '.join(GATEWAY_POLICIES)}"
            found.append(Problem(topology.source, model.line, f"{model.path}.router_policy", why))
        for group in model.groups:
            found += [Problem(topology.source, group.line, group.path, why) for why in _of_group(plan, model, group)]
    return found


def missing(plan: Plan, *, gpus: int, cores: int) -> list[Problem]:
    """What this machine lacks for it: checkpoints, GPUs, cores. What a cluster lacks is found out there."""
    topology = plan.topology
    found: list[Problem] = []
    if topology.launcher != "local":
        return found
    for model in topology.models:
        engines = [engine for engine in plan.engines if engine.spec.model == model.name]
        if engines and not Path(model.model_path).expanduser().is_dir():
            found.append(
                Problem(
                    topology.source, model.line, f"{model.path}.model_path", f"there is no directory {model.model_path}"
                )
            )
    last = max((max(e.spec.gpus, default=-1) for e in plan.engines if e.spec.device == "cuda"), default=-1)
    if last >= gpus:
        found.append(Problem(topology.source, 0, "", f"it needs {last + 1} GPUs, and this machine has {gpus}"))
    bound = sum(engine.spec.cpus_per_rank * engine.spec.ranks for engine in plan.engines)
    if bound > cores:
        found.append(
            Problem(topology.source, 0, "", f"its ranks are bound to {bound} cores, and this machine has {cores}")
        )
    return found


def _of_group(plan: Plan, model: Model, group: Group) -> list[str]:
    found = []
    if group.worker_type in ("prefill", "decode", "encoder"):
        found.append(
            f"{group.worker_type} engines cannot be run yet: rlctl's generation sends a request to one engine, and "
            "these need two together"
        )
    if len(group.stages) > 1:
        found.append(f"no plug-in runs several pipeline stages yet, and {model.engine} has one")
    if group.pp_size > 1 and model.engine != "sglang":
        found.append(f"engine {model.engine} has no pipeline-parallel ranks")
    if group.num_gpus_per_engine > plan.topology.num_gpus_per_node and not group.external:
        if plan.topology.launcher == "ray":
            if brings_ranks(model.engine):
                found.append(f"engine {model.engine} starts no server over several nodes")
        elif group.device == "cuda":
            found.append("the local launcher has one node, and the engine needs several")
    return found

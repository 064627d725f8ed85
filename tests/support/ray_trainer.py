"""A trainer on a Ray cluster: makes placement groups, kept until its standard input ends.

``ray_trainer.py ADDRESS`` reads a line of JSON at a time and answers each. ``{"make": NAME, "bundles": [{"CPU": 1}]}``
is answered with the group's id and the addresses of its bundles' nodes. ``{"take": NAME, "bundle": 0, "CPU": 1}`` is
answered once an actor of the trainer has the bundle. Further lines: ``{"remove": NAME}``, ``{"state": NAME}``.
``slime`` and ``skyrl`` start engines in a group like these trainers, and ``{"stop": "slime"}`` ends the engines. A
refusal of rlctl is answered as ``{"refused": TEXT}``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlctl.contract.errors import RlctlError
from rlctl.integrations.skyrl import ServerGroup
from rlctl.integrations.slime import start_rollout_servers


class Taking:
    """An actor of the trainer."""

    def here(self) -> str:
        return str(ray.util.get_node_ip_address())


def main(address: str) -> None:
    ray.init(address=address, namespace=f"trainer-{os.getpid()}", log_to_driver=False)
    groups: dict[str, Any] = {}
    fleets: dict[str, Any] = {}
    kept = []

    def obey(order: dict[str, Any]) -> None:
        match order:
            case {"make": name, "bundles": bundles}:
                group = groups[name] = placement_group(bundles, name=name, strategy="PACK")
                group.wait(20)
                addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
                nodes = placement_group_table(group)["bundles_to_node_id"]
                say(id=group.id.hex(), nodes=[addresses[nodes[bundle]] for bundle in sorted(nodes)])
            case {"take": name, "bundle": bundle, "CPU": amount}:
                strategy = PlacementGroupSchedulingStrategy(groups[name], bundle)
                kept.append(ray.remote(Taking).options(num_cpus=amount, scheduling_strategy=strategy).remote())
                say(at=ray.get(kept[-1].here.remote()))
            case {"slime": args, "group": name, "bundles": bundles, "flags": flags}:
                said = argparse.Namespace(**args)
                fleets["slime"] = start_rollout_servers(said, (groups[name], bundles, []), flags=flags)
                say(routers=said.sglang_model_routers, endpoint=fleets["slime"].endpoint)
            case {"skyrl": args, "group": name, "servers": count, "offset": offset, "flags": flags}:
                wanted = ServerGroup(
                    argparse.Namespace(**args), count, placement_group=groups.get(name), engine="torch",
                    placement_group_bundle_offset=offset, share=0.5, flags=flags,
                )  # fmt: skip
                infos = wanted.start()
                fleets["skyrl"] = wanted.fleet
                say(infos=[vars(info) for info in infos], url=wanted.proxy_url)
            case {"stop": which}:
                fleets.pop(which).stop()
                say()
            case {"remove": name}:
                remove_placement_group(groups[name])
                say()
            case {"state": name}:
                say(state=placement_group_table(groups[name])["state"])

    for line in sys.stdin:
        try:
            obey(json.loads(line))
        except RlctlError as error:
            say(refused=str(error))
    ray.shutdown()


def say(**facts: object) -> None:
    print(json.dumps(facts), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    sys.stdout = sys.stderr  # Ray reports dead nodes there
    main(sys.argv[1])

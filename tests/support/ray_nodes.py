"""A Ray cluster on this machine, in a separate process: nodes at 127.0.0.2, 127.0.0.3, ..., on loopback addresses.

Prints its address as a line of JSON. A line ``lose ADDRESS`` on standard input kills that node, ``add ADDRESS CORES``
starts a node, and the end of standard input ends all nodes.
"""

from __future__ import annotations

import json
import os
import sys

from forking import INTERPRETERS

os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    # A lost node is noticed after 1.5 seconds.
    RAY_health_check_initial_delay_ms="0",
    RAY_health_check_period_ms="500",
    RAY_health_check_timeout_ms="1000",
    RAY_health_check_failure_threshold="3",
)
os.environ[INTERPRETERS] = "1"  # forked processes are no children of Ray's actors

from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20
"""Size of the unused object store; about Ray's minimum."""


def main(cores: list[int]) -> None:
    def arguments(address: str, cores: int) -> dict[str, object]:
        return {"num_cpus": cores, "num_gpus": 0, "node_ip_address": address, "object_store_memory": STORE_BYTES}

    head = {**arguments("127.0.0.2", cores[0]), "include_dashboard": False}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
    nodes = {}
    for number, count in enumerate(cores[1:], 3):
        nodes[f"127.0.0.{number}"] = cluster.add_node(**arguments(f"127.0.0.{number}", count))
    say(address=cluster.address)
    for line in sys.stdin:
        match line.split():
            case ["lose", address]:
                cluster.remove_node(nodes.pop(address), allow_graceful=False)
            case ["add", address, count]:
                nodes[address] = cluster.add_node(**arguments(address, int(count)))
        say(nodes=sorted(nodes))
    cluster.shutdown()


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201 - what the test waits for


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])

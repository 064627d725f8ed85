"""On which nodes engines go."""

from __future__ import annotations

from rlctl.launch.ray.node_choice import Node, choose, shortage

NEED = {"GPU": 2.0}


def node(name: str, *, total: float = 8, free: float | None = None, held: float = 0, **ranks: int) -> Node:
    return Node(name, f"10.0.0.{name}", {"GPU": total}, {"GPU": total if free is None else free}, {"GPU": held}, ranks)


def test_a_model_is_spread_then_the_fleet() -> None:
    busy = node("1", held=4, ref=4)
    own = node("2", held=2, actor=2)
    assert choose([own, busy], NEED, 1, "actor") == ["1"]
    assert choose([own, busy], NEED, 1, "reward") == ["2"]
    assert choose([own, busy, node("3")], NEED, 1, "actor") == ["3"]
    assert choose([node("2"), node("1")], NEED, 1, "actor") == ["1"]


def test_what_the_fleet_holds_is_not_free_whatever_the_cluster_still_says() -> None:
    assert choose([node("1", total=4, free=4, held=3)], NEED, 1, "a") is None
    assert choose([node("1", total=4, free=1)], NEED, 1, "a") is None
    assert choose([node("1", total=4, free=3, held=2)], NEED, 1, "a") == ["1"]


def test_an_engine_of_several_parts_has_a_node_for_each() -> None:
    nodes = [node("1"), node("2", free=1), node("3")]
    assert choose(nodes, {"GPU": 8.0}, 2, "a") == ["1", "3"]
    assert choose(nodes, {"GPU": 8.0}, 3, "a") is None


def test_a_shortage_names_what_each_node_has() -> None:
    there = [node("2", total=2, free=1), Node("1", "10.0.0.1", {"CPU": 4.0}, {"CPU": 4.0})]
    assert shortage(there, NEED, 1) == ("no node has 2 GPU free (10.0.0.1 has 0 of 0 GPU; 10.0.0.2 has 1 of 2 GPU)")
    assert shortage([], NEED, 2) == "fewer than 2 nodes have 2 GPU free (the cluster has no nodes)"

"""A radix tree over strings, with values at the ends of pieces of a key. Finds the longest piece that begins a key.

A lookup reads the key once, for any size of the tree. Nodes are split where keys differ, and joined when the difference
is gone: every node except the root has a value or at least two children.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Node(Generic[Value]):
    """A node of the tree.

    Attributes:
        edge: the part of the key between the parent and the node.
        depth: length of the key up to the node.
        values: values of the node, the newest last.
        children: child nodes by the first character of their edges.
    """

    __slots__ = ("children", "depth", "edge", "parent", "values")

    def __init__(self, parent: Node[Value] | None, edge: str) -> None:
        self.parent = parent
        self.edge = edge
        self.depth: int = len(edge) + (parent.depth if parent else 0)
        self.values: dict[Value, None] = {}
        self.children: dict[str, Node[Value]] = {}

    @property
    def newest(self) -> Value:
        """The newest value. Raises StopIteration without a value."""
        return next(reversed(self.values))

    def below(self) -> Value:
        """Return a value at or below the node, from the newest branch at each fork. There always is a value."""
        node = self
        while not node.values:
            node = node.children[next(reversed(node.children))]
        return node.newest


class RadixTree(Generic[Value]):
    """Values by key. Values are hashable, and occur at most once at a node."""

    def __init__(self) -> None:
        self._root: Node[Value] = Node(None, "")

    def put(self, key: str, end: int, value: Value) -> Node[Value]:
        """Add ``value`` at the end of the first ``end`` characters of ``key``, as the newest value."""
        node = self._make(key[:end])
        node.values.pop(value, None)
        node.values[value] = None
        return node

    def remove(self, node: Node[Value], value: Value) -> None:
        del node.values[value]
        while node.parent is not None and not node.values:
            parent = node.parent
            if not node.children:
                del parent.children[node.edge[0]]
                node = parent
            elif len(node.children) == 1:
                (child,) = node.children.values()
                child.edge, child.parent = node.edge + child.edge, parent
                parent.children[child.edge[0]] = child
                return
            else:
                return

    def longest(self, key: str) -> Node[Value] | None:
        """Return the deepest node with a value and a key that begins ``key``."""
        best = None
        for node, matched in self._walk(key):
            if matched == node.depth and node.values:
                best = node
        return best

    def common(self, key: str) -> tuple[Node[Value], int] | None:
        """Return a node for the longest beginning that ``key`` shares with any key, and the length of the beginning."""
        longest = None
        for node, matched in self._walk(key):
            longest = node, matched
        return longest

    def __iter__(self) -> Iterator[Node[Value]]:
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            yield node
            nodes += node.children.values()

    def _walk(self, key: str) -> Iterator[tuple[Node[Value], int]]:
        """Yield the nodes on the way of ``key``, with the shared length. The last edge may be shared in part."""
        node = self._root
        while node.depth < len(key):
            child = node.children.get(key[node.depth])
            if child is None:
                return
            shared = _shared(key, node.depth, child.edge)
            yield child, node.depth + shared
            if shared < len(child.edge):
                return
            node = child

    def _make(self, key: str) -> Node[Value]:
        node, matched = self._root, 0
        for node, matched in self._walk(key):  # noqa: B007 the last one is meant
            pass
        if matched < node.depth:
            node = _split(node, matched)
        if matched < len(key):
            child: Node[Value] = Node(node, key[matched:])
            node.children[child.edge[0]] = child
            node = child
        return node


def _split(lower: Node[Value], depth: int) -> Node[Value]:
    """Insert a node at ``depth`` on the edge to ``lower``. The object ``lower`` stays the same node."""
    upper_parent = lower.parent
    assert upper_parent is not None
    cut = depth - upper_parent.depth
    upper: Node[Value] = Node(upper_parent, lower.edge[:cut])
    upper_parent.children[upper.edge[0]] = upper
    lower.edge, lower.parent = lower.edge[cut:], upper
    upper.children[lower.edge[0]] = lower
    return upper


def _shared(key: str, at: int, edge: str) -> int:
    """Return how many characters of ``edge`` follow in ``key`` from ``at``. Bisects: comparing slices is cheap."""
    if key.startswith(edge, at):
        return len(edge)
    low, high = 0, min(len(edge), len(key) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if key.startswith(edge[low:middle], at + low):
            low = middle
        else:
            high = middle - 1
    return low

"""Generated tokens, log probabilities, loss mask and versions, found by the beginning of a text or of token ids.

A trainer of several turns sends text and trains on tokens. Tokenising the text again may give different tokens, and
gives no log probabilities. So the generated tokens are kept by their text.

- A lookup finds the beginning of a single trajectory, never a combination of several, so the result was generated as it
  is.
- A text is cut only at the end of a given piece (prompt, response), because a tokenizer may join any characters. A key
  of token ids is cut anywhere.
- Of several trajectories with the same beginning the newest is found. A trajectory is dropped when a newer trajectory
  has all of its ends: a repetition or continuation of a text replaces the text.
- Versions are numbers, decimal strings, or names. The age of a number is its distance; the age of a name is the number
  of later versions. A trajectory has the version that was current at its insertion; prompts age as well.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rlctl.contract.errors import Reason
from rlctl.gateway.radix.tree import Node, RadixTree

Version = int | str
Group = TypeVar("Group")
Member = TypeVar("Member")

MAX_TOKENS = 4_000_000
"""Default limit of kept tokens, at about 30 bytes each."""

MAX_AGE = 5
"""Default age in versions at which a trajectory is dropped, as in slime's router."""


@dataclass(frozen=True)
class Piece:
    """A part of a trajectory: a prompt, or a response.

    Attributes:
        text: None if unknown; then neither this piece nor later pieces are found by text.
        tokens: token ids.
        logprobs: natural log probability of each token; empty for a prompt: 0.0 each.
        versions: version of each token, None if unknown; empty for a prompt.
    """

    text: str | None
    tokens: Sequence[int]
    logprobs: Sequence[float] = ()
    versions: Sequence[Version | None] = ()
    loss_mask: Sequence[int] | None = None
    """1 for each token to train on. The default is 1 with log probabilities, else 0."""

    def __post_init__(self) -> None:
        for name in ("logprobs", "versions", "loss_mask"):
            values = getattr(self, name)
            if values and len(values) != len(self.tokens):
                message = f"{len(values)} {name} for {len(self.tokens)} tokens"
                raise Reason.FIELD_INVALID.error(message, field=name)
        if self.text and not self.tokens:
            raise Reason.FIELD_INVALID.error("a piece with text has no tokens", field="tokens")


@dataclass(frozen=True)
class Record:
    """The beginning of a trajectory, in whole pieces if found by text.

    Attributes:
        text: text of the tokens, as far as known.
        loss_mask: 0 for each token of a prompt.
        logprobs: 0.0 for each token of a prompt.
        versions: None for each token of a prompt.
        pieces: the same content in pieces, for a continuation.
    """

    pieces: tuple[Piece, ...]
    text: str
    tokens: list[int]
    logprobs: list[float]
    loss_mask: list[int]
    versions: list[Version | None]


@dataclass(eq=False, slots=True)
class _Trajectory:
    text: str
    tokens: array[int]
    logprobs: array[float]
    loss_mask: bytes
    versions: list[Version | None]
    ends: list[tuple[int, int]]  # of each piece, in tokens and in text (-1: unknown)
    newest: Version
    nodes: list[tuple[RadixTree[_Trajectory], Node[_Trajectory]]] = field(default_factory=list)

    def replaces(self, old: _Trajectory) -> bool:
        """Return whether every lookup of ``old`` also finds this trajectory, which begins with its tokens."""
        ends = dict(self.ends)
        return self.text.startswith(old.text) and all(
            count in ends and text_end in (-1, ends[count]) for count, text_end in old.ends
        )

    def until(self, count: int) -> Record:
        pieces: list[Piece] = []
        begin, text_begin = 0, 0
        for whole_end, text_end in self.ends:
            end = min(whole_end, count)
            if end <= begin:
                break
            has_text = end == whole_end and text_end >= 0
            part = slice(begin, end)
            pieces.append(
                Piece(
                    self.text[text_begin:text_end] if has_text else None,
                    list(self.tokens[part]),
                    list(self.logprobs[part]),
                    self.versions[part],
                    list(self.loss_mask[part]),
                )
            )
            begin, text_begin = end, text_end if has_text else text_begin
        return Record(
            tuple(pieces),
            self.text[:text_begin],
            list(self.tokens[:count]),
            list(self.logprobs[:count]),
            list(self.loss_mask[:count]),
            self.versions[:count],
        )


class Trajectories:
    """Trajectories up to a size and an age. Not thread-safe."""

    def __init__(self, max_tokens: int = MAX_TOKENS, max_age: int = MAX_AGE) -> None:
        for name, value in (("max_tokens", max_tokens), ("max_age", max_age)):
            if value < 1:
                raise Reason.FIELD_INVALID.error(f"{name} is {value}; it must be 1 or more", field=name)
        self._max_tokens = max_tokens
        self._max_age = max_age
        self._texts: RadixTree[_Trajectory] = RadixTree()
        self._ids: RadixTree[_Trajectory] = RadixTree()
        self._used: dict[_Trajectory, None] = {}  # least recently used first
        self._whole: dict[Node[_Trajectory], set[_Trajectory]] = {}  # by the node of their end
        self._by_version: dict[Version, set[_Trajectory]] = {}
        self._current: Version = 0
        self._order: dict[Version, int] = {0: 0}  # order of arrival
        self._came = itertools.count(1)
        self.tokens = 0
        """Number of kept tokens."""

    def __len__(self) -> int:
        return len(self._used)

    def by_text(self, text: str) -> Record | None:
        """Return the longest whole pieces that begin ``text``. The time depends on the length of ``text`` only."""
        node = self._texts.longest(text)
        if node is None:
            return None
        trajectory = node.newest
        return self._use(trajectory, next(count for count, end in trajectory.ends if end == node.depth))

    def by_ids(self, ids: Sequence[int]) -> Record | None:
        common = self._ids.common(_key(ids))
        return self._use(common[0].below(), common[1]) if common else None

    def put(self, pieces: Sequence[Piece]) -> None:
        """Keep a trajectory from its beginning, such as ``found.pieces`` with later pieces.

        A trajectory above the limit of tokens is not kept. Raises FIELD_INVALID for a token id out of range.
        """
        new = self._trajectory([piece for piece in pieces if piece.tokens])
        key = _key(new.tokens)
        if not new.tokens or len(new.tokens) > self._max_tokens:
            return
        text_begin = 0
        for end, text_end in new.ends:
            node = self._hold(new, self._ids, key, end)
            for old in [old for old in self._whole.get(node, ()) if new.replaces(old)]:
                self._drop(old)
            if text_end > text_begin:
                self._hold(new, self._texts, new.text, text_end)
                text_begin = text_end
        self._whole.setdefault(node, set()).add(new)
        self._used[new] = None
        self._by_version.setdefault(new.newest, set()).add(new)
        self.tokens += len(new.tokens)
        while self.tokens > self._max_tokens:
            self._drop(next(iter(self._used)))

    def advance(self, version: Version) -> int:
        """Make ``version`` current, unless a newer version is current. Return the number of dropped trajectories."""
        version = _number(version)
        if version not in self._order:
            self._order[version] = next(self._came)
        if self._behind(version) <= 0:
            self._current = version
        old = [number for number in self._by_version if self._behind(number) >= self._max_age]
        dropped = [trajectory for number in old for trajectory in self._by_version[number]]
        for trajectory in dropped:
            self._drop(trajectory)
        for number in [number for number in self._order if self._behind(number) > self._max_age]:
            del self._order[number]
        return len(dropped)

    def _behind(self, version: Version) -> int:
        """Return how many versions the version is behind the current version; below 0 if newer."""
        current = self._current
        if isinstance(version, int) and isinstance(current, int):
            return current - version
        return self._order.get(current, 0) - self._order.get(version, 0)

    def _trajectory(self, pieces: Sequence[Piece]) -> _Trajectory:
        new = _Trajectory("", array("q"), array("d"), b"", [], [], self._current)
        has_text = True
        for piece in pieces:
            count = len(piece.tokens)
            new.tokens.extend(piece.tokens)
            new.logprobs.extend(piece.logprobs or [0.0] * count)
            new.loss_mask += bytes(piece.loss_mask or [int(bool(piece.logprobs))] * count)
            new.versions += piece.versions or [None] * count
            has_text = has_text and piece.text is not None
            new.text += piece.text or "" if has_text else ""
            new.ends.append((len(new.tokens), len(new.text) if has_text else -1))
        return new

    def _hold(self, new: _Trajectory, tree: RadixTree[_Trajectory], key: str, end: int) -> Node[_Trajectory]:
        node = tree.put(key, end, new)
        new.nodes.append((tree, node))
        return node

    def _use(self, trajectory: _Trajectory, count: int) -> Record:
        self._used[trajectory] = self._used.pop(trajectory)
        return trajectory.until(count)

    def _drop(self, trajectory: _Trajectory) -> None:
        for tree, node in trajectory.nodes:
            tree.remove(node, trajectory)
            _discard(self._whole, node, trajectory)
        _discard(self._by_version, trajectory.newest, trajectory)
        del self._used[trajectory]
        self.tokens -= len(trajectory.tokens)


def _discard(groups: dict[Group, set[Member]], group: Group, member: Member) -> None:
    members = groups.get(group, set())
    members.discard(member)
    if group in groups and not members:
        del groups[group]


def _number(version: Version) -> Version:
    return int(version) if isinstance(version, str) and version.isdecimal() else version


def _key(ids: Sequence[int]) -> str:
    """Return token ids as a string of equal length. Raises FIELD_INVALID for an invalid token id."""
    try:
        return "".join(map(chr, ids))
    except (ValueError, OverflowError, TypeError):
        message = f"token ids must be whole numbers from 0 to {sys.maxunicode}"
        raise Reason.FIELD_INVALID.error(message, field="input_ids") from None

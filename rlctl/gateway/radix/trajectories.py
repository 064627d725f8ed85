"""What was generated, found again by its beginning: tokens, log probabilities, loss mask and versions, by text or ids.

A trainer of several turns sends text and trains on tokens. Tokenising the text again need not give the tokens that were
generated, and says nothing of their log probabilities; so they are kept by the text that they made.

- What is found is the beginning of one trajectory, never put together of several, so that it was generated as it is.
- A text is cut where a piece that was given ends (prompt, response), and nowhere else: a tokeniser joins what it likes.
  A key of token ids is cut anywhere.
- Of several that begin alike the newest is found. One whose ends a newer one has, too, is dropped: generating the same
  text again, or going on from it, replaces it.
- Versions are numbers, decimal strings, or names. Numbers count by their distance; names by how many newer ones came.
  A trajectory is as old as the version that was current when it was put; prompts age as well.
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
"""Tokens that are kept, about 30 bytes each, by default."""

MAX_AGE = 5
"""A trajectory that is so many versions old is dropped, by default: what slime's router does."""


@dataclass(frozen=True)
class Piece:
    """A part of a trajectory: a prompt, or a response.

    Attributes:
        text: None: not known; then neither this piece nor what follows is found by text.
        tokens: token ids.
        logprobs: of each token, natural logarithm; empty: a prompt's, 0.0 each.
        versions: that each token was generated at; empty: a prompt's, none. One that is None is not known.
    """

    text: str | None
    tokens: Sequence[int]
    logprobs: Sequence[float] = ()
    versions: Sequence[Version | None] = ()
    loss_mask: Sequence[int] | None = None
    """Of each token, 1: trained on. None: 1 if there are log probabilities, else 0."""

    def __post_init__(self) -> None:
        for name in ("logprobs", "versions", "loss_mask"):
            given = getattr(self, name)
            if given and len(given) != len(self.tokens):
                message = f"{len(given)} {name} for {len(self.tokens)} tokens"
                raise Reason.FIELD_INVALID.error(message, field=name)
        if self.text and not self.tokens:
            raise Reason.FIELD_INVALID.error("a piece with text has no tokens", field="tokens")


@dataclass(frozen=True)
class Record:
    """The beginning of a trajectory, in whole pieces when it was found by text.

    Attributes:
        text: of the tokens, as far as it is known.
        loss_mask: 0 for each token of a prompt.
        logprobs: 0.0 for each token of a prompt.
        versions: None for each token of a prompt.
        pieces: the same in pieces, to go on from.
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
    ends: list[tuple[int, int]]  # of each piece, in tokens and in text (-1: not known)
    newest: Version
    nodes: list[tuple[RadixTree[_Trajectory], Node[_Trajectory]]] = field(default_factory=list)

    def replaces(self, old: _Trajectory) -> bool:
        """Whether whoever finds ``old``, whose tokens this one begins with, finds this one as well."""
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
            whole = end == whole_end and text_end >= 0
            part = slice(begin, end)
            pieces.append(
                Piece(
                    self.text[text_begin:text_end] if whole else None,
                    list(self.tokens[part]),
                    list(self.logprobs[part]),
                    self.versions[part],
                    list(self.loss_mask[part]),
                )
            )
            begin, text_begin = end, text_end if whole else text_begin
        return Record(
            tuple(pieces),
            self.text[:text_begin],
            list(self.tokens[:count]),
            list(self.logprobs[:count]),
            list(self.loss_mask[:count]),
            self.versions[:count],
        )


class Trajectories:
    """Trajectories up to a size and an age. Not for several threads."""

    def __init__(self, max_tokens: int = MAX_TOKENS, max_age: int = MAX_AGE) -> None:
        for name, value in (("max_tokens", max_tokens), ("max_age", max_age)):
            if value < 1:
                raise Reason.FIELD_INVALID.error(f"{name} is {value}; it must be 1 or more", field=name)
        self._max_tokens = max_tokens
        self._max_age = max_age
        self._texts: RadixTree[_Trajectory] = RadixTree()
        self._ids: RadixTree[_Trajectory] = RadixTree()
        self._used: dict[_Trajectory, None] = {}  # the one that was used last comes last
        self._whole: dict[Node[_Trajectory], set[_Trajectory]] = {}  # by the node at which they end
        self._by_version: dict[Version, set[_Trajectory]] = {}
        self._current: Version = 0
        self._order: dict[Version, int] = {0: 0}  # when a version came
        self._came = itertools.count(1)
        self.tokens = 0
        """Tokens kept."""

    def __len__(self) -> int:
        return len(self._used)

    def by_text(self, text: str) -> Record | None:
        """The longest whole pieces that begin ``text``. Takes time by the length of ``text`` only."""
        node = self._texts.longest(text)
        if node is None:
            return None
        found = node.newest
        return self._use(found, next(count for count, end in found.ends if end == node.depth))

    def by_ids(self, ids: Sequence[int]) -> Record | None:
        """The longest beginning of ``ids``."""
        common = self._ids.common(_key(ids))
        return self._use(common[0].below(), common[1]) if common else None

    def put(self, pieces: Sequence[Piece]) -> None:
        """Keep a trajectory from its beginning: ``found.pieces`` and what came after them, say.

        One that is longer than all that may be kept is not kept. Raises FIELD_INVALID for a token id out of range.
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
        """``version`` is current now, unless a newer one already is; returns how many trajectories were too old."""
        version = _number(version)
        if version not in self._order:
            self._order[version] = next(self._came)
        if self._behind(version) <= 0:
            self._current = version
        old = [known for known in self._by_version if self._behind(known) >= self._max_age]
        gone = [trajectory for known in old for trajectory in self._by_version[known]]
        for trajectory in gone:
            self._drop(trajectory)
        for known in [known for known in self._order if self._behind(known) > self._max_age]:
            del self._order[known]
        return len(gone)

    def _behind(self, version: Version) -> int:
        """By how many versions it is older than the current one; below 0: it is newer."""
        current = self._current
        if isinstance(version, int) and isinstance(current, int):
            return current - version
        return self._order.get(current, 0) - self._order.get(version, 0)

    def _trajectory(self, pieces: Sequence[Piece]) -> _Trajectory:
        new = _Trajectory("", array("q"), array("d"), b"", [], [], self._current)
        known = True
        for piece in pieces:
            count = len(piece.tokens)
            new.tokens.extend(piece.tokens)
            new.logprobs.extend(piece.logprobs or [0.0] * count)
            new.loss_mask += bytes(piece.loss_mask or [int(bool(piece.logprobs))] * count)
            new.versions += piece.versions or [None] * count
            known = known and piece.text is not None
            new.text += piece.text or "" if known else ""
            new.ends.append((len(new.tokens), len(new.text) if known else -1))
        return new

    def _hold(self, new: _Trajectory, tree: RadixTree[_Trajectory], key: str, end: int) -> Node[_Trajectory]:
        node = tree.put(key, end, new)
        new.nodes.append((tree, node))
        return node

    def _use(self, found: _Trajectory, count: int) -> Record:
        self._used[found] = self._used.pop(found)
        return found.until(count)

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
    """ "12" is 12."""
    return int(version) if isinstance(version, str) and version.isdecimal() else version


def _key(ids: Sequence[int]) -> str:
    """Token ids as a string of as many characters. Raises FIELD_INVALID for what is no token id."""
    try:
        return "".join(map(chr, ids))
    except (ValueError, OverflowError, TypeError):
        message = f"token ids must be whole numbers from 0 to {sys.maxunicode}"
        raise Reason.FIELD_INVALID.error(message, field="input_ids") from None

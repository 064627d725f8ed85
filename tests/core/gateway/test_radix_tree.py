"""Trajectories found by their beginning, against a plain model, and what slime's router gets wrong."""

import time
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlctl.contract.errors import InvalidRequest
from rlctl.gateway.radix.trajectories import Piece, Trajectories
from rlctl.gateway.radix.tree import RadixTree


def prompt(text, *tokens):
    return Piece(text, tokens)


def response(text, *tokens, logprob=-1.0, version=1):
    return Piece(text, tokens, [logprob] * len(tokens), [version] * len(tokens))


def test_text_is_found_by_its_longest_whole_pieces():
    cache = Trajectories()
    cache.put([prompt("What is it?", 1, 2, 3), response(" A cat.", 4, 5, logprob=-0.5)])
    assert cache.by_text("What is i") is None
    asked = cache.by_text("What is it? A dog.")
    assert (asked.text, asked.tokens) == ("What is it?", [1, 2, 3])
    found = cache.by_text("What is it? A cat. Why?")
    assert (found.text, found.tokens) == ("What is it? A cat.", [1, 2, 3, 4, 5])
    assert found.logprobs == [0.0, 0.0, 0.0, -0.5, -0.5]
    assert found.loss_mask == [0, 0, 0, 1, 1]
    assert found.versions == [None, None, None, 1, 1]


def test_ids_are_found_up_to_any_token():
    cache = Trajectories()
    cache.put([prompt("P", 1, 2), response("R", 3, 4, 5)])
    found = cache.by_ids([1, 2, 3, 4, 9])
    assert (found.tokens, found.loss_mask, found.text) == ([1, 2, 3, 4], [0, 0, 1, 1], "P")
    assert cache.by_ids([1]).tokens == [1]
    assert cache.by_ids([2, 1]) is None
    assert cache.by_ids([]) is None


def test_turns_go_on_from_what_was_found():
    cache = Trajectories()
    cache.put([prompt("Q1", 1), response("A1", 2, logprob=-0.1, version="a")])
    found = cache.by_text("Q1A1Q2")
    cache.put([*found.pieces, prompt("Q2", 3), response("A2", 4, logprob=-0.2, version="b")])
    whole = cache.by_text("Q1A1Q2A2")
    assert whole.tokens == [1, 2, 3, 4]
    assert whole.logprobs == [0.0, -0.1, 0.0, -0.2]
    assert whole.loss_mask == [0, 1, 0, 1]
    assert whole.versions == [None, "a", None, "b"]
    assert (len(cache), cache.tokens) == (1, 4), "the first turn is in the second"
    assert cache.by_text("Q1").tokens == [1]


def test_generating_a_text_again_replaces_its_log_probabilities():
    cache = Trajectories()
    for logprob, version in ((-0.1, 1), (-0.9, 2)):
        cache.put([prompt("P", 1), response("R", 2, logprob=logprob, version=version)])
    found = cache.by_text("PR")
    assert (found.logprobs, found.versions) == ([0.0, -0.9], [None, 2])
    assert cache.by_ids([1, 2]).logprobs == [0.0, -0.9]
    assert len(cache) == 1


def test_a_text_of_other_tokens_is_not_mixed_with_the_old_ones():
    cache = Trajectories()
    cache.put([prompt("P", 1), response("cat", 2, 3), prompt("Q", 8), response("dog", 9)])
    cache.put([prompt("P", 1), response("cat", 4, logprob=-2.0)])
    assert cache.by_text("Pcat").tokens == [1, 4]
    assert cache.by_text("PcatQdog").tokens == [1, 2, 3, 8, 9]


def test_a_child_may_be_newer_than_its_parent_when_versions_are_collected():
    cache = Trajectories(max_age=5)
    cache.advance(1)
    cache.put([prompt("P", 1), response("old", 2, version=1)])
    cache.put([prompt("P", 1), response("also", 7, version=1)])
    cache.advance(4)
    cache.put([prompt("P", 1), response("old", 2, version=1), prompt("more", 3), response("new", 4, version=4)])
    assert cache.advance(5) == 0
    assert cache.advance(6) == 1, "also: version <= current - 5"
    assert cache.by_text("Polder").tokens == [1, 2]
    assert cache.by_text("Poldmorenew").tokens == [1, 2, 3, 4]
    assert cache.by_text("Palso").tokens == [1]
    assert cache.advance(9) == 1
    assert (len(cache), cache.tokens, cache.by_text("P")) == (0, 0, None)


@pytest.mark.parametrize("names", [list("abcdefg"), [str(n) for n in range(9, 16)], ["default", 1, 2, 3, 4, 5, 6]])
def test_versions_may_be_strings(names):
    cache = Trajectories(max_age=5)
    cache.advance(names[0])
    cache.put([prompt("P", 1), response("R", 2, version=names[0])])
    for name in names[1:5]:
        assert cache.advance(name) == 0
    assert cache.by_text("PR").versions == [None, names[0]]
    assert cache.advance(names[5]) == 1
    assert cache.by_text("PR") is None


def test_a_version_that_comes_late_does_not_turn_the_time_back():
    cache = Trajectories(max_age=2)
    cache.advance(7)
    cache.advance(6)
    cache.put([prompt("P", 1)])
    assert cache.advance(8) == 0
    assert cache.advance(9) == 1


def test_prompts_without_a_version_are_collected():
    cache = Trajectories(max_age=5)
    cache.advance(1)
    cache.put([prompt("P", 1, 2)])
    cache.advance(6)
    assert cache.by_text("P") is None


def test_the_least_recently_used_goes_when_there_are_too_many_tokens():
    cache = Trajectories(max_tokens=6)
    for number, text in enumerate("abc"):
        cache.put([prompt(text, 10 + number), response(text, 20)])
    assert cache.by_text("aa") is not None
    cache.put([prompt("d", 13), response("d", 20)])
    assert cache.by_text("bb") is None
    assert cache.by_ids([11]) is None
    assert cache.by_text("aa").tokens == [10, 20]
    assert cache.tokens == 6
    cache.put([prompt("long", *range(7))])
    assert cache.by_text("long") is None, "it does not drive out everything for nothing"
    assert len(cache) == 3


def test_what_is_no_trajectory_is_refused_and_changes_nothing():
    cache = Trajectories()
    with pytest.raises(InvalidRequest, match="1 logprobs for 2 tokens"):
        Piece("x", [1, 2], [0.5])
    with pytest.raises(InvalidRequest, match="has no tokens"):
        Piece("x", [])
    for ids in ([-1], [1 << 30], ["a"], [1.5]):
        with pytest.raises(InvalidRequest):
            cache.by_ids(ids)
    with pytest.raises(InvalidRequest):
        cache.put([Piece("x", [1 << 30])])
    with pytest.raises(InvalidRequest, match="max_age"):
        Trajectories(max_age=0)
    assert len(cache) == 0


def test_a_lookup_takes_no_longer_among_many():
    """By how many characters are compared, and by the clock with room for noise."""

    def seconds(entries):
        cache = Trajectories(max_tokens=10_000_000)
        for number in range(entries):
            text = f"{number:06d}" + "x" * 200
            cache.put([prompt(text, number, 1, 2), response("yes", 3)])
        asked = f"{entries // 2:06d}" + "x" * 200 + "yes"
        times = []
        for _ in range(200):
            begin = time.perf_counter()
            assert cache.by_text(asked).tokens[-1] == 3
            times.append(time.perf_counter() - begin)
        return sorted(times)[50]

    assert seconds(10_000) < 5 * seconds(100)


PARTS = st.sampled_from(["a", "b", "ab", "ba", "aab"])


@dataclass
class Known:
    pieces: list
    version: int

    @property
    def ends(self):
        tokens, text, ends = 0, 0, []
        for piece in self.pieces:
            tokens, text = tokens + len(piece.tokens), text + len(piece.text)
            ends.append((tokens, text))
        return ends

    @property
    def text(self):
        return "".join(piece.text for piece in self.pieces)

    def column(self, name):
        return [value for piece in self.pieces for value in getattr(piece, name)]


class AgainstAList(RuleBasedStateMachine):
    """The cache and a list that is searched from its end."""

    def __init__(self):
        super().__init__()
        self.cache = Trajectories(max_tokens=20, max_age=3)
        self.known, self.version, self.number = [], 0, 0

    @rule(parts=st.lists(st.tuples(PARTS, st.integers(1, 3)), min_size=1, max_size=4))
    def put(self, parts):
        pieces = []
        for text, token in parts:
            self.number += 1
            pieces.append(
                Piece(
                    text, [token] * min(token, 2), [-float(self.number)] * min(token, 2), [self.version] * min(token, 2)
                )
            )
        self.cache.put(pieces)
        new = Known(pieces, self.version)
        tokens = new.column("tokens")
        self.known = [
            old
            for old in self.known
            if not (
                tokens[: len(old.column("tokens"))] == old.column("tokens")
                and set(old.ends) <= set(new.ends)
                and new.text.startswith(old.text)
            )
        ]
        self.known.append(new)
        while sum(len(old.column("tokens")) for old in self.known) > 20:
            self.known.pop(0)

    @rule()
    def advance(self):
        self.version += 1
        self.cache.advance(self.version)
        self.known = [old for old in self.known if old.version > self.version - 3]

    @rule(text=st.lists(PARTS, max_size=5).map("".join))
    def look_up_text(self, text):
        # The cache's own order of use is not the model's: nothing is looked up that would change it.
        used = dict(self.cache._used)
        found = self.cache.by_text(text)
        self.cache._used = used
        best, at = None, 0
        for old in self.known:
            for count, end in old.ends:
                if text.startswith(old.text[:end]) and end >= at:
                    best, at = (old, count), end
        assert (found is None) == (best is None)
        if best:
            old, count = best
            assert found.text == text[:at]
            for name in ("tokens", "logprobs", "versions"):
                assert getattr(found, name) == old.column(name)[:count]

    @rule(ids=st.lists(st.integers(1, 3), max_size=8))
    def look_up_ids(self, ids):
        used = dict(self.cache._used)
        found = self.cache.by_ids(ids)
        self.cache._used = used
        shared = [(_common(ids, old.column("tokens")), old) for old in self.known]
        longest = max((count for count, _ in shared), default=0)
        assert (len(found.tokens) if found else 0) == longest
        if found:
            alike = [old.column("logprobs")[:longest] for count, old in shared if count == longest]
            assert found.logprobs in alike, "the beginning of one, never of several"

    @invariant()
    def nothing_is_left_over(self):
        assert self.cache.tokens == sum(len(old.column("tokens")) for old in self.known) <= 20
        assert len(self.cache) == len(self.known)
        for tree in (self.cache._texts, self.cache._ids):
            for node in tree:
                assert node.values or len(node.children) >= 2
                assert node.edge
                assert node.depth == node.parent.depth + len(node.edge)
        assert set().union(*self.cache._whole.values()) == set(self.cache._used)
        assert set().union(*self.cache._by_version.values()) == set(self.cache._used)


def _common(one, other):
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=100, stateful_step_count=25)


def test_the_tree_splits_and_joins_again():
    tree = RadixTree()
    one = tree.put("abcdef", 6, 1)
    two = tree.put("abcxyz", 6, 2)
    assert sorted(node.edge for node in tree) == ["abc", "def", "xyz"]
    tree.remove(two, 2)
    assert [node.edge for node in tree] == ["abcdef"]
    assert tree.longest("abcdefg") is one
    tree.remove(one, 1)
    assert list(tree) == []

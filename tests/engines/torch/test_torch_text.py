"""Text as it comes: whole characters, stop strings over token boundaries, nothing given away too early."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlctl_torch.generation.detokenizer import TextStream, Tokenizer, find_tokenizer
from torch_models import EOS, TEXTS

from rlctl.contract.errors import Reason, RlctlError

LONG = "".join(TEXTS)


@pytest.fixture(scope="module")
def tokenizer(checkpoints) -> Tokenizer:
    found = find_tokenizer(checkpoints())
    assert found is not None
    return found


def pieces(tokenizer: Tokenizer, ids: list[int], *stops: str, **settings: bool) -> tuple[list[str], str | None]:
    """The pieces given away for these tokens, and the stop that matched."""
    stream = TextStream(
        tokenizer,
        stops,
        skip_special_tokens=settings.get("skip", True),
        keep_stop=settings.get("keep", False),
    )
    found = []
    for token in ids:
        piece, stop = stream.add(token, may_stop=True)
        found.append(piece)
        if stop is not None:
            return found, stop
    return [*found, stream.finish()], None


def single_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text, one per byte."""
    vocabulary = tokenizer._tokenizer.get_vocab()
    alphabet = {byte: token for token in vocabulary if len(token) == 1 for byte in [_byte_of(token)]}
    return [vocabulary[alphabet[byte]] for byte in text.encode()]


def _byte_of(character: str) -> int:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if ord(character) in printable:
        return ord(character)
    others = [byte for byte in range(256) if byte not in printable]
    return others[ord(character) - 256]


@pytest.mark.parametrize("text", [LONG, "🙂", "你好", " leading", "x"])
def test_pieces_make_up_the_text(tokenizer: Tokenizer, text: str) -> None:
    for ids in (tokenizer.encode(text), single_bytes(tokenizer, text)):
        found, stop = pieces(tokenizer, ids)
        assert stop is None
        assert "".join(found) == text


def test_no_piece_holds_half_a_character(tokenizer: Tokenizer) -> None:
    found, _ = pieces(tokenizer, single_bytes(tokenizer, LONG))
    assert all("\ufffd" not in piece for piece in found)
    assert found.count("") > 10, "the text has characters of several bytes"


def test_an_output_that_ends_inside_a_character_shows_it(tokenizer: Tokenizer) -> None:
    found, _ = pieces(tokenizer, single_bytes(tokenizer, "ab🙂")[:-1])
    assert "".join(found) == "ab\ufffd"


@pytest.mark.parametrize("text", ["\ufffd", "\ufffda"])
def test_what_never_becomes_a_character_is_given_away_too(tokenizer: Tokenizer, text: str) -> None:
    """Otherwise all of it is decoded again for every token."""
    ids = [token for _ in range(100) for token in single_bytes(tokenizer, text)]
    end = single_bytes(tokenizer, "🙂")
    found, _ = pieces(tokenizer, [*ids, *end])
    assert "".join(found) == text * 100 + "🙂"
    assert len("".join(found[:150])) > 30
    stray = end[-1:] * 200  # no beginning of any character
    found, _ = pieces(tokenizer, [*stray, *end])
    assert "".join(found) == "\ufffd" * 200 + "🙂"
    assert len("".join(found[:100])) > 80
    (found, stop) = pieces(tokenizer, [*stray, *single_bytes(tokenizer, "xSTOP")], "\ufffdxSTOP")
    assert (stop, "".join(found)) == ("\ufffdxSTOP", "\ufffd" * 199)


def test_stop_strings_are_found_over_token_boundaries_and_trimmed(tokenizer: Tokenizer) -> None:
    for ids in (tokenizer.encode(LONG), single_bytes(tokenizer, LONG)):
        found, stop = pieces(tokenizer, ids, "fox jumps", "lazy")
        assert stop == "fox jumps"
        assert "".join(found) == "The quick brown "


def test_a_stop_string_is_kept_when_asked(tokenizer: Tokenizer) -> None:
    found, stop = pieces(tokenizer, single_bytes(tokenizer, LONG), "brown", keep=True)
    assert (stop, "".join(found)) == ("brown", "The quick brown")


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none(tokenizer: Tokenizer) -> None:
    found, stop = pieces(tokenizer, single_bytes(tokenizer, "aabaac"), "aabaad")
    assert found == ["", "", "", "", "", "aabaac", ""]
    assert stop is None


def test_the_earliest_and_then_the_longest_stop_counts(tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode(" the")[:1]
    word = tokenizer.decode([token], skip_special_tokens=True)
    assert len(word) >= 3, "the tokenizer has a token of several characters"
    assert pieces(tokenizer, [token], word[1:], word[1])[1] == word[1:]
    assert pieces(tokenizer, [token], word[2:], word[0])[1] == word[0]


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("one"), tokenizer.eos_token_id, *tokenizer.encode(" two")]
    assert "".join(pieces(tokenizer, ids)[0]) == "one two"
    assert "".join(pieces(tokenizer, ids, skip=False)[0]) == f"one{EOS} two"


def test_a_directory_without_a_tokenizer_has_none_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    assert find_tokenizer(str(tmp_path)) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(RlctlError) as caught:
        find_tokenizer(str(tmp_path))
    assert caught.value.reason is Reason.CHECKPOINT_NOT_FOUND


class Slow:
    """A tokenizer without a Rust one: each token is a special one."""

    backend_tokenizer = None

    def decode(self, ids: list[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str:
        del skip_special_tokens
        return (" " if spaces_between_special_tokens else "").join(f"<{each}>" for each in ids)


@pytest.mark.parametrize(("spaces", "text"), [(True, "<1> <2>"), (False, "<1><2>")])
def test_a_slow_tokenizer_is_told_about_spaces_between_special_tokens(
    monkeypatch: pytest.MonkeyPatch, spaces: bool, text: str
) -> None:
    monkeypatch.setattr("rlctl_torch.generation.detokenizer.AutoTokenizer.from_pretrained", lambda *_, **__: Slow())
    stream = TextStream(
        Tokenizer("anywhere"), (), skip_special_tokens=False, keep_stop=False, spaces_between_special_tokens=spaces
    )
    given = [stream.add(token, may_stop=False)[0] for token in (1, 2)]
    assert "".join([*given, stream.finish()]) == text

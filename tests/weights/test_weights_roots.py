"""Which paths an engine follows: what they resolve to counts, not how they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.errors import InvalidRequest, Reason
from rlctl.weights.roots import Roots


def allowed(roots: Roots, path: Path | str) -> bool:
    reasons: list[Reason] = []
    try:
        roots.resolve_checkpoint(str(path), field="f")
    except InvalidRequest as error:
        reasons = [error.reason]
    assert reasons in ([], [Reason.PATH_NOT_ALLOWED])
    return not reasons


def test_checkpoints_beside_the_first_one_are_allowed(tmp_path: Path) -> None:
    start = tmp_path / "runs" / "step-0"
    start.mkdir(parents=True)
    roots = Roots.around(str(start))
    assert allowed(roots, start)
    assert allowed(roots, tmp_path / "runs" / "step-1" / "not" / "there" / "yet")
    assert not allowed(roots, tmp_path)
    assert not allowed(roots, tmp_path / "runs-2")
    assert not allowed(roots, f"{tmp_path}/runs/../other")


def test_named_directories_replace_the_default(tmp_path: Path) -> None:
    start = tmp_path / "models" / "base"
    start.mkdir(parents=True)
    roots = Roots.around(str(start), [str(tmp_path / "shared")])
    assert allowed(roots, start)
    assert allowed(roots, tmp_path / "shared" / "x")
    assert not allowed(roots, tmp_path / "models" / "other")
    assert str(roots) == f"{start}:{tmp_path / 'shared'}"


def test_links_are_followed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for directory in (inside, outside):
        directory.mkdir()
    roots = Roots([inside])
    (outside / "to-in").symlink_to(inside)
    (inside / "to-out").symlink_to(outside)
    assert allowed(roots, outside / "to-in" / "x")
    assert not allowed(roots, inside / "to-out")
    checkpoint = inside / "checkpoint"
    checkpoint.mkdir()
    (outside / "weights").touch()
    (checkpoint / "model.safetensors").symlink_to(outside / "weights")
    assert not allowed(roots, checkpoint)
    assert roots.resolve(str(checkpoint), field="f") == str(checkpoint)


def test_a_checkpoint_whose_files_are_links_can_be_loaded_again(tmp_path: Path) -> None:
    """As in the Hugging Face cache: snapshots link to contents that lie beside them."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1234").touch()
    (snapshot / "model.safetensors").symlink_to(blobs / "1234")
    assert allowed(Roots.around(str(snapshot), ["/elsewhere"]), snapshot)


def test_a_checkpoint_at_the_root_does_not_open_the_whole_disk(tmp_path: Path) -> None:
    roots = Roots.around("/checkpoint-that-is-not-there")
    assert not allowed(roots, tmp_path)
    assert not allowed(roots, "/")


def test_a_nul_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="NUL"):
        Roots([tmp_path]).resolve(f"{tmp_path}\0", field="f")

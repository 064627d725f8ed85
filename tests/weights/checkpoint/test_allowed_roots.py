"""Which paths an engine follows: what they resolve to counts, not how they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.contract.errors import InvalidRequest, Reason
from rlctl.weights.checkpoint.allowed_roots import Roots


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
    elsewhere, checkpoint = tmp_path / "elsewhere", tmp_path / "models" / "base"
    elsewhere.mkdir()
    checkpoint.mkdir(parents=True)
    (elsewhere / "weights").touch()
    (elsewhere / "secret").touch()
    (checkpoint / "model.safetensors").symlink_to(elsewhere / "weights")
    (checkpoint / "more").symlink_to(elsewhere)
    for roots in (Roots.around(str(checkpoint)), Roots.around(str(checkpoint), [str(tmp_path / "shared")])):
        assert allowed(roots, checkpoint)
        assert allowed(roots, checkpoint / "model.safetensors")
        assert not allowed(roots, elsewhere / "secret")
        assert not allowed(roots, checkpoint / "more" / "secret")


def hugging_face_cache(path: Path, *revisions: str) -> list[Path]:
    """Snapshots as huggingface_hub lays them out: what is in them are links to contents that lie beside them."""
    repository = path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    snapshots = [repository / "snapshots" / revision for revision in revisions]
    for snapshot in snapshots:
        snapshot.mkdir(parents=True)
        (repository / "blobs" / f"of-{snapshot.name}").touch()
        (snapshot / "model.safetensors").symlink_to(f"../../blobs/of-{snapshot.name}")
    return snapshots


@pytest.mark.parametrize("blobs_are_linked", [False, True])
def test_a_revision_in_the_hugging_face_cache_can_be_loaded_again_and_the_others_too(
    tmp_path: Path, blobs_are_linked: bool
) -> None:
    first, second = hugging_face_cache(tmp_path, "abc", "def")
    if blobs_are_linked:
        blobs = first.parent.parent / "blobs"
        blobs.symlink_to(blobs.rename(tmp_path / "contents"))
    assert allowed(Roots.around(str(first), [str(tmp_path / "shared")]), first)
    roots = Roots.around(str(first))
    assert allowed(roots, second)
    assert not allowed(roots, tmp_path)
    assert not allowed(roots, tmp_path / "models--org--other" / "snapshots" / "abc")


@pytest.mark.parametrize("target", ["/", "/tokenizer.json", "/etc/tokenizer.json"])
def test_a_link_of_a_checkpoint_opens_no_directory(tmp_path: Path, target: str) -> None:
    (tmp_path / "snapshots" / "m").mkdir(parents=True)
    (tmp_path / "snapshots" / "m" / "tokenizer.json").symlink_to(target)
    roots = Roots.around(str(tmp_path / "snapshots" / "m"))
    for path in ("/", "/etc", "/etc/passwd"):
        assert not allowed(roots, path)


def test_a_checkpoint_at_the_root_does_not_open_the_whole_disk(tmp_path: Path) -> None:
    roots = Roots.around("/checkpoint-that-is-not-there")
    assert not allowed(roots, tmp_path)
    assert not allowed(roots, "/")


def test_a_nul_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="NUL"):
        Roots([tmp_path]).resolve(f"{tmp_path}\0", field="f")

"""Shared memory: its owner's lock says whether it lives, and nothing is left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from pathlib import Path

import pytest
import torch
from shared_memory import held
from weights_helpers import files_left

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.shared_memory import posix
from rlctl.weights.shared_memory.posix import HEADER_BYTES, OwnedMemory, abandoned, open_memory, sweep
from rlctl.weights.tensor.placement import SHARED_MEMORY, device_id, host_id


def opened(memory: OwnedMemory) -> posix.SharedMemory:
    return open_memory(memory.name, memory.size, "name", "size")


def there(name: str) -> bool:
    return (SHARED_MEMORY / name).exists()


def refusal(*arguments: object) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        open_memory(*arguments)  # type: ignore[arg-type]
    return caught.value


def test_a_segment_without_a_free_file_descriptor_is_refused_as_such() -> None:
    with files_left(0), pytest.raises(RlctlError) as caught:
        OwnedMemory(HEADER_BYTES)
    assert (caught.value.reason, "ulimit -n" in caught.value.next_step) == (Reason.TOO_MANY_FILES, True)


def test_mapping_a_segment_without_a_free_file_descriptor_does_not_call_it_gone() -> None:
    memory = OwnedMemory(HEADER_BYTES)
    with files_left(0):
        error = refusal(memory.name, memory.size, "name", "size")
        assert not abandoned(memory.name)
    assert (error.reason, error.field) == (Reason.TOO_MANY_FILES, "name")
    assert there(memory.name)
    memory.close()


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, Reason.SHARED_MEMORY_FULL),
        (errno.EDQUOT, Reason.SHARED_MEMORY_FULL),
        (errno.EACCES, Reason.UNSUPPORTED),
        (errno.ENOENT, Reason.UNSUPPORTED),
    ],
)
def test_a_file_system_that_takes_no_further_segment_is_full_or_missing(
    number: int, reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC at the creation: a tmpfs has no inode left."""

    def fails(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(posix.os, "open", fails)
    with pytest.raises(RlctlError) as caught:
        OwnedMemory(HEADER_BYTES)
    monkeypatch.undo()
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (posix.fcntl, "flock", OSError(errno.ENOLCK, "no locks")),
        (posix.os, "posix_fallocate", OSError(errno.ENOSPC, "full")),
        (posix, "_map", OSError(errno.ENOMEM, "no memory")),
        (posix, "_map", MemoryError()),
    ],
    ids=["flock", "allocate", "map", "python"],
)
def test_a_segment_that_cannot_be_made_leaves_no_file(
    module: object, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, descriptors = secrets.token_hex(16), len(os.listdir("/proc/self/fd"))

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(posix.secrets, "token_hex", lambda _: token)
    monkeypatch.setattr(module, name, fails)
    with pytest.raises((RlctlError, MemoryError)):
        OwnedMemory(HEADER_BYTES)
    monkeypatch.undo()
    assert not there(f"rlctl-{token}")
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_what_the_owner_writes_others_read() -> None:
    memory = OwnedMemory(HEADER_BYTES + 100)
    assert memory.size == 2 * HEADER_BYTES, "whole pages"
    theirs = opened(memory)
    assert theirs.generation == 0
    memory.data[HEADER_BYTES:] = torch.arange(HEADER_BYTES).to(torch.uint8)
    assert memory.end() == theirs.generation == 1
    assert torch.equal(theirs.data[HEADER_BYTES:], memory.data[HEADER_BYTES:])
    memory.begin()
    assert theirs.generation == 0
    assert memory.end() == 2
    memory.close()


def test_a_mapping_outlives_the_file_and_gives_its_memory_back() -> None:
    memory = OwnedMemory(8 << 20)
    view = opened(memory).data[HEADER_BYTES:]
    name = memory.name
    memory.close()
    memory.close()
    assert not there(name)
    assert view.sum() == 0
    del memory
    assert held([name]) == {name}
    del view
    assert held([name]) == set()


def test_forgotten_memory_goes_with_its_object() -> None:
    assert held([OwnedMemory(HEADER_BYTES).name]) == set()


def test_a_living_owners_memory_is_not_swept() -> None:
    memory = OwnedMemory(HEADER_BYTES)
    assert not abandoned(memory.name)
    assert memory.name not in sweep()
    assert there(memory.name)
    memory.close()
    assert abandoned(memory.name)


def test_what_nobody_holds_is_swept_and_nothing_else(tmp_path: Path) -> None:
    orphan, link = (f"rlctl-{secrets.token_hex(16)}" for _ in range(2))
    others = [orphan[:-1], f"{orphan}0", orphan.replace("rlctl", "other")]
    for name in (orphan, *others):
        (SHARED_MEMORY / name).write_bytes(bytes(100))
    (SHARED_MEMORY / link).symlink_to(tmp_path)
    try:
        sweep()
        assert not (SHARED_MEMORY / orphan).exists()
        assert all((SHARED_MEMORY / name).exists() for name in (link, *others))
    finally:
        for name in (link, *others):
            (SHARED_MEMORY / name).unlink()


def test_memory_that_is_swept_while_it_is_made_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, swept = fcntl.flock, list[str]()

    def sweep_first(descriptor: int, how: int) -> None:
        if not swept:
            monkeypatch.setattr(fcntl, "flock", lock)
            swept.extend(sweep())
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    memory = OwnedMemory(HEADER_BYTES)
    assert swept
    assert memory.name not in swept
    assert there(memory.name)
    memory.close()


def test_memory_that_is_not_there_is_refused_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = secrets.token_hex(16)
    monkeypatch.setattr(secrets, "token_hex", lambda _: digits)
    space = os.statvfs(SHARED_MEMORY)
    with pytest.raises(RlctlError) as caught:
        OwnedMemory(space.f_blocks * space.f_frsize + (1 << 30))
    assert caught.value.reason is Reason.SHARED_MEMORY_FULL
    assert "--shm-size" in caught.value.next_step
    assert held([f"rlctl-{digits}"]) == set()


def test_without_posix_shared_memory_it_is_unsupported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(posix, "SHARED_MEMORY", tmp_path / "none")
    with pytest.raises(RlctlError) as caught:
        OwnedMemory(HEADER_BYTES)
    assert caught.value.reason is Reason.UNSUPPORTED
    assert sweep() == []


def test_only_segments_are_opened(tmp_path: Path) -> None:
    memory = OwnedMemory(HEADER_BYTES)
    for name in ("", "..", "../../etc/passwd", f"{memory.name}/", memory.name.upper(), f"{memory.name}\n"):
        error = refusal(name, HEADER_BYTES, "name", "size")
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, "name")
    for size in (0, 1, HEADER_BYTES - 1, HEADER_BYTES + 1, 1 << 62):
        error = refusal(memory.name, size, "name", "size")
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, "size")
    os.truncate(SHARED_MEMORY / memory.name, 100)
    assert refusal(memory.name, HEADER_BYTES, "name", "size").field == "size"
    assert refusal(memory.name, 100, "name", "size").field == "size", "no room for a header"
    memory.close()
    assert refusal(memory.name, HEADER_BYTES, "name", "size").reason is Reason.SEGMENT_NOT_FOUND
    other = OwnedMemory(HEADER_BYTES)
    other.data[:8] = 0
    assert refusal(other.name, HEADER_BYTES, "name", "size").field == "name", "no magic"
    other.close()
    stray = SHARED_MEMORY / f"rlctl-{secrets.token_hex(16)}"
    stray.symlink_to("/etc/passwd")
    try:
        assert refusal(stray.name, HEADER_BYTES, "name", "size").reason is Reason.SEGMENT_NOT_FOUND
    finally:
        stray.unlink()


def test_identities() -> None:
    boot_id, _, place = host_id().partition("/")
    assert len(boot_id) == 36
    assert place == f"{SHARED_MEMORY.stat().st_dev:x}.{SHARED_MEMORY.stat().st_ino:x}"
    assert device_id(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(("number", "gone"), [(errno.ENOLCK, False), (errno.EWOULDBLOCK, False), (0, True)])
def test_a_check_of_an_owner_raises_nothing(number: int, gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a reader's thread ends, and the memory of dead owners stays mapped."""
    memory = OwnedMemory(HEADER_BYTES)

    def lock(*_: object) -> None:
        if number:
            raise OSError(number, os.strerror(number))

    def unlink(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not the owner")

    monkeypatch.setattr(posix.fcntl, "flock", lock)
    monkeypatch.setattr(posix.os, "unlink", unlink)
    assert abandoned(memory.name) is gone
    monkeypatch.undo()
    memory.close()

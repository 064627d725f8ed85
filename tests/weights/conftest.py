"""Fixtures of the tests of the tensor data plane."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from weights_helpers import together

from rlctl.weights.group.process_group import GroupStore, WeightGroup, join

torch.set_num_threads(1)

# torch's store looks up the name of every peer's address; where DNS loses queries, that is five seconds by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

_names = (f"group-{number}" for number in itertools.count())

Form = Callable[..., list[WeightGroup]]


@pytest.fixture
def store() -> Iterator[GroupStore]:
    store = GroupStore()
    yield store
    store.close()


@pytest.fixture
def form(store: GroupStore) -> Iterator[Form]:
    """Forms a group of so many members, all in this process."""
    formed: list[WeightGroup] = []

    def make(size: int, *, name: str = "", broadcast_timeout_s: float = 10.0) -> list[WeightGroup]:
        name = name or next(_names)

        def member(rank: int) -> WeightGroup:
            return join(
                store, name=name, rank=rank, world_size=size, timeout_s=10, broadcast_timeout_s=broadcast_timeout_s
            )

        members = together(*(lambda rank=rank: member(rank) for rank in range(size)))
        formed.extend(members)
        return members

    yield make
    for group in formed:
        group.close()

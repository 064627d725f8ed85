"""The version that a rollback publishes again."""

from __future__ import annotations

import pytest

from rlctl.client.admin import chosen
from rlctl.contract.digests import with_key
from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.fleet_pb2 import PublishedVersion

HEX = "0" * 64
KEYED = with_key(HEX, bytes(16))


def versions(*rows: tuple[str, str, str]) -> list[PublishedVersion]:
    """Return versions from labels, checkpoints and digests, latest first."""
    return [
        PublishedVersion(version=WeightVersion(label=label, sequence=number), checkpoint=path, model_digest=digest)
        for number, (label, path, digest) in zip(range(len(rows), 0, -1), rows, strict=True)
    ]


def test_the_version_before_the_latest_or_the_named_version() -> None:
    listed = versions(("four", "", ""), ("three", "/three", HEX), ("two", "/two", ""), ("one", "/one", HEX))
    assert chosen("actor", listed, "").checkpoint == "/three"
    assert chosen("actor", listed, "two").checkpoint == "/two"
    assert chosen("actor", listed, "#1").checkpoint == "/one"


def test_a_checkpoint_of_a_version_with_a_keyed_digest_is_refused() -> None:
    """A stage was healed from the checkpoint, and a coordinator with a new journal has taken it over."""
    listed = versions(("three", "", ""), ("two", "/two", KEYED), ("one", "/one", HEX))
    with pytest.raises(RlctlError) as caught:
        chosen("actor", listed, "")
    assert (caught.value.reason, caught.value.field) == (Reason.UNHEALABLE, "version")
    assert "--model-path /two" in caught.value.next_step
    with pytest.raises(RlctlError) as caught:
        chosen("actor", listed, "four")
    assert "versions with a checkpoint: one#1." in caught.value.next_step

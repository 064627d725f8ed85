"""Which slots there are, and what their engines can do."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from rlctl.v1.common_pb2 import (
    VERIFICATION_LEVEL_EXPECTED,
    VERIFICATION_LEVEL_PROBE,
    VERIFICATION_LEVEL_RECEIVED,
    VERIFICATION_LEVEL_REPLICA,
    VerificationLevel,
)

_BY_DIGEST = (VERIFICATION_LEVEL_EXPECTED, VERIFICATION_LEVEL_REPLICA)

LEVELS: dict[str, tuple[VerificationLevel.ValueType, ...]] = {
    "plain": (*_BY_DIGEST, VERIFICATION_LEVEL_PROBE),
    "thorough": (*_BY_DIGEST, VERIFICATION_LEVEL_RECEIVED, VERIFICATION_LEVEL_PROBE),
    "receiver": (VERIFICATION_LEVEL_RECEIVED, VERIFICATION_LEVEL_PROBE),
    "speaker": (*_BY_DIGEST, VERIFICATION_LEVEL_PROBE),
    "modest": _BY_DIGEST,
}
"""What engines can verify, by kind. A "speaker" has its ranks inside, and answers for all of them at once; a "modest"
one lacks what updates can do without.
"""

MODEST = ("ReleaseMemory", "ResumeMemory", "SendWeights", "UpdateWeightsFromTensor")
"""Verbs that a modest engine does not have."""


@dataclass(frozen=True)
class SimSlot:
    """A slot of the fleet, whoever fills it.

    Attributes:
        kind: which of :data:`LEVELS` its engines are.
        host: where they run.
    """

    name: str
    model: str
    ranks: int
    kind: str
    host: str

    @property
    def checkpoint(self) -> str:
        """What its engines start with."""
        return f"{self.model}-initial"

    @property
    def modest(self) -> bool:
        """Whether its engines lack what updates can do without."""
        return self.kind == "modest"

    def may_skip(self, verb: str) -> bool:
        """Whether its engines are left out of a verb: they do not have it, or not in every way."""
        return self.modest and verb in (*MODEST, "PauseGeneration")

    @property
    def speaker(self) -> bool:
        """Whether one process of its engines answers for all ranks."""
        return self.kind == "speaker"

    @property
    def probes(self) -> bool:
        """Whether its engines can compute a probe."""
        return VERIFICATION_LEVEL_PROBE in LEVELS[self.kind]

    @property
    def compares_decode(self) -> bool:
        """Whether its engines compare decode with prefill."""
        return self.probes and zlib.crc32(f"decode of {self.name}".encode()) % 4 > 0

    @property
    def computes_keyed_digests(self) -> bool:
        """Whether its engines compute keyed digests. Others are older, and answer by SHA-256."""
        return zlib.crc32(self.name.encode()) % 6 > 0

    @property
    def digests(self) -> bool:
        """Whether its engines can digest what they hold."""
        return VERIFICATION_LEVEL_EXPECTED in LEVELS[self.kind]

"""The slots of a fleet, and the capabilities of their engines."""

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
"""Verification levels, by kind of engine. A "speaker" has its ranks inside and answers for all of them; a "modest"
engine lacks functions that updates do not need.
"""

MODEST = ("ReleaseMemory", "ResumeMemory", "SendWeights", "UpdateWeightsFromTensor")
"""Verbs that a modest engine lacks."""


@dataclass(frozen=True)
class SimSlot:
    """A slot of the fleet, with any process.

    Attributes:
        kind: kind of the slot's engines, a key of :data:`LEVELS`.
        host: host of the engines.
    """

    name: str
    model: str
    ranks: int
    kind: str
    host: str

    @property
    def checkpoint(self) -> str:
        """Return the engines' initial checkpoint."""
        return f"{self.model}-initial"

    @property
    def modest(self) -> bool:
        """Return True if the engines lack functions that updates do not need."""
        return self.kind == "modest"

    def may_skip(self, verb: str) -> bool:
        """Return True if the engines may skip a verb: the verb is missing, or some of its modes."""
        return self.modest and verb in (*MODEST, "PauseGeneration")

    @property
    def speaker(self) -> bool:
        """Return True if one process of the engine answers for all ranks."""
        return self.kind == "speaker"

    @property
    def probes(self) -> bool:
        return VERIFICATION_LEVEL_PROBE in LEVELS[self.kind]

    @property
    def compares_decode(self) -> bool:
        return self.probes and zlib.crc32(f"decode of {self.name}".encode()) % 4 > 0

    @property
    def computes_keyed_digests(self) -> bool:
        """Return True if the engines compute keyed digests. Other engines are older, and answer by SHA-256."""
        return zlib.crc32(self.name.encode()) % 6 > 0

    @property
    def digests(self) -> bool:
        """Return True if the engines can digest their weights."""
        return VERIFICATION_LEVEL_EXPECTED in LEVELS[self.kind]

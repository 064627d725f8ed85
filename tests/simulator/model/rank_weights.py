"""The content of a rank and the rules of updates: weights, a shadow copy, adapters, as names with contents.

Buckets announce the tensors of a broadcast before its receipt; the received tensors have no names. Buckets that are
received in a different order than sent therefore end up in each other's places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rlctl.contract.digests import KEYED_DIGITS, SHA256_DIGITS
from rlctl.contract.errors import Reason
from rlctl.v1 import verbs_pb2 as verbs
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED
from rlctl.weights.tensor.digest import combine
from tests.simulator.ports.process_groups import Tensors

NAMES = ("embed", "layer.0", "layer.1", "head")
"""Parameters of every model."""

ADAPTER_NAMES = ("lora.a", "lora.b")
"""Parameters of every adapter."""


def digest(tensors: Tensors, key: bytes = b"") -> str:
    """Digest of full tensors, formed as by trainers and engines."""
    return combine(digests(tensors, key), key)


def digests(tensors: Tensors, key: bytes = b"") -> dict[str, str]:
    """Digest of each tensor, hex, by name."""
    digits = KEYED_DIGITS if key else SHA256_DIGITS
    return {name: hashlib.sha256(key + content.encode()).hexdigest()[:digits] for name, content in tensors.items()}


def probed(tensors: Tensors, prompts: Iterable[verbs.ProbePrompt]) -> list[verbs.ProbePrompt]:
    """Return log probabilities of the tokens of prompts, unique to these weights."""
    seen = int(digest(tensors)[:8], 16) / 2**32
    return [
        verbs.ProbePrompt(token_ids=prompt.token_ids, logprobs=[-seen - token for token in prompt.token_ids[1:]])
        for prompt in prompts
    ]


def contents(tag: str, names: Collection[str] = NAMES) -> Tensors:
    """The weights of a version."""
    return {name: f"{name}@{tag}" for name in names}


@dataclass
class Holding:
    """A rank's memory.

    Attributes:
        weights: weights for generation.
        adapters: contents and versions of adapters, by name.
        off: safeguards that are switched off.
        update_id: open update, or "".
        adapter: the adapter of the open update, or None.
        shadow: the open update's target, unless it writes into the weights.
        received: received tensors of the open update if they are to be digested; else None.
        full: whether the open update must write every tensor.
    """

    weights: Tensors
    off: frozenset[str]
    adapters: dict[str, tuple[verbs.Adapter, Tensors]] = field(default_factory=dict)
    update_id: str = ""
    adapter: verbs.Adapter | None = None
    shadow: Tensors | None = None
    received: Tensors | None = None
    full: bool = True
    _names: tuple[str, ...] = NAMES
    _sealed: bool = False
    _written: set[str] = field(default_factory=set)
    _received: dict[str, int] = field(default_factory=dict)
    _key: bytes = b""

    @property
    def written(self) -> bool:
        """Return True if a byte of the open update has reached the served weights."""
        return bool(self._written) and self.shadow is None

    def prepare(self, request: verbs.PrepareUpdateRequest, update_id: str) -> None:
        """Open an update, or a further attempt."""
        self.update_id, self._written, self._received, self._sealed = update_id, set(), {}, False
        self.full = request.kind not in (verbs.UPDATE_KIND_PARTIAL, verbs.UPDATE_KIND_DELTA)
        self.received, self._key = ({} if request.digest_received else None), request.digest_key
        self._names, self.adapter, self.shadow = NAMES, None, None
        if request.kind == verbs.UPDATE_KIND_ADAPTER:
            self.adapter, self.shadow, self._names = request.adapter, {}, ADAPTER_NAMES
        elif request.apply == verbs.APPLY_MODE_STAGED:
            self.shadow = {} if self.full else dict(self.weights)

    def refuse_other(self, update_id: str) -> None:
        """Raise UPDATE_FENCED for a step of any update but the open update."""
        if self.update_id != update_id:
            raise Reason.UPDATE_FENCED.error(f"update {self.update_id or '(none)'} is open, not {update_id}")

    def next_bucket(self, bucket: verbs.TensorBucket, group: str) -> None:
        """Check a bucket before its receipt. Raises FIELD_INVALID if it is not the next of its group."""
        expected = self._received.get(group, 0)
        if bucket.sequence != expected and "bucket_order" not in self.off:
            outcome = OUTCOME_DIRTY if self.written else OUTCOME_REJECTED
            raise Reason.FIELD_INVALID.error(
                f"bucket {bucket.sequence} came, {expected} is next", field="buckets", outcome=outcome
            )
        self._received[group] = expected + 1

    def write(self, name: str, content: str) -> None:
        (self.weights if self.shadow is None else self.shadow)[name] = content
        if self.received is not None:
            self.received[name] = content
        self._written.add(name)

    def _refuse_incomplete(self) -> None:
        missing = [name for name in self._names if name not in self._written]
        if not self._written or (self.full and missing and "completeness" not in self.off):
            outcome = OUTCOME_DIRTY if self.written else OUTCOME_REJECTED
            raise Reason.WEIGHTS_INCOMPLETE.error(f"not written: {', '.join(missing)}", outcome=outcome)

    @property
    def sealed_adapter(self) -> str:
        """Return the adapter that may not generate until the update ends, or ""."""
        return self.adapter.name if self.adapter is not None and self._sealed else ""

    def seal(self) -> int:
        """Complete the shadow copy, or the adapter; return the number of written tensors."""
        if self.shadow is None:
            raise Reason.UPDATE_NOT_FOUND.error("no staged update is open")
        self._refuse_incomplete()
        if self.full and self.adapter is None and "completeness" in self.off:
            self.shadow = {**self.weights, **self.shadow}
        self._sealed = True
        return len(self._written)

    def commit(self, request: verbs.CommitUpdateRequest) -> int:
        """Close the update; return the number of written tensors."""
        if self.adapter is not None:
            self._refuse_incomplete()
            self.adapters[self.adapter.name] = (self.adapter, self.shadow or {})
        elif self.shadow is not None:
            if not self._sealed:
                raise Reason.ILLEGAL_STATE.error("the shadow copy is not sealed")
            self.weights = self.shadow
        else:
            self._refuse_incomplete()
        if request.adapters == verbs.ADAPTER_POLICY_DROP:
            self.adapters.clear()
        self.abort()
        return len(self._written)

    def abort(self) -> None:
        """Drop the update. Tensors written in place stay written."""
        self.update_id, self.shadow, self.adapter, self._sealed = "", None, None, False

    def asked_for(self, request: verbs.CheckWeightsRequest) -> Tensors:
        """Return the tensors of a check."""
        if request.adapter:
            if self.adapter is not None and self.adapter.name == request.adapter:
                return self.shadow or {}
            if request.adapter not in self.adapters:
                raise Reason.ADAPTER_NOT_FOUND.error(f"no adapter {request.adapter!r} is loaded", field="adapter")
            return self.adapters[request.adapter][1]
        return (self.shadow or {}) if request.shadow else self.weights

    def report(self, tensors: int) -> verbs.WeightsReport:
        """Return the report of a finished or sealed update."""
        return verbs.WeightsReport(
            tensors=tensors, received_digest=digest(self.received, self._key) if self.received is not None else ""
        )

    def listed(self) -> verbs.AdapterList:
        return verbs.AdapterList(adapters=[adapter for _, (adapter, _) in sorted(self.adapters.items())])

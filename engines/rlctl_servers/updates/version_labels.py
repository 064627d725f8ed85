"""Versions behind the server's own labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import Sample

WRITING = "being written@0"
"""Label (in the form of :meth:`Stamps.of`) of an attached server during an update. A stage server that attaches then
must not take the weights for the weights of the start.
"""

TRYING = "being tried@0"
"""Label of such a server during the trial at the attach, and after a failed trial
(:mod:`rlctl_servers.updates.reload_trial`). Every other label in the form of :meth:`Stamps.of` proves that the trial
has passed: no update begins before it.
"""


class Stamps:
    """Versions by the server's own labels. For any thread."""

    def __init__(self, label: str) -> None:
        """``label``: label of the server at its start."""
        self.label = label
        self._kv_label = label
        self._versions: dict[str, WeightVersion] = {label: WeightVersion()}

    @staticmethod
    def of(version: WeightVersion) -> str:
        """Return the server's label for a version. The trainer's labels may repeat, sequences do not."""
        return f"{version.label}@{version.sequence}"

    @staticmethod
    def ours(label: str) -> bool:
        """Return whether a label has the form of :meth:`of`: rlctl has updated the server."""
        return label.rpartition("@")[2].isdigit() and "@" in label

    def bind(self, version: WeightVersion, label: str = "") -> None:
        """Bind a label, by default the present label, to this version."""
        bound = WeightVersion()
        bound.CopyFrom(version)
        self._versions[label or self.label] = bound

    def flushed(self) -> None:
        """Record that no KV entry of an earlier version remains."""
        self._kv_label = self.label

    @property
    def present(self) -> WeightVersion:
        """Return the version of the present label."""
        return self._versions[self.label]

    @property
    def oldest_kv(self) -> WeightVersion:
        """Return the oldest version that a KV entry may have."""
        return self._versions[self._kv_label]

    def version(self, label: str) -> WeightVersion | None:
        """Return the version, or None for a label that rlctl did not set."""
        return self._versions.get(label)

    def version_since(self, label: str, since: WeightVersion) -> WeightVersion:
        """Return the version of an answer that began at ``since``.

        Raises ENGINE_FAILED for an earlier version, and for a label that rlctl did not set. Then a different client
        drives the server, or the server was restarted behind a proxy, with the label and the weights of its first
        start.
        """
        version = self.version(label)
        if version is None or version.sequence < since.sequence:
            cause = "did not call them" if version is None else "called them before this sample began"
            raise Reason.ENGINE_FAILED.error(
                f"the server says that its weights are {label!r}, which rlctl {cause}",
                next_step="Restart the stage: the weights of the server are unknown.",
            )
        return version

    def spans(self, sample: Sample, server_spans: Iterable[Mapping[str, Any]], since: WeightVersion) -> None:
        """Record the versions of a sample's spans. ``server_spans`` have version, start and end.

        ``since``: version of the server when the sample began. Raises as :meth:`version_since`.
        """
        for span in server_spans:
            if span["end"] <= span["start"]:
                continue
            version = self.version_since(str(span["version"]), since)
            sample.versions.add(version=version, start=span["start"], end=min(span["end"], sample.completion_tokens))

    def kv_of(self, sample: Sample, since: WeightVersion) -> None:
        """Record where a sample, once its cached tokens are known, attends to KV entries older than its version.

        ``since``: the version in its cache salt. Entries of earlier versions are out of reach.
        """
        oldest = max(self.oldest_kv, since, key=lambda version: version.sequence)
        for span in sample.versions:
            if oldest.sequence < span.version.sequence and (span.start or sample.cached_tokens):
                span.kv_version.CopyFrom(oldest)  # no flush since, as requested

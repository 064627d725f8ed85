"""Which version the server's own labels stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import Sample

WRITING = "being written@0"
"""The label, of the form of :meth:`Stamps.of`, of a server that others may attach to while an update writes to it: they
must not take its weights for those that it was started with.
"""

TRYING = "being tried@0"
"""The label of such a server while the trial at the attach runs, and after one that failed
(:mod:`rlctl_servers.updates.reload_trial`). Every other label of the form of :meth:`Stamps.of` says that the trial has
passed: no update begins before it.
"""


class Stamps:
    """Which version the server's own labels stand for. From any thread."""

    def __init__(self, label: str) -> None:
        """``label``: the server's at its start."""
        self.label = label
        self._kv_label = label
        self._versions: dict[str, WeightVersion] = {label: WeightVersion()}

    @staticmethod
    def of(version: WeightVersion) -> str:
        """The server's label for a version: the trainer's labels may come again, sequences do not."""
        return f"{version.label}@{version.sequence}"

    @staticmethod
    def ours(label: str) -> bool:
        """Whether a label that a server has is one of :meth:`of`: it has been updated by rlctl."""
        return label.rpartition("@")[2].isdigit() and "@" in label

    def bind(self, version: WeightVersion, label: str = "") -> None:
        """From now on a label, by default the present one, stands for this version."""
        kept = WeightVersion()
        kept.CopyFrom(version)
        self._versions[label or self.label] = kept

    def flushed(self) -> None:
        """From now on no KV entry of an earlier version is left."""
        self._kv_label = self.label

    @property
    def present(self) -> WeightVersion:
        """The version that the server is at."""
        return self._versions[self.label]

    @property
    def oldest_kv(self) -> WeightVersion:
        """The version that the oldest KV entries may be of."""
        return self._versions[self._kv_label]

    def version(self, label: str) -> WeightVersion | None:
        """The version, or None for a label that rlctl did not give."""
        return self._versions.get(label)

    def version_since(self, label: str, since: WeightVersion) -> WeightVersion:
        """The version of an answer that began at ``since``.

        Raises ENGINE_FAILED for an earlier version, and for a label that rlctl did not set: another client drives the
        server, or it was started anew behind a proxy, and then has the label and the weights again that it had at
        first.
        """
        version = self.version(label)
        if version is None or version.sequence < since.sequence:
            called = "did not call them" if version is None else "called them before this sample began"
            raise Reason.ENGINE_FAILED.error(
                f"the server says that its weights are {label!r}, which rlctl {called}",
                next_step="Start its stage again: nothing is known of what the server holds.",
            )
        return version

    def spans(self, sample: Sample, told: Iterable[Mapping[str, Any]], since: WeightVersion) -> None:
        """Say in a sample which version each stretch of it is of; ``told``: the server's spans, version, start, end.

        ``since``: the version that the server was at when the sample began. Raises as :meth:`version_since`.
        """
        for span in told:
            if span["end"] <= span["start"]:
                continue
            version = self.version_since(str(span["version"]), since)
            sample.versions.add(version=version, start=span["start"], end=min(span["end"], sample.completion_tokens))

    def kv_of(self, sample: Sample, since: WeightVersion) -> None:
        """Say in a sample, once its cached tokens are known, where it attends to older KV entries than its own.

        ``since``: the version that its cache salt names. Entries of earlier versions are out of its reach.
        """
        oldest = max(self.oldest_kv, since, key=lambda version: version.sequence)
        for made in sample.versions:
            if oldest.sequence < made.version.sequence and (made.start or sample.cached_tokens):
                made.kv_version.CopyFrom(oldest)  # no flush since: it was asked for

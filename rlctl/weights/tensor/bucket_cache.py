"""Cache of parsed bucket announcements. Successive updates mostly announce equal buckets, which are parsed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlctl.v1.verbs_pb2 import TensorBucket, UpdateWeightsFromDistributedRequest
from rlctl.weights.tensor.buckets import Bucket, from_proto


class Announced:
    """Parser of announcements that caches the last result. For one thread at a time."""

    def __init__(self) -> None:
        self._message = b""
        self._parsed: Sequence[tuple[str, Bucket]] = ()

    def parse(self, buckets: Iterable[TensorBucket], group_name: str = "") -> Sequence[tuple[str, Bucket]]:
        """Return (group, bucket) in the order of the messages; ``group_name`` is the default group.

        Raises as :func:`rlctl.weights.tensor.buckets.from_proto`, with the field in the request.
        """
        message = UpdateWeightsFromDistributedRequest(group_name=group_name, buckets=buckets).SerializeToString()
        if message != self._message:
            parsed = [
                (bucket.group_name or group_name, from_proto(bucket, f"buckets[{index}]"))
                for index, bucket in enumerate(buckets)
            ]
            self._message, self._parsed = message, parsed
        return self._parsed

"""When two adapters are the same one."""

from __future__ import annotations

from rlctl.v1.verbs_pb2 import Adapter


def same(one: Adapter, other: Adapter) -> bool:
    """Whether they are one adapter: by name and label, and by the update that brought it where both say which.

    A label may come again with other weights. One without an id was there before ids were kept, or its engine was
    told to load it by somebody else; its label is all there is.
    """
    if (one.name, one.version) != (other.name, other.version):
        return False
    return not one.load_id or not other.load_id or one.load_id == other.load_id

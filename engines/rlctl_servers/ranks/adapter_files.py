"""The digest of an adapter's files, equal at the stage server and at ranks that read the same files."""

from __future__ import annotations

import hashlib

from rlctl.v1.verbs_pb2 import CheckpointReport
from rlctl.weights.formats import lora
from rlctl.weights.tensor.digest import ModelDigest


def report(path: str) -> CheckpointReport:
    """Return number and digest of the tensors at a path. The version is a digest of the settings.

    Raises as :func:`rlctl.weights.formats.lora.open_adapter`.
    """
    config, stored = lora.open_adapter(path)
    digest = ModelDigest()
    try:
        for name in stored.metas:
            digest.add(name, stored.read(name))
    finally:
        stored.close()
    settings = hashlib.sha256(config.SerializeToString(deterministic=True)).hexdigest()
    return CheckpointReport(tensors=len(stored.metas), version=settings, model_digest=digest.digest())

"""The model digest of a trainer's weights, computed without a fleet, to compare with the digest of a version."""

from __future__ import annotations

import contextlib

from rlctl.contract.digests import is_digest, key_of
from rlctl.contract.errors import Reason
from rlctl.trainer.bucket_plan import Offered, fit
from rlctl.weights.checkpoint.checkpoint import open_checkpoint
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.source import Weights, as_offer, only, spares_of
from rlctl.weights.tensor.tensors import TensorMeta


def model_digest(weights: Weights, *, checkpoint: str = "", like: str = "") -> str:
    """Return the model digest of full tensors under their checkpoint names, as reported by a fleet with these weights.

    ``checkpoint``: directory of the rollout checkpoint, for names and dtypes of the tensors in the fleet. Without
    ``checkpoint``, a module's tensors have the names of ``save_pretrained``, and all tensors keep the given dtypes.
    ``like``: a digest with the function and key to use; "" is SHA-256. Raises UNSUPPORTED as an update does, and with
    ``checkpoint`` also FIELD_INVALID and WEIGHTS_INCOMPLETE.
    """
    if like and not is_digest(like):
        raise Reason.FIELD_INVALID.error("like is not a digest (HEX or HEX@KEY)", field="like")
    source, digest = as_offer(weights), ModelDigest(key_of(like))
    reference: list[TensorMeta] = []
    if checkpoint:
        with contextlib.closing(open_checkpoint(checkpoint, field="checkpoint")) as opened:
            reference = list(opened.metas.values())
    offered = Offered(source.metas(), [], "", spares=spares_of(source))
    (wire,) = fit(checkpoint or "the model", [offered], reference, partial=False)
    dtypes = {meta.name: meta.dtype for meta in wire.metas}
    for name, tensor in only(source, dtypes).tensors():
        digest.add(name, tensor, dtypes[name])
    return digest.digest()


def has_digest(weights: Weights, digest: str, *, checkpoint: str = "") -> bool:
    """Return whether weights have a model digest, such as ``UpdateResult.model_digest`` or that of a rank.

    The digest is computed by :func:`model_digest` with the function and key of ``digest``. Raises as
    :func:`model_digest`.
    """
    return bool(digest) and model_digest(weights, checkpoint=checkpoint, like=digest) == digest

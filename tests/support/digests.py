"""Digests of weights, by any function."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rlctl


def holds(digests: Iterable[str], weights: Any, **settings: Any) -> bool:
    """Whether there are digests, and each is the model digest of the weights, by its function and key."""
    texts = list(digests)
    return bool(texts) and all(rlctl.has_digest(weights, text, **settings) for text in texts)

"""The form of the calls to ranks; both ends import it."""

from __future__ import annotations

PROTOCOL = 1
"""A stage server does not drive ranks whose code has another number."""

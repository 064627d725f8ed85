"""The form of the calls to ranks, imported by both ends."""

from __future__ import annotations

PROTOCOL = 4
"""Number of the form. A stage server does not drive ranks with a different number."""

POLL = "Poll"
"""Asks for the answer of an earlier call. The request is the number of that call."""

LATER = "later"
"""In an answer: the call runs in the background."""

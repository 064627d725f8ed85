"""The form of the calls to ranks; both ends import it."""

from __future__ import annotations

PROTOCOL = 2
"""A stage server does not drive ranks whose code has another number."""

POLL = "Poll"
"""Asks for the answer of an earlier call; its request is that call's number."""

LATER = "later"
"""In an answer: the call is being carried out in the background."""

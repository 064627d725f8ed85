"""Placeholders in the paths of routes that name a stage."""

from __future__ import annotations

SLOT = "slot"
"""The stage that answers the request; no other stage is tried."""
PREFERRED = "preferred"
"""The stage that answers the request if it serves."""
PREFILL = "prefill"
"""The stage that computes the prompt if it serves."""
ANY = "-"
"""In place of a slot's name: any stage that serves."""

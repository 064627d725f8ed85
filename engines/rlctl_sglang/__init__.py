"""A real SGLang server as an engine of rlctl: launched by the stage server, or attached to, and driven over HTTP.

:class:`SGLangEngine` is the port; see :mod:`rlctl_sglang.server.process` for launching,
:mod:`rlctl_servers.server.http` for calls, :mod:`rlctl_sglang.state` for what SGLang may be told when,
:mod:`rlctl_sglang.updates.updates` for weights, :mod:`rlctl_sglang.requests.requests` for requests. ``cpu/`` is what
lets SGLang run without a GPU; rlctl imports none of it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlctl_sglang.engine import SGLangEngine

__all__ = ["SGLangEngine"]


def __getattr__(name: str) -> Any:
    """Load the engine when it is asked for: its settings can be read without it."""
    if name != "SGLangEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlctl_sglang.engine import SGLangEngine

    return SGLangEngine

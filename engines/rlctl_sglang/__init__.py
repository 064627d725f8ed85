"""Real SGLang servers as engines: launched or attached to, driven over HTTP and by a plug-in inside their ranks.

``engine.py`` (``SGLangEngine``) implements the Engine interface; ``state.py`` (``State``, pure) decides what
SGLang may be sent next. Packages: server, requests, updates, diffusion; ranks runs inside SGLang. ``cpu`` lets
SGLang run without a GPU; rlctl imports none of it.

Imports: rlctl_servers, rlctl.engine, rlctl.contract, rlctl.weights.

Start with ``state.py``, then ``updates/rank_calls.py`` and ``ranks/plugin.py``. ``docs/sglang.md`` lists what is
refused and why.
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

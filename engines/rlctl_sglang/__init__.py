"""Real SGLang servers as engines: launched or attached to, driven over HTTP and by a plug-in inside the ranks.

``engine.py`` (``SGLangEngine``) implements the Engine interface; ``state.py`` (``State``, pure) decides the next
permitted calls. Packages: server, requests, updates, diffusion; ranks runs inside SGLang. ``cpu`` lets SGLang run
without a GPU; rlctl does not import it.

Imports: rlctl_servers, rlctl.engine, rlctl.contract, rlctl.weights.

Start with ``state.py``, then ``updates/rank_calls.py`` and ``ranks/plugin.py``. ``docs/sglang.md`` lists refusals and
reasons.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlctl_sglang.engine import SGLangEngine

__all__ = ["SGLangEngine"]


def __getattr__(name: str) -> Any:
    """Load the engine on demand: the settings are readable without the engine."""
    if name != "SGLangEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlctl_sglang.engine import SGLangEngine

    return SGLangEngine

"""The hooks of an engine before and after the tensors of an update.

Some engines rearrange weights for their kernels, and cannot be written directly. Such an engine unpacks before the
first tensor, and packs, quantises or captures again after the last. A plug-in implements this in :class:`LoadHooks`.
:class:`Loading` calls each hook once and in order, for any number of calls and groups of an update.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import WEIGHT_SELECTOR_DRAFT, WEIGHT_SELECTOR_UNSPECIFIED, WeightSelector


@dataclass(frozen=True)
class Load:
    """An update, for the hooks.

    Attributes:
        full: the update writes every tensor of the reference.
        selector: the addressed model of the engine; UNSPECIFIED: all models.
    """

    update_id: str
    full: bool
    selector: WeightSelector.ValueType = WEIGHT_SELECTOR_UNSPECIFIED


class LoadHooks:
    """Hooks that a plug-in overrides; the defaults do nothing. Called in the thread that receives the weights.

    SGLang's begin_weight_update (which takes the selector) and end_weight_update belong here. So do vLLM's
    start_weight_update and finish_weight_update, which make ``reload_weights`` quantise again.
    """

    def prepare_load(self, load: Load) -> None:
        """Prepare the weights for tensors of the wire form, before the first tensor is written.

        An error refuses the update; the weights must still be intact.
        """

    def finalize_load(self, load: Load) -> None:
        """Complete the load after the last tensor was written, before any digest or computation.

        An error leaves the weights DIRTY.
        """

    def abandon_load(self, load: Load) -> None:
        """Leave the loading state, in place of :meth:`finalize_load`, when no more tensors come. Must not raise.

        The weights count as a mixture; the next full update is prepared anew.
        """


class Loading:
    """One update's calls of an engine's hooks; the calls are sequential."""

    def __init__(self, hooks: LoadHooks, load: Load) -> None:
        self.load = load
        self._hooks = hooks
        self._prepared = False

    def prepare(self) -> None:
        """Call the hook before the first tensor. Later calls do nothing."""
        if not self._prepared:
            self._hooks.prepare_load(self.load)
            self._prepared = True

    def finalise(self) -> None:
        """Call the hook after the last tensor; no-op without tensors. :meth:`abandon` may follow a failure."""
        if self._prepared:
            self._hooks.finalize_load(self.load)
            self._prepared = False

    def abandon(self) -> None:
        """Call the hook for an abandoned update; no-op unless prepared and not finalised."""
        if self._prepared:
            self._prepared = False
            self._hooks.abandon_load(self.load)


def refuse_draft(selector: WeightSelector.ValueType, field: str) -> None:
    """Raise UNSUPPORTED, with ``field``, if a selector addresses the draft model. For engines with one model."""
    if selector == WEIGHT_SELECTOR_DRAFT:
        raise Reason.UNSUPPORTED.error("the engine has no draft model", field=field)

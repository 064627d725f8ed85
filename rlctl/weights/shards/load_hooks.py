"""The hooks of an engine before and after the tensors of an update.

Engines that rearrange weights for their kernels cannot simply be written into: they unpack before the first tensor and
pack, quantise or capture again after the last. :class:`LoadHooks` is where a plug-in does that; :class:`Loading` sees
to it that each hook is called once and in order, however many calls and groups an update's tensors come in.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import WEIGHT_SELECTOR_DRAFT, WEIGHT_SELECTOR_UNSPECIFIED, WeightSelector


@dataclass(frozen=True)
class Load:
    """One update, as the hooks see it.

    Attributes:
        update_id: the update.
        full: it writes every tensor of the reference.
        selector: which of the engine's models it is meant for; UNSPECIFIED: all of them.
    """

    update_id: str
    full: bool
    selector: WeightSelector.ValueType = WEIGHT_SELECTOR_UNSPECIFIED


class LoadHooks:
    """What a plug-in overrides; by default nothing happens. Called in the thread that takes the weights in.

    SGLang's begin_weight_update (which takes the selector) and end_weight_update belong here, as do vLLM's
    start_weight_update and finish_weight_update: the latter pair is what makes ``reload_weights`` re-quantise.
    """

    def prepare_load(self, load: Load) -> None:
        """Before the first tensor is written: make the weights such that tensors of the wire form can be put in.

        What it raises refuses the update; nothing may have been lost by then.
        """

    def finalize_load(self, load: Load) -> None:
        """After the last tensor was written, before anything is digested or computed.

        What it raises leaves the weights DIRTY.
        """

    def abandon_load(self, load: Load) -> None:
        """In place of :meth:`finalize_load` when no more tensors come: leave the state of loading. Must not raise.

        The weights count as a mixture; the next full update is prepared anew.
        """


class Loading:
    """One update's way past an engine's hooks; the calls come one after the other."""

    def __init__(self, hooks: LoadHooks, load: Load) -> None:
        self.load = load
        self._hooks = hooks
        self._prepared = False

    def prepare(self) -> None:
        """Tensors come now. Only the first call does anything."""
        if not self._prepared:
            self._hooks.prepare_load(self.load)
            self._prepared = True

    def finalise(self) -> None:
        """All tensors have come; nothing happens where none came. A failure may be followed by :meth:`abandon`."""
        if self._prepared:
            self._hooks.finalize_load(self.load)
            self._prepared = False

    def abandon(self) -> None:
        """The update is given up; nothing happens unless its load was begun and not finalised."""
        if self._prepared:
            self._prepared = False
            self._hooks.abandon_load(self.load)


def refuse_draft(selector: WeightSelector.ValueType, field: str) -> None:
    """For engines that have one model: raise UNSUPPORTED when the draft model is meant, naming ``field``."""
    if selector == WEIGHT_SELECTOR_DRAFT:
        raise Reason.UNSUPPORTED.error("the engine has no draft model", field=field)

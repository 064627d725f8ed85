"""The transport of calls to the ranks through SGLang, imported by both ends.

SGLang hands ``POST /weights_checker`` to the scheduler of every tensor-parallel rank, between two steps, and its
``action`` is a free string.
"""

from __future__ import annotations

ACTION = "rlctl"
"""The action of rlctl's calls. ``skip_tensor_list`` has one string: the call's arguments in JSON."""

ENTRY_POINT = ("sglang.srt.plugins", "rlctl = rlctl_sglang.ranks.plugin:register")
"""Group and entry by which SGLang finds the plug-in."""

TARGET = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.check_weights"
"""The SGLang method that carries rlctl's calls, and that the plug-in hooks."""

PAUSED_ROUND = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
"""The SGLang method that ends each round of a paused scheduler's loop, and that the plug-in hooks."""

NEW_LABEL = "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change"
"""The SGLang method that takes a new label of the weights, and that the plug-in hooks."""

RETRACTED = "sglang.srt.managers.schedule_batch.Req.reset_for_retract"
"""The SGLang method that drops what a retracted request has computed beside its tokens, and that the plug-in hooks."""

ABSENT = (
    "rlctl's plug-in does not run in SGLang's ranks: rlctl is not installed beside SGLang, or SGLANG_PLUGINS excludes "
    f"it, or this SGLang has no {TARGET}"
)
"""The error for ranks that do not answer. SGLang refuses an unknown action."""

UNKNOWN_ACTION = "Unsupported action="
"""Refusal of an action by SGLang's own checker (``srt/utils/weight_checker.py``)."""

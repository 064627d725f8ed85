"""control_share, decode_check_share, second_update_groups, extra_memory_in_place: costs beside the transfer."""

from __future__ import annotations

from rlctl.trainer.publisher import BUCKET_BYTES
from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.rounds import Spread, median, ratios
from tools.benchmark.weights.updates import tp1, tp2


def _control(setting: Setting) -> Reading:
    samples = setting.once(tp1).plain
    control = [sample.control_s for sample in samples]
    return Reading.of(
        ratios(control, [sample.total_s for sample in samples]),
        control_ms=median(control) * 1e3,
        update_ms=median([sample.total_s for sample in samples]) * 1e3,
    )


def _decode_check(setting: Setting) -> Reading:
    rounds = setting.once(tp1)
    checked = [sample.total_s for sample in rounds.checked]
    added = [max(0.0, with_s - plain.total_s) for with_s, plain in zip(checked, rounds.plain, strict=True)]
    return Reading.of(
        ratios(added, checked),
        added_ms=median(added) * 1e3,
        update_ms=median(checked) * 1e3,
    )


def _stall(setting: Setting) -> Reading:
    samples = setting.once(tp1).plain
    return Reading.of(
        ratios([sample.sent_s for sample in samples], [sample.receiving_s for sample in samples]),
        stall_ms=median([sample.sent_s for sample in samples]) * 1e3,
        transfer_ms=median([sample.receiving_s for sample in samples]) * 1e3,
        update_ms=median([sample.total_s for sample in samples]) * 1e3,
    )


def _groups(setting: Setting) -> Reading:
    first, later = setting.once(tp1).formed
    return Reading(later, later, later, details={"first_update_groups": first})


def _memory(setting: Setting) -> Reading:
    whole = [sample.extra_bytes / BUCKET_BYTES for sample in setting.once(tp1).plain]
    sliced = [sample.extra_bytes / BUCKET_BYTES for sample in setting.once(tp2).plain]
    worst = max(whole, sliced, key=median)
    return Reading.of(
        Spread.of(worst),
        tp1_ratio=median(whole),
        tp2_ratio=median(sliced),
        bucket_mib=BUCKET_BYTES / 2**20,
    )


CONTROL = Figure(
    "control_share",
    "time that is neither collective nor copying into place ÷ whole update",
    "ratio",
    _control,
    at_most=0.03,
)
DECODE_CHECK = Figure(
    "decode_check_share",
    "time that the decode check adds to an update ÷ the update with the check",
    "ratio",
    _decode_check,
    at_most=0.1,
)
STALL = Figure(
    "trainer_stall",
    "from update_async to the return of wait_sent ÷ transfer (a rank's first broadcast to its last copy)",
    "ratio",
    _stall,
    at_most=1.05,
)
GROUPS = Figure(
    "second_update_groups", "groups formed by later updates with unchanged membership", "groups", _groups, at_most=0
)
MEMORY = Figure(
    "extra_memory_in_place",
    "most memory that a rank takes during an update in place ÷ bucket size, TP 1 and TP 2",
    "ratio",
    _memory,
    at_most=2,
)

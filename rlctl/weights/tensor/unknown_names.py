"""Unknown tensor names: find the probable name in the checkpoint for the error message."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection

from rlctl.contract.errors import Reason
from rlctl.weights.tensor.checkpoint_names import WRAPPING

_NEAR = 0.6
"""Minimum similarity, between 0 and 1, of the nearest name."""


def refuse_unknown(model: str, sent_names: Collection[str], checkpoint_names: Collection[str]) -> None:
    """Raise FIELD_INVALID for names that are not in a model's rollout checkpoint."""
    unknown = [name for name in sent_names if name not in checkpoint_names]
    if not unknown:
        return
    first = unknown[0]
    message = f"{model} has no tensor {first!r}"
    next_step = "Give the tensors under the names of the rollout checkpoint."
    added_prefixes, missing_prefixes = _prefixes(unknown, checkpoint_names), _lacking(unknown, checkpoint_names)
    if added_prefixes and (not missing_prefixes or added_prefixes[0][1] >= missing_prefixes[0][1]):
        prefix, count, name, right = added_prefixes[0]
        message += f": {count} of {len(sent_names)} names hold {prefix!r}, and {name!r} is {right!r} there"
        next_step = "Give the module inside the wrapper, or remove the wrapper's part from the names."
    elif missing_prefixes:
        prefix, count, name, right = missing_prefixes[0]
        message += f": {count} of {len(sent_names)} names lack {prefix!r} in front, and {name!r} is {right!r} there"
        next_step = "Give the whole model, not its inner module."
    else:
        if len(unknown) > 1:
            message += f"; {len(unknown)} of {len(sent_names)} names are unknown"
        near = difflib.get_close_matches(first, checkpoint_names, n=1, cutoff=_NEAR)
        message += f"; the nearest to it is {near[0]!r}" if near else ""
    raise Reason.FIELD_INVALID.error(message, field="weights", next_step=next_step)


_Affixes = list[tuple[str, int, str, str]]
"""An affix, the number of names with the affix, the first such name, and its checkpoint name; most frequent first."""


def _prefixes(unknown: Collection[str], checkpoint_names: Collection[str]) -> _Affixes:
    """Return the parts that wrappers added: in front, or, for torch's wrappers, anywhere."""
    counts: Counter[str] = Counter()
    examples: dict[str, tuple[str, str]] = {}
    for name in unknown:
        parts = name.split(".")
        pairs = [(f"{word}.", ".".join(part for part in parts if part != word)) for word in WRAPPING if word in parts]
        pairs += [(".".join(parts[:cut]) + ".", ".".join(parts[cut:])) for cut in range(1, len(parts))]
        for affix, rest in pairs:
            if rest in checkpoint_names:
                counts[affix] += 1
                examples.setdefault(affix, (name, rest))
                break
    return [(affix, count, *examples[affix]) for affix, count in counts.most_common()]


def _lacking(unknown: Collection[str], checkpoint_names: Collection[str]) -> _Affixes:
    """Return the prefixes of checkpoint names that the names of the source lack."""
    ends: dict[str, list[str]] = {}
    for name in checkpoint_names:
        parts = name.split(".")
        for cut in range(1, len(parts)):
            ends.setdefault(".".join(parts[cut:]), []).append(name)
    counts: Counter[str] = Counter()
    examples: dict[str, tuple[str, str]] = {}
    for name in unknown:
        for full_name in ends.get(name, ()):
            affix = full_name[: -len(name)]
            counts[affix] += 1
            examples.setdefault(affix, (name, full_name))
    return [(affix, count, *examples[affix]) for affix, count in counts.most_common()]

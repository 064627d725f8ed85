"""What SGLang, behind the plug-in, does with admin verbs in any order. Pure: a model to compare the real one with.

From SGLang's documentation of pause modes, weight updates and memory occupation, and from the refusals that
``docs/sglang.md`` lists.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from rlctl.contract.errors import Reason

MODES = ("abort", "retract", "in_place")
TAGS = ("kv_cache", "weights")
CHECKPOINTS = ("first", "second")
BROADCASTS = ("third", "fourth")


class Request(Enum):
    """Where a request is that has not ended."""

    RUNNING = auto()
    FROZEN = auto()
    """In the batch, its KV entries held, by a pause in place."""
    RETRACTED = auto()
    """Waiting, without KV entries, by a pause that retracts."""
    HELD = auto()
    """Not let in, because it came during a pause."""


@dataclass
class Model:
    """One server.

    Attributes:
        paused: pause mode, or "".
        requests: those that have not ended, by id.
        ghosts: requests that were ended while frozen: SGLang lets go of them when it goes on.
        released: memory regions that are released.
        holding: the plug-in has paused it, for an update or because memory is released.
        update: id of the open update, or "".
        written: how every tensor was written in it, "disk" or "group"; "": none was.
        weights: name of what is held.
        cached: caches may hold entries of other weights.
        label: SGLang's version label; None: its own.
    """

    paused: str = ""
    requests: dict[str, Request] = field(default_factory=dict)
    ghosts: bool = False
    released: set[str] = field(default_factory=set)
    holding: bool = False
    update: str = ""
    written: str = ""
    weights: str = "first"
    cached: bool = False
    label: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether nothing is generated."""
        return bool(self.paused) or self.holding

    @property
    def holds_entries(self) -> bool:
        """Whether KV entries are in use."""
        return self.ghosts or any(self._in(Request.RUNNING, Request.FROZEN))

    def _in(self, *states: Request) -> Iterable[str]:
        return [rid for rid, state in self.requests.items() if state in states]

    def _to(self, state: Request, *before: Request) -> None:
        for rid in self._in(*before):
            self.requests[rid] = state

    def _run(self) -> None:
        self.ghosts = False
        self._to(Request.RUNNING, Request.FROZEN, Request.RETRACTED, Request.HELD)

    # Each method: None when it is done, or why it is refused; a refusal changes nothing.

    def pause(self, mode: str) -> Reason | None:
        """Pause."""
        if mode not in MODES:
            return Reason.UNSUPPORTED
        if mode == "abort" and self.paused == "in_place":
            if self.requests:
                return Reason.PAUSE_MODE_CONFLICT
            mode = "retract"
        if mode == "abort":
            for rid in self._in(Request.RUNNING, Request.RETRACTED):
                del self.requests[rid]
        elif mode == "retract":
            self.ghosts = False
            self._to(Request.RETRACTED, Request.RUNNING, Request.FROZEN)
        else:
            self._to(Request.FROZEN, Request.RUNNING)
        self.paused = mode
        return None

    def go_on(self) -> Reason | None:
        """Continue."""
        if self.released:
            return Reason.MEMORY_RELEASED
        if self.update:
            return Reason.ILLEGAL_STATE
        self.paused, self.holding = "", False
        self._run()
        return None

    def begin(self, rid: str) -> Reason | None:
        """A request that does not end by itself."""
        if rid in self.requests:
            return Reason.RID_IN_USE
        self.requests[rid] = Request.HELD if self.stopped else Request.RUNNING
        return None

    def abort(self, rids: Iterable[str]) -> list[str]:
        """End requests; returns those that there were."""
        ended = [rid for rid in rids if rid in self.requests]
        for rid in ended:
            self.ghosts |= self.requests.pop(rid) is Request.FROZEN
        return ended

    def flush(self) -> Reason | None:
        """Empty the caches."""
        if self.holds_entries:
            return Reason.ACTIVE_REQUESTS
        self.cached = False
        return None

    def release(self, tags: Iterable[str]) -> Reason | None:
        """Release memory."""
        if self.update:
            return Reason.ILLEGAL_STATE
        if set(tags) - set(TAGS):
            return Reason.FIELD_INVALID
        new = set(tags or TAGS) - self.released
        if new and self.holds_entries:
            return Reason.MEMORY_NOT_RELEASABLE
        if new:
            self.holding |= not self.paused
            self.cached = False
        self.released |= new
        return None

    def resume(self, tags: Iterable[str]) -> Reason | None:
        """Resume memory."""
        if set(tags) - set(TAGS):
            return Reason.FIELD_INVALID
        self.released -= set(tags or TAGS)
        self._let_go()
        return None

    def _let_go(self) -> None:
        """End the plug-in's own pause, unless released memory or an update needs it."""
        if self.holding and not self.released and not self.update:
            self.holding = False
            if not self.paused:
                self._run()

    def prepare(self, update: str, *, abort: bool) -> Reason | None:
        """Open an update."""
        if "weights" in self.released:
            return Reason.MEMORY_RELEASED
        if self.update not in ("", update):
            return Reason.UPDATE_IN_PROGRESS
        if self.requests and not self.stopped:
            if not abort:
                return Reason.ACTIVE_REQUESTS
            self.requests.clear()
        self.holding |= not self.paused
        self.update, self.written = update, ""
        return None

    def write(self, update: str, weights: str, *, over: str) -> Reason | None:
        """Write all weights, from disk or over a group, not both in one update."""
        if not self.update:
            return Reason.UPDATE_NOT_FOUND
        if self.update != update:
            return Reason.UPDATE_FENCED
        if self.written not in ("", over):
            return Reason.ILLEGAL_STATE
        self.weights, self.written, self.cached = weights, over, True
        return None

    def commit(self, update: str, label: str) -> Reason | None:
        """Close the update."""
        if not self.update:
            return Reason.UPDATE_NOT_FOUND
        if self.update != update:
            return Reason.UPDATE_FENCED
        if not self.written:
            return Reason.WEIGHTS_INCOMPLETE
        self.update, self.label = "", label
        self._let_go()
        return None

    def drop(self, update: str) -> Reason | None:
        """Abort the update."""
        if self.update and self.update != update:
            return Reason.UPDATE_FENCED
        self.update = ""
        self._let_go()
        return None


def choose(rng: random.Random, model: Model) -> tuple[str, tuple[str, ...]]:
    """A verb and its arguments, valid or not; those that lead on are more likely."""
    update = rng.choice((model.update or "u1", "u1", "u2"))
    tags = tuple(rng.sample((*TAGS, "cuda_graph"), rng.choice((0, 1, 1, 2))))
    choices: list[tuple[int, str, tuple[str, ...]]] = [
        (5, "pause", (rng.choice((*MODES, *MODES, "drain", "99")),)),
        (4, "go_on", ()),
        (5 if len(model.requests) < 3 else 1, "begin", (rng.choice(("r1", "r2", "r3")),)),
        (1, "begin_wrong", ()),
        (2, "abort", (rng.choice(("r1", "r2", "r3")),)),
        (1, "abort_all", ()),
        (3, "flush", ()),
        (2, "release", tags),
        (4 if model.released else 1, "resume", tags),
        (4, "prepare", (update, rng.choice(("", "", "abort")))),
        (5 if model.update else 1, "load", (update, rng.choice(CHECKPOINTS))),
        (1, "load_wrong", (update,)),
        (4 if model.update else 1, "broadcast", (update, rng.choice(BROADCASTS))),
        (1, "broadcast_nowhere", (update,)),
        (4 if model.update else 1, "commit", (update,)),
        (2, "drop", (update,)),
        (1, "leave_nothing", ()),
        (4 if not model.stopped else 0, "generate", ()),
    ]
    ((_, verb, arguments),) = rng.choices(choices, [weight for weight, _, _ in choices])
    return verb, arguments

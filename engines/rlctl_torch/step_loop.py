"""The engine thread of a rank. Rank 0 plans the next step; every rank, including rank 0, carries out the plan."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from rlctl.contract.errors import Reason, RlctlError, without_frames
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl.v1.rollout_pb2 import KvHandover
from rlctl.v1.verbs_pb2 import TensorSegment
from rlctl_torch.generation.forward_pass import run
from rlctl_torch.generation.scheduler import Scheduler
from rlctl_torch.rank import Rank
from rlctl_torch.steps.background import Later
from rlctl_torch.steps.collectives import HEARTBEAT_S, Broken
from rlctl_torch.steps.ordered_commands import CommandStream, unknown
from rlctl_torch.steps.step_plan import Move, Order, Plan
from rlctl_torch.verbs.decode_check import calibrate

log = logging.getLogger(__name__)

_POLL_S = 0.005
"""Seconds between two checks of a waiting ordered command while there is nothing else to do."""

_STOP_PLAN_S = 1.0
_STOP_S = 5.0


class Listener(Protocol):
    """Listener for the start and the failure of the engine thread, called on that thread."""

    def started(self, model_digest: str) -> None: ...

    def failed(self, error: RlctlError) -> None:
        """Report that the rank could not start or can no longer work."""


class StepLoop:
    """Engine thread of a rank, until a stop or a failure."""

    def __init__(self, rank: Rank, commands: CommandStream, join: Callable[[], None], listener: Listener) -> None:
        """``join`` forms the process groups of the ranks."""
        self.step = 0
        """Number of the present or last step."""
        self._rank = rank
        self._commands = commands
        self._join = join
        self._listener = listener
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rlctl-torch-{rank.ranks.rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Wake the engine thread of rank 0; from any thread."""
        if self._rank.scheduler is not None:
            self._rank.scheduler.work.set()

    def stop(self) -> None:
        """End the thread; blocks a few seconds at most. A stuck thread is left behind."""
        self._stopping.set()
        self.wake()
        if not self._thread.is_alive():
            return
        if self._rank.ranks.rank != 0:
            # Rank 0 is probably being stopped too, and announces its stop.
            self._thread.join(_STOP_PLAN_S)
        self._rank.ranks.stop()
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            log.warning("rank %d is stuck in its own code and is left behind", self._rank.ranks.rank)

    def _run(self) -> None:
        ranks = self._rank.ranks
        try:
            torch.set_num_threads(self._rank.options.threads)
            if self._rank.device.type == "cuda":
                torch.cuda.set_device(self._rank.device)
            self._join()
            digest = self._rank.load()
            self._rank.calibration = calibrate(self._rank)
            self._listener.started(digest)
            if self._rank.scheduler is not None:
                self._lead(self._rank.scheduler)
            else:
                self._follow()
        except Broken as broken:
            self._fail(broken.error)
        except RlctlError as error:
            self._fail(error)
        except Exception as error:
            # After any exception this rank is no longer in step with the other ranks.
            log.exception("rank %d failed", ranks.rank)
            self._fail(
                Reason.ENGINE_FAILED.error(
                    f"rank {ranks.rank}: {type(error).__name__}: {error}", outcome=OUTCOME_UNKNOWN
                )
            )
        finally:
            self._rank.beside.stop(Reason.CANCELLED.error("the engine was stopped"))
            self._rank.handovers.close()
            ranks.close()

    def _fail(self, error: RlctlError) -> None:
        if not self._stopping.is_set():
            self._listener.failed(error)

    def _lead(self, scheduler: Scheduler) -> None:
        sent_at = time.monotonic()
        while not self._stopping.is_set():
            scheduler.work.clear()
            plan = self._next(scheduler)
            if plan is None:
                wait_s = HEARTBEAT_S if self._rank.ranks.size == 1 else HEARTBEAT_S - (time.monotonic() - sent_at)
                if wait_s > 0:
                    scheduler.work.wait(_POLL_S if self._commands.waiting else wait_s)
                    continue
                plan = Plan(self.step + 1)
            self._rank.ranks.send_plan(plan)
            sent_at = time.monotonic()
            self._carry_out(plan)
        self._rank.ranks.send_plan(Plan(self.step + 1, stop=True))

    def _follow(self) -> None:
        while True:
            plan = self._rank.ranks.receive_plan()
            if plan.stop:
                # Rank 0 was stopped on purpose. A follower can do nothing without rank 0.
                self._fail(Reason.RANK_LOST.error("rank 0 was stopped"))
                return
            self._carry_out(plan)

    def _next(self, scheduler: Scheduler) -> Plan | None:
        """Return the plan of the next step, or None if there is nothing to do."""
        order = self._commands.next_order()
        if order is not None:
            return Plan(self.step + 1, orders=(order,))
        move = scheduler.let_go()
        if move is None and self._rank.may_run:
            move = scheduler.move(admit=not self._rank.draining)
        if move is not None:
            return Plan(self.step + 1, move=move)
        if not self._rank.may_run:
            return None
        batch = scheduler.schedule(admit=not self._rank.draining)
        return None if batch is None else Plan(self.step + 1, batch=batch)

    def _carry_out(self, plan: Plan) -> None:
        self.step = plan.step
        for order in plan.orders:
            self._execute(order)
        if plan.move is not None:
            self._move(plan.move)
        if plan.batch is not None:
            scheduler = self._rank.scheduler
            rank = self._rank
            logits = run(rank.model, rank.cache, rank.adapters, plan.batch, all_logits=scheduler is not None)
            if scheduler is not None:
                scheduler.process(logits)
            self._rank.last_step = time.perf_counter()

    def _move(self, move: Move) -> None:
        """Move KV entries to or from the other engine of a pair. Rank 0 reports the result to its scheduler."""
        rank = self._rank
        segments: list[TensorSegment] = []
        failure: RlctlError | None = None
        try:
            match move.kind:
                case "give":
                    segments = rank.handovers.give(rank.cache, move.room, move.slots)
                case "take":
                    rank.handovers.take(rank.cache, move.row, move.slots, KvHandover.FromString(move.handover))
                case "let_go":
                    rank.handovers.let_go(move.room)
                    return
        except RlctlError as error:
            failure = error
        if rank.scheduler is not None:
            rank.scheduler.moved(segments, failure)

    def _execute(self, order: Order) -> None:
        command = self._commands.take(order.command_id, self.step)
        if order.refusal is not None:
            command.settle(None, order.refusal)
            return
        try:
            answer = command.action.run()
            if isinstance(answer, Later):
                self._rank.beside.do(answer, command.settle)
            else:
                command.settle(answer)
        except RlctlError as error:
            command.settle(None, without_frames(error))  # the frames refer to tensors, and to the error itself
        except Broken as broken:
            command.settle(None, unknown(broken.error))
            raise
        except Exception as error:
            command.settle(
                None, Reason.ENGINE_FAILED.error(f"{type(error).__name__}: {error}", outcome=OUTCOME_UNKNOWN)
            )
            raise

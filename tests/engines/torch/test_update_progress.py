"""Reports of an update's progress to the trainer, on every path, against torch engines."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_weights import Interrupted
from loras import CONFIG, lora
from models import changed

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime import progress_line
from rlctl.sdk import aio
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.trainer import progress_reports
from rlctl.trainer.publisher import AsyncPublisher
from rlctl.weights.tensor.source import as_source
from rlctl.weights.tensor.tensors import TensorMeta

pytestmark = pytest.mark.timeout(60)

WAIT_S = 20.0


class Reports:
    """Records reports, and lets a source wait for one."""

    def __init__(self) -> None:
        self.all: list[rlctl.UpdateProgress] = []
        self.threads: set[str] = set()
        self._arrived = threading.Condition()

    def __call__(self, report: rlctl.UpdateProgress) -> None:
        with self._arrived:
            self.all.append(report)
            self.threads.add(threading.current_thread().name)
            self._arrived.notify_all()

    def wait(self, matches: Callable[[rlctl.UpdateProgress], bool]) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: any(map(matches, self.all)), WAIT_S), self.all


class Halting:
    """A source that waits for a report, in each pass, before its last tensor."""

    def __init__(self, model: Any, wait: Callable[[], object]) -> None:
        self._source = as_source(model)
        self._wait = wait

    def metas(self) -> list[TensorMeta]:
        return self._source.metas()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        pairs = list(self._source.tensors())
        yield from pairs[:-1]
        self._wait()
        yield pairs[-1]


@pytest.fixture
async def fleet(tiny: tuple[Any, Path], tmp_path: Path) -> AsyncIterator[InProcessFleet]:
    specs = [StageSpec(slot, str(tiny[1]), engine="torch") for slot in ("a", "b")]
    async with InProcessFleet(tmp_path / "journal.db", specs) as fleet:
        yield fleet


@contextlib.asynccontextmanager
async def publishing(fleet: InProcessFleet, **settings: Any) -> AsyncIterator[AsyncPublisher]:
    client = await aio.connect(fleet.server.address)
    publisher = client.publisher("actor", bucket_bytes=4096, **settings)
    yield publisher
    await publisher.close()
    await client.close()


@pytest.mark.parametrize("apply", ["in_place", "staged"])
@pytest.mark.parametrize("path", ["broadcast", "ipc"])
async def test_phases_stages_and_bytes_are_reported(
    fleet: InProcessFleet, tiny: tuple[Any, Path], path: str, apply: str
) -> None:
    reports = Reports()
    # The engines read a shared segment after it is full, and the coordinator waits for the trainer until then.
    phase, stage_count = ("transfer", 2) if path == "broadcast" else ("wait", 0)
    matches: list[rlctl.UpdateProgress] = []

    def sends(report: rlctl.UpdateProgress) -> bool:
        matches.extend([report] if report.phase == phase and report.bytes_total else [])
        return bool(matches)

    weights = Halting(changed(tiny[0], seed=5), lambda: reports.wait(sends))
    async with publishing(fleet, path=path) as publisher:
        result = await publisher.update(weights, version="new", apply=apply, finite=False, progress=reports)
    assert reports.threads == {"rlctl progress"}
    sending = matches[0]
    assert (sending.update_id, sending.model, sending.version) == (result.operation.operation_id, "actor", "new")
    assert (sending.stages_done, sending.stages_total, sending.attempt, sending.batch) == (0, stage_count, 1, 0)
    assert 0 <= sending.bytes_sent < sending.bytes_total == result.bytes_sent
    last = reports.all[-1]
    assert (last.phase, last.stages_done, last.stages_total) == ("done", 2, 2)
    assert last.bytes_sent == last.bytes_total == result.bytes_sent > 0
    assert last.elapsed_s <= result.total_s
    times = [report.elapsed_s for report in reports.all]
    assert times == sorted(times)


async def test_a_checkpoint_and_an_adapter_are_reported(
    fleet: InProcessFleet, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    model, directory = tiny
    async with publishing(fleet) as publisher:
        of_disk, of_adapter = Reports(), Reports()
        disk = await publisher.update(model, version="disk", checkpoint=str(directory), progress=of_disk)
        adapter = await publisher.update_async(
            lora(model, 1).items(), version="a-1", adapter="math", adapter_config=CONFIG, progress=of_adapter
        ).wait()
    last = of_disk.all[-1]
    assert (last.update_id, last.phase, last.stages_done) == (disk.operation.operation_id, "done", 2)
    assert last.bytes_total == 0
    last = of_adapter.all[-1]
    assert (last.phase, last.bytes_sent, last.bytes_total) == ("done", adapter.bytes_sent, adapter.bytes_sent)


async def test_each_attempt_and_each_batch_counts_its_bytes(fleet: InProcessFleet, tiny: tuple[Any, Path]) -> None:
    async with publishing(fleet) as publisher:
        await publisher.update(tiny[0], version="groups")
        (group,) = publisher._part._groups.values()
        again = Reports()
        weights = Interrupted(changed(tiny[0], seed=6), group.interrupt)
        result = await publisher.update(weights, version="again", retries=1, finite=False, progress=again)
        assert (again.all[-1].attempt, again.all[-1].bytes_sent) == (2, result.bytes_sent)
        batches = Reports()
        numbers = iter((1, 2))

        def wait_for_batch() -> None:
            number = next(numbers)
            batches.wait(lambda r: r.batch == number and r.phase == "transfer")

        weights = Halting(changed(tiny[0], seed=7), wait_for_batch)
        await publisher.update(weights, version="batches", rollout=rlctl.rolling(), finite=False, progress=batches)
    sending = {report.batch: report for report in batches.all if report.phase == "transfer"}
    assert {number: report.stages_total for number, report in sending.items()} == {1: 1, 2: 1}
    assert all(report.bytes_sent <= report.bytes_total for report in batches.all)
    assert (batches.all[-1].batch, batches.all[-1].phase, batches.all[-1].stages_done) == (2, "done", 2)


async def test_a_slow_function_delays_no_transfer_and_is_not_called_after_the_return(
    fleet: InProcessFleet, tiny: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress_reports, "LAST_S", 0.3)
    called, release = threading.Event(), threading.Event()
    calls = []

    def hang(report: rlctl.UpdateProgress) -> None:
        calls.append(report)
        called.set()
        release.wait()

    weights = Halting(changed(tiny[0], seed=8), lambda: called.wait(WAIT_S))
    async with publishing(fleet) as publisher:
        started = time.monotonic()
        result = await publisher.update(weights, version="new", finite=False, progress=hang)
        assert time.monotonic() - started < 5
        assert result.version.label == "new"
        assert "has not returned 0.3 s after the end" in caplog.text
        release.set()
        reports = Reports()
        await publisher.update(tiny[0], version="next", progress=reports)
        assert len(calls) == 1
        count = len(reports.all)
        await asyncio.sleep(3 * progress_reports.EVERY_S)
        assert len(reports.all) == count


async def test_a_function_that_raises_is_logged_once_and_changes_nothing(
    fleet: InProcessFleet, tiny: tuple[Any, Path], caplog: pytest.LogCaptureFixture
) -> None:
    reports = Reports()

    def fail(report: rlctl.UpdateProgress) -> None:
        reports(report)
        raise SystemExit("the trainer's own bug")

    weights = Halting(tiny[0], lambda: reports.wait(lambda r: r.phase == "transfer"))
    with caplog.at_level(logging.WARNING):
        async with publishing(fleet) as publisher:
            result = await publisher.update(weights, version="new", finite=False, progress=fail)
    assert result.version.label == "new"
    assert len(reports.all) > 1
    assert len([record for record in caplog.records if "progress function" in record.message]) == 1
    assert "the trainer's own bug" in caplog.text


async def test_what_cannot_be_called_is_refused_before_anything_begins(
    fleet: InProcessFleet, tiny: tuple[Any, Path]
) -> None:
    async def coroutine(_: rlctl.UpdateProgress) -> None: ...

    before = len(fleet.server.coordinator.operations.newest_first("", 0, ""))
    async with publishing(fleet) as publisher:
        for unusable in (coroutine, "yes"):
            with pytest.raises(RlctlError) as caught:
                await publisher.update(tiny[0], version="never", progress=unusable)  # type: ignore[arg-type]
            assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "progress")
        assert (await publisher.update(tiny[0], version="next", progress=False)).version.label == "next"
    names = [run.operation.verb for run in fleet.server.coordinator.operations.newest_first("", 0, "")]
    assert names[: len(names) - before].count("WeightUpdate") == 1


async def test_a_terminal_shows_a_line_until_the_end(
    fleet: InProcessFleet, tiny: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, drawn = Terminal(), threading.Event()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress_line, "SILENT_S", 0.0)

    def wait_for_line() -> None:
        limit = time.monotonic() + WAIT_S
        while "s; transfer, 0 of 2 stages, " not in terminal.getvalue() and time.monotonic() < limit:
            drawn.wait(0.02)

    async with publishing(fleet) as publisher:
        await publisher.update(Halting(tiny[0], wait_for_line), version="new", finite=False, progress=True)
    assert re.search(r"new: \d+ s; transfer, 0 of 2 stages, .* of 1\.2 MB", terminal.getvalue())
    assert terminal.getvalue().endswith("\x1b[2K"), "the line was removed"


def test_the_text_of_a_report() -> None:
    report = rlctl.UpdateProgress("id", "actor", "step-4", "transfer", 12.4, 0, 3, 1_500_000_000, 3_000_000_000, 2, 1)
    text = "step-4: 12 s; transfer, 0 of 3 stages, 1.5 GB of 3 GB; batch 1; attempt 2"
    assert progress_reports.text(report) == text

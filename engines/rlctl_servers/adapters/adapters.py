"""LoRA adapters through a server's own LoRA: loaded beside the serving adapters, swapped by the commit.

Servers read adapters from disk, so the tensors of a trainer are written to disk first.

Servers check little of an adapter. SGLang skips tensors of layers that the model does not have, and reads only rank,
alpha and targets of PEFT's settings. vLLM loads an adapter that lacks matrices. So rlctl checks every adapter first, as
for its own engine. The adapter tensors at the ranks cannot be read. The digest of an adapter is therefore the digest of
its files, equal before and after the server's read.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rlctl.contract.adapter_identity import scale_of
from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import (
    EVIDENCE_ENGINE,
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_REJECTED,
    OUTCOME_SKIPPED,
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_UNSPECIFIED,
    TRANSPORT_DISK,
    TRANSPORT_SHARED_MEMORY,
    PauseMode,
    WorkerCoordinates,
)
from rlctl.v1.results_pb2 import RankResult
from rlctl.v1.verbs_pb2 import (
    APPLY_MODE_STAGED,
    CHECK_ACTION_CHECKSUM,
    Adapter,
    AdapterConfig,
    AdapterList,
    CheckReport,
    CheckWeightsRequest,
    LoadAdapterRequest,
    PauseGenerationRequest,
    PrepareUpdateRequest,
    UnloadAdapterRequest,
    UpdateWeightsFromTensorRequest,
    WeightsReport,
)
from rlctl.weights.checkpoint.atomic_write import writing
from rlctl.weights.checkpoint.checkpoint import Checkpoint, compare
from rlctl.weights.formats import lora
from rlctl.weights.shards.load_hooks import refuse_draft
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl_servers.adapters.from_tensors import SentAdapter
from rlctl_servers.adapters.lora_table import Held, LoraTable, is_from_rlctl
from rlctl_servers.requests.requests import Requests
from rlctl_servers.updates.checkpoints import Checkpoints, digest_of
from rlctl_servers.updates.open_update import opened

log = logging.getLogger(__name__)

LAYERS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""Last words of the linear layers that servers add to in every model. Embeddings, heads and experts are not tried."""

ADAPTERS_BY = (TRANSPORT_DISK, TRANSPORT_SHARED_MEMORY)
"""Transports of adapters. A group reaches the server's ranks, but the ranks take adapters from files only."""

PAUSES = (PAUSE_MODE_ABORT, PAUSE_MODE_DRAIN)
"""Pause modes for the requests of an adapter. Servers cannot hold back single requests."""

LOOK_S = 0.05

LEAVING_S = 3.0
"""Seconds that the unloads may take when the stage server ends, which gives its engine 5 s."""


@dataclass(frozen=True)
class LoraLimits:
    """LoRA limits from the server's start.

    Attributes:
        rank: largest rank.
        targets: last words of the layers that adapters can add to.
        most: number of adapters at which the server starts to drop loaded adapters; 0: unlimited.
    """

    rank: int
    targets: Collection[str]
    most: int


@dataclass(frozen=True)
class Fitting:
    """An adapter on disk that passed the checks, with the digest of its tensors."""

    path: str
    config: AdapterConfig
    digest: str


@dataclass
class OpenAdapter:
    """The open adapter update.

    Attributes:
        pause: mode in which the seal stops requests with the replaced adapter.
        staged: the adapter as loaded at the server.
        sent: tensors from a trainer.
    """

    update_id: str
    info: Adapter
    pause: PauseMode.ValueType = PAUSE_MODE_UNSPECIFIED
    staged: Held | None = None
    sent: SentAdapter | None = None


class Adapters(abc.ABC):
    """The adapters of one server. One verb runs at a time."""

    def __init__(
        self, product: str, checkpoints: Checkpoints, requests: Requests, table: LoraTable, limits: LoraLimits
    ) -> None:
        self._product = product
        self._checkpoints = checkpoints
        self._requests = requests
        self._table = table
        self._limits = limits
        self._update: OpenAdapter | None = None
        self._left: list[str] = []
        """Names of adapters that the server still has loaded, closed to new requests."""
        self._registered: set[str] = set()
        self._unloading = asyncio.Lock()
        self._sweeping: asyncio.Task[None] | None = None

    @property
    @abc.abstractmethod
    def stuck(self) -> bool:
        """Return whether requests cannot be ended now, nor their adapters be unloaded."""

    @abc.abstractmethod
    async def read(self, name: str, fitting: Fitting, pinned: bool, call: Call) -> None:
        """Load a fitting adapter at the server under a name. The files may be removed afterwards."""

    @abc.abstractmethod
    async def unload(self, name: str) -> bool:
        """Unload an unused adapter. Return whether the server no longer has the name."""

    @abc.abstractmethod
    async def registered(self, call: Call) -> set[str]:
        """Return the names of the adapters that requests at the server can use, also of adapters of other clients."""

    async def loaded(self, call: Call) -> set[str]:
        """Return the names of the adapters that the server has loaded, at any rank."""
        return await self.registered(call)

    @abc.abstractmethod
    def refuse(self, config: AdapterConfig, modules: Collection[str], field: str) -> None:
        """Raise, naming ``field``, if this server ignores an adapter for these modules or computes it wrongly."""

    @property
    def open(self) -> bool:
        return self._update is not None

    @property
    def listed(self) -> AdapterList:
        """Return the serving adapters, sorted by name."""
        return AdapterList(adapters=[adapter.info for _, adapter in sorted(self._table.by_name.items())])

    async def take_over(self, call: Call) -> None:
        """Unload the adapters that an earlier stage server has left at the server. Adapters of others stay.

        Later sweeps repeat a failed unload. Raises as :meth:`Control.ask`.
        """
        earlier = {name for name in await self.loaded(call) if is_from_rlctl(name)}
        if not earlier:
            return
        self._left += sorted(earlier)
        await self._sweep()
        remaining = sorted(earlier & await self.loaded(call))
        if remaining:
            log.warning(
                "%s keeps adapters of an earlier stage server: requests use them, or a rank did not unload them: %s",
                self._product,
                ", ".join(remaining),
            )

    async def leave(self) -> None:
        """Unload all adapters at a server that outlives this process. Files of adapters are removed afterwards."""
        self._drop_staged()
        for name in list(self._table.by_name):
            self._left.append(self._table.drop(name).name)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._sweep(), LEAVING_S)
        if self._left:
            log.warning("%s keeps adapters of this stage server: %s", self._product, ", ".join(self._left))

    async def prepare(self, request: PrepareUpdateRequest, call: Call) -> WeightsReport:
        """Open an update; a repeat with the same id starts anew.

        Raises ACTIVE_REQUESTS if requests use the replaced adapter, unless ``abort_all_requests`` ends them or
        ``pause`` leaves them to the seal. A server computes running requests with the old adapter.
        """
        if not call.update_id:
            raise Reason.FIELD_REQUIRED.error("PrepareUpdate opens an update", field="header.fence.update_id")
        if not request.adapter.name:
            raise Reason.FIELD_REQUIRED.error("an adapter update names its adapter", field="adapter.name")
        if request.apply == APPLY_MODE_STAGED:
            raise Reason.FIELD_CONFLICT.error("an adapter is put in its place by the commit in any case", field="apply")
        refuse_draft(request.selector, "selector")
        if self._update is not None and self._update.update_id != call.update_id:
            raise Reason.UPDATE_IN_PROGRESS.error(f"update {self._update.update_id} is open")
        await self._sweep()
        await self._count(call)
        sent_adapter = None
        if request.HasField("adapter_config"):
            self._refuse_config(request.adapter_config, "adapter_config")
            sent_adapter = SentAdapter(request.adapter_config, self._layers, call.update_id)
        if request.abort_all_requests or not request.pause:
            await self._free(request.adapter.name, call, abort=request.abort_all_requests)
        self._let_go()
        self._drop_staged()
        info = Adapter()
        info.CopyFrom(request.adapter)
        self._update = OpenAdapter(call.update_id, info, request.pause, sent=sent_adapter)
        return WeightsReport()

    async def load(self, request: LoadAdapterRequest, call: Call) -> AdapterList:
        """Load a fitting adapter at the server, beside the serving adapters.

        Raises PATH_NOT_ALLOWED, CHECKPOINT_NOT_FOUND, CHECKPOINT_MISMATCH, FIELD_INVALID, UNSUPPORTED.
        """
        update = opened(self._update, call)
        if update.info.name != request.name:
            raise Reason.FIELD_CONFLICT.error(f"the open update is of adapter {update.info.name!r}", field="name")
        path = self._checkpoints.resolve(request.path, field="path")
        update.info.path = request.path
        await self._stage(update, path, call, pinned=request.pinned)
        return AdapterList(adapters=[update.info])

    async def take(self, request: UpdateWeightsFromTensorRequest, call: Call) -> WeightsReport:
        """Copy tensors of an adapter out of shared segments. After the last tensor the server loads the adapter.

        Raises ILLEGAL_STATE, DISK_FULL, and as :meth:`SentAdapter.take` and :meth:`load`.
        """
        update = opened(self._update, call)
        if update.sent is None:
            raise Reason.ILLEGAL_STATE.error(
                "the open update is of an adapter without a config: it is loaded from disk", field="segments"
            )
        try:
            report = await asyncio.to_thread(update.sent.take, request)
        except RlctlError as error:
            error.outcome = OUTCOME_REJECTED  # no serving adapter was changed
            raise
        if not update.sent.missing:
            directory = Path(tempfile.gettempdir())
            with contextlib.ExitStack() as files:
                with writing(directory, "segments"):
                    place = files.enter_context(tempfile.TemporaryDirectory(dir=directory, prefix="rlctl-adapter-"))
                    await asyncio.to_thread(update.sent.save, Path(place))
                await self._stage(update, place, call)
        return report

    def close(self) -> None:
        """Release the resources of a server that has ended or serves no callers."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._let_go()

    def _let_go(self) -> None:
        if self._update is not None and self._update.sent is not None:
            self._update.sent.close()

    async def _stage(self, update: OpenAdapter, path: str, call: Call, *, pinned: bool = False) -> None:
        """Check the adapter at a path, and load it at the server."""
        self._drop_staged()
        await self._sweep()
        await self._count(call)
        async with self._unloading:  # a sweep must not remove the adapter during its load
            await self._load(update, path, call, pinned=pinned)

    async def _load(self, update: OpenAdapter, path: str, call: Call, *, pinned: bool) -> None:
        config, stored = await asyncio.to_thread(lora.open_adapter, path)
        try:
            self._refuse_unfit(config, stored, path)
            digest = await asyncio.to_thread(digest_of, stored)
            name = self._table.new_name(update.info)
            # Even after a failed load the server may have the adapter.
            self._left.append(name)
            await self.read(name, Fitting(path, config, digest), pinned, call)
            stored.check_unchanged()
        finally:
            stored.close()
        reread, stored = await asyncio.to_thread(lora.open_adapter, path)
        stored.close()
        if reread != config:
            raise Reason.CHECKPOINT_NOT_FOUND.error(f"{path} was changed while it was read", field="path")
        update.info.lora_rank, update.info.digest, update.info.scale = config.lora_rank, digest, scale_of(config)
        update.info.pinned = pinned
        nbytes = sum(meta.nbytes for meta in stored.metas.values())
        update.staged = Held(name, update.info, len(stored.metas), nbytes)
        self._left.remove(name)

    async def seal(self, call: Call) -> WeightsReport:
        """Stop the requests with the replaced adapter: mode abort ends the requests, other modes wait for their end.

        A server cannot give running requests a new adapter. The stage accepts no new requests until the update ends.
        Raises WEIGHTS_INCOMPLETE, ACTIVE_REQUESTS, DEADLINE_EXCEEDED.
        """
        update = opened(self._update, call)
        if update.staged is None:
            raise _unread(update)
        if update.pause not in (PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_ABORT) and not self.stuck:
            await self._until_free(update.info.name, call)
        await self._free(update.info.name, call, abort=update.pause == PAUSE_MODE_ABORT)
        return WeightsReport(tensors=update.staged.tensors, bytes_received=update.staged.nbytes)

    async def commit(self, call: Call) -> WeightsReport:
        """Put the staged adapter in the place of the serving adapter of its name. Raises WEIGHTS_INCOMPLETE."""
        update = opened(self._update, call)
        if update.staged is None:
            raise _unread(update)
        self._let_go()
        staged, self._update = update.staged, None
        replaced = self._table.put(staged)
        if replaced is not None:
            await self._forget(replaced)
        return WeightsReport(tensors=staged.tensors, bytes_received=staged.nbytes)

    async def abort(self, call: Call) -> None:
        """Drop the update and its staged adapter."""
        opened(self._update, call)
        self._let_go()
        self._drop_staged()
        self._update = None
        await self._sweep()

    async def pause(self, request: PauseGenerationRequest, call: Call, *, stopped: bool) -> None:
        """Stop the requests with an adapter, loaded or not: mode abort ends these requests, mode drain waits for them.

        New requests are refused. ``stopped``: the server generates nothing, so no request ends by itself. Raises
        UNSUPPORTED, ACTIVE_REQUESTS, DEADLINE_EXCEEDED.
        """
        name, mode = request.adapter, request.mode or PAUSE_MODE_ABORT
        if mode not in PAUSES:
            raise Reason.UNSUPPORTED.error(
                f"{self._product} cannot freeze the requests of one adapter; abort ends them, drain waits for them",
                field="mode",
                outcome=OUTCOME_SKIPPED,
            )
        was_paused = self._requests.is_paused(name)
        self._requests.pause(name)
        try:
            if stopped and mode == PAUSE_MODE_DRAIN:
                self._refuse_held_back(name)
            if mode == PAUSE_MODE_ABORT:
                await self._free(name, call, abort=True)
            await self._until_free(name, call)
        except BaseException:
            if not was_paused:
                self._requests.go_on(name)
            raise

    def go_on(self, name: str) -> None:
        """Accept requests with a paused adapter again."""
        self._requests.go_on(name)

    async def drop(self, request: UnloadAdapterRequest, call: Call) -> AdapterList:
        """Unload an adapter. Raises ADAPTER_NOT_FOUND, ACTIVE_REQUESTS."""
        self._table.find(request.name, "name")
        await self._free(request.name, call, abort=request.abort_requests)
        await self._forget(self._table.drop(request.name))
        return self.listed

    async def drop_all(self) -> None:
        """Drop every adapter when the base weights are replaced. Requests with adapters end."""
        for name in list(self._table.by_name):
            await self._forget(self._table.drop(name))

    def check(self, request: CheckWeightsRequest, ranks: Collection[WorkerCoordinates]) -> list[RankResult]:
        """Return the digest of an adapter, as staged by the open update or as serving. The server's answer counts for
        all ranks.

        Raises UNSUPPORTED, ADAPTER_NOT_FOUND, WEIGHTS_INCOMPLETE, DIGEST_MISMATCH.
        """
        if (request.action or CHECK_ACTION_CHECKSUM) != CHECK_ACTION_CHECKSUM:
            raise Reason.UNSUPPORTED.error("of an adapter, only checksums are taken", field="action")
        if request.per_tensor or request.fingerprints:
            raise Reason.UNSUPPORTED.error("an adapter is digested as a whole", outcome=OUTCOME_SKIPPED)
        if self._update is not None and self._update.info.name == request.adapter:
            adapter = self._update.staged
            if adapter is None:
                raise _unread(self._update)
        else:
            adapter = self._table.find(request.adapter, "adapter")
        if request.expected_digest and request.expected_digest != adapter.info.digest:
            raise Reason.DIGEST_MISMATCH.error(
                f"the adapter's digest is {adapter.info.digest}, {request.expected_digest} was expected",
                field="expected_digest",
                metadata={"expected": request.expected_digest, "found": adapter.info.digest},
            )
        report = CheckReport(
            action=CHECK_ACTION_CHECKSUM,
            tensor_count=adapter.tensors,
            model_digest=adapter.info.digest,
            adapter_scale=adapter.info.scale,
        )
        return [
            RankResult(coordinates=rank, outcome=OUTCOME_APPLIED, evidence=EVIDENCE_ENGINE, check=report)
            for rank in ranks
        ]

    def _refuse_unfit(self, config: AdapterConfig, stored: Checkpoint, path: str) -> None:
        expected = self._refuse_config(config, "path")
        compare(stored.metas, {meta.name: meta for pair in expected.values() for meta in pair}, what=f"adapter {path}")

    def _refuse_config(self, config: AdapterConfig, field: str) -> dict[str, tuple[TensorMeta, TensorMeta]]:
        """Raise, naming ``field``, if no adapter with this config can be loaded. Return its tensors by module."""
        limits = self._limits
        if config.lora_rank > limits.rank:
            raise Reason.UNSUPPORTED.error(
                f"the adapter has rank {config.lora_rank}, above the server's --max-lora-rank {limits.rank}",
                field=field,
            )
        names = self._registered.union(self._left, (held.name for held in self._table.by_name.values()))
        if self._update is not None and self._update.staged is not None:
            names.discard(self._update.staged.name)  # an update that starts anew drops it
        count = len(names)
        if limits.most and count >= limits.most:
            raise Reason.UNSUPPORTED.error(
                f"{self._product} holds {count} adapters and would drop a loaded adapter; see --max-loaded-loras",
                field="name",
                next_step="Unload an adapter, or raise the limit: a new version needs a place beside the old version.",
            )
        expected = lora.expected(config, self._layers, field=field)
        if unsupported := sorted({module.rpartition(".")[2] for module in expected} - set(limits.targets)):
            raise Reason.UNSUPPORTED.error(
                f"it adds to {', '.join(unsupported)}, which the server was not started for: --lora-target-modules",
                field=field,
            )
        self.refuse(config, expected, field)
        return expected

    @property
    def _layers(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of the layers that adapters can add to, by module."""
        shapes = {}
        for name, meta in self._checkpoints.reference.items():
            module = name.removesuffix(".weight")
            if module != name and module.rpartition(".")[2] in LAYERS and _is_plain(module, meta):
                shapes[module] = (meta.shape[0], meta.shape[1])
        return shapes

    async def _free(self, name: str, call: Call, *, abort: bool) -> None:
        """Raise ACTIVE_REQUESTS if requests use the serving adapter of a name, or end them if ``abort``."""
        using = self._requests.using(name) if name in self._table.by_name else []
        if not using:
            return
        count = {"count": str(len(using))}
        if not abort:
            raise Reason.ACTIVE_REQUESTS.error(
                f"{len(using)} requests run with adapter {name!r}",
                metadata=count,
                next_step="Set a pause mode: abort ends the requests, every other mode waits for them.",
            )
        if self.stuck:
            self._refuse_held_back(name)
        await self._requests.abort(using, all_of_them=False)
        await self._until_free(name, call)

    def _refuse_held_back(self, name: str) -> None:
        """Raise ACTIVE_REQUESTS if requests use an adapter: no request can end while the server is paused."""
        if using := self._requests.using(name):
            raise Reason.ACTIVE_REQUESTS.error(
                f"{len(using)} requests with adapter {name!r} are held back by a pause",
                metadata={"count": str(len(using))},
                next_step="Continue generation first.",
            )

    async def _until_free(self, name: str, call: Call) -> None:
        """Wait until no request uses an adapter. Raises DEADLINE_EXCEEDED."""
        while self._requests.using(name):
            if asyncio.get_running_loop().time() > call.deadline:
                raise Reason.DEADLINE_EXCEEDED.error("the requests did not end in time")
            await asyncio.sleep(LOOK_S)

    async def _forget(self, held: Held) -> None:
        """End the requests with an adapter that is closed to new requests, and unload the adapter once the server can.

        Raises as :meth:`Requests.abort`, at least DIRTY: new requests already use other adapters.
        """
        self._left.append(held.name)
        if self._table.users(held.name):
            try:
                await self._requests.abort(self._requests.using(held.info.name), all_of_them=False)
            except RlctlError as error:
                error.outcome = max(error.outcome, OUTCOME_DIRTY)
                raise
        await self._sweep()

    def _drop_staged(self) -> None:
        if self._update is not None and self._update.staged is not None:
            self._left.append(self._update.staged.name)
            self._update.staged = None

    async def _count(self, call: Call) -> None:
        """Look which adapters the server has, if their number is limited: other clients may have loaded some."""
        if self._limits.most:
            self._registered = await self.registered(call)

    async def _sweep(self) -> None:
        """Unload adapters that are closed to new requests. The next sweep repeats a failed unload."""
        async with self._unloading:
            free = [] if self.stuck else [name for name in self._left if not self._table.users(name)]
            unloaded = zip(free, await asyncio.gather(*map(self.unload, free)), strict=True)
            for name in [name for name, gone in unloaded if gone]:
                self._left.remove(name)

    def sweep_soon(self) -> None:
        """Start a sweep in the background after a pause. Unloads were impossible during the pause."""
        if self._left and (self._sweeping is None or self._sweeping.done()):
            self._sweeping = asyncio.create_task(self._sweep())


def _unread(update: OpenAdapter) -> RlctlError:
    missing = update.sent.missing if update.sent is not None else []
    names = ", ".join(missing[:5])
    cause = f"{len(missing)} tensors of the adapter did not come: {names}" if missing else "no adapter was read"
    return Reason.WEIGHTS_INCOMPLETE.error(cause, metadata={"missing": "\n".join(missing)} if missing else None)


def _is_plain(module: str, meta: TensorMeta) -> bool:
    return len(meta.shape) == 2 and ".experts." not in module

"""LoRA adapters over a server's own LoRA: loaded beside what serves, put in its place by the commit. Servers read them
from disk; what a trainer sends is written there first.

Servers look at little of what they are to load: SGLang skips tensors of layers that the model does not have, and reads
the rank, alpha and the targets only of PEFT's settings; vLLM loads what is there of an adapter that lacks matrices. So
everything is checked here first, as for rlctl's own engine. What the ranks hold of an adapter cannot be read: an
adapter's digest is that of the files, which were the same before and after the server had read them.
"""

from __future__ import annotations

import abc
import asyncio
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

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
from rlctl.weights.checkpoint.checkpoint import Checkpoint, compare
from rlctl.weights.formats import lora
from rlctl.weights.shards.load_hooks import refuse_draft
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl_servers.adapters.from_tensors import SentAdapter
from rlctl_servers.adapters.lora_table import Held, LoraTable
from rlctl_servers.requests.requests import Requests
from rlctl_servers.updates.checkpoints import Checkpoints, digest_of
from rlctl_servers.updates.open_update import opened

LAYERS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""Last words of the linear layers that servers add to in every model; embeddings, heads and experts are not tried."""

ADAPTERS_BY = (TRANSPORT_DISK, TRANSPORT_SHARED_MEMORY)
"""How an adapter comes: a group reaches the server's ranks, which take adapters from files only."""

PAUSES = (PAUSE_MODE_ABORT, PAUSE_MODE_DRAIN)
"""Pause modes for the requests of one adapter: servers cannot hold single requests back."""

LOOK_S = 0.05


@dataclass(frozen=True)
class LoraLimits:
    """What the server was started for.

    Attributes:
        rank: largest rank.
        targets: last words of the layers that can be added to.
        most: how many adapters it holds before it forgets one that serves; 0: any number.
    """

    rank: int
    targets: Collection[str]
    most: int


@dataclass(frozen=True)
class Fitting:
    """An adapter on disk that was found to fit.

    Attributes:
        path: its directory.
        config: what it says about itself.
        digest: of its tensors.
    """

    path: str
    config: AdapterConfig
    digest: str


@dataclass
class OpenAdapter:
    """The adapter update that is open.

    Attributes:
        pause: what the seal does to the requests with the adapter that is replaced.
        staged: what the server has loaded for it.
        sent: what a trainer sends.
    """

    update_id: str
    info: Adapter
    pause: PauseMode.ValueType = PAUSE_MODE_UNSPECIFIED
    staged: Held | None = None
    sent: SentAdapter | None = None


class Adapters(abc.ABC):
    """The adapters of one server; one verb at a time."""

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
        """What the server still holds, and nobody may ask for."""
        self._unloading = asyncio.Lock()
        self._sweeping: asyncio.Task[None] | None = None

    @property
    @abc.abstractmethod
    def stuck(self) -> bool:
        """Whether requests cannot be ended now, nor what they use be unloaded."""

    @abc.abstractmethod
    async def read(self, name: str, fitting: Fitting, pinned: bool, call: Call) -> None:
        """Let the server read what fits, under a name; the files may go afterwards."""

    @abc.abstractmethod
    async def unload(self, name: str) -> bool:
        """Let the server forget a name that nobody uses; whether it has none of that name now."""

    @abc.abstractmethod
    def refuse(self, config: AdapterConfig, modules: Collection[str], field: str) -> None:
        """Raise, naming ``field``, why this kind of server computes something else with an adapter to these modules, or
        nothing.
        """

    @property
    def open(self) -> bool:
        """Whether an adapter update is open."""
        return self._update is not None

    @property
    def listed(self) -> AdapterList:
        """Those that serve, by name."""
        return AdapterList(adapters=[held.info for _, held in sorted(self._table.by_name.items())])

    async def prepare(self, request: PrepareUpdateRequest, call: Call) -> WeightsReport:
        """Open an update; the same one again starts anew. Refused while requests use the adapter that is replaced,
        unless the seal ends them or waits for them: servers go on with the old one for as long as they run.
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
        sent = None
        if request.HasField("adapter_config"):
            self._refuse_config(request.adapter_config, "adapter_config")
            sent = SentAdapter(request.adapter_config, self._layers, call.update_id)
        if request.abort_all_requests or not request.pause:
            await self._free(request.adapter.name, call, abort=request.abort_all_requests)
        self._let_go()
        self._drop_staged()
        info = Adapter()
        info.CopyFrom(request.adapter)
        self._update = OpenAdapter(call.update_id, info, request.pause, sent=sent)
        return WeightsReport()

    async def load(self, request: LoadAdapterRequest, call: Call) -> AdapterList:
        """Let the server load an adapter that was found to fit, beside what serves.

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
        """Take tensors of an adapter out of shared segments; with the last of them the server loads it, beside what
        serves. Raises ILLEGAL_STATE, and as :meth:`SentAdapter.take` and :meth:`load`.
        """
        update = opened(self._update, call)
        if update.sent is None:
            raise Reason.ILLEGAL_STATE.error(
                "the open update is of an adapter without a config: it is loaded from disk", field="segments"
            )
        try:
            report = await asyncio.to_thread(update.sent.take, request)
        except RlctlError as error:
            error.outcome = OUTCOME_REJECTED  # nothing that serves was touched
            raise
        if not update.sent.missing:
            with tempfile.TemporaryDirectory(prefix="rlctl-adapter-") as place:
                await asyncio.to_thread(update.sent.save, Path(place))
                await self._stage(update, place, call)
        return report

    def close(self) -> None:
        """The server has ended, or serves nobody: let go of what is held for it."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._let_go()

    def _let_go(self) -> None:
        if self._update is not None and self._update.sent is not None:
            self._update.sent.close()

    async def _stage(self, update: OpenAdapter, path: str, call: Call, *, pinned: bool = False) -> None:
        """Let the server load what lies at a path, found to fit."""
        self._drop_staged()
        await self._sweep()
        async with self._unloading:  # what is being loaded is not to be swept
            await self._load(update, path, call, pinned=pinned)

    async def _load(self, update: OpenAdapter, path: str, call: Call, *, pinned: bool) -> None:
        config, stored = await asyncio.to_thread(lora.open_adapter, path)
        try:
            self._refuse_unfit(config, stored, path)
            digest = await asyncio.to_thread(digest_of, stored)
            name = self._table.new_name(update.info)
            # Whatever becomes of the load, the server may have it.
            self._left.append(name)
            await self.read(name, Fitting(path, config, digest), pinned, call)
            stored.check_unchanged()
        finally:
            stored.close()
        again, stored = await asyncio.to_thread(lora.open_adapter, path)
        stored.close()
        if again != config:
            raise Reason.CHECKPOINT_NOT_FOUND.error(f"{path} was changed while it was read", field="path")
        update.info.lora_rank, update.info.digest = config.lora_rank, digest
        update.info.pinned = pinned
        nbytes = sum(meta.nbytes for meta in stored.metas.values())
        update.staged = Held(name, update.info, len(stored.metas), nbytes)
        self._left.remove(name)

    async def seal(self, call: Call) -> WeightsReport:
        """Stop the requests with the adapter that is replaced: end them in mode abort, and wait for them in every other
        mode, since a server cannot give another adapter to requests that run. The stage takes no new ones until the
        update ends. Raises WEIGHTS_INCOMPLETE, ACTIVE_REQUESTS, DEADLINE_EXCEEDED.
        """
        update = opened(self._update, call)
        if update.staged is None:
            raise _unread(update)
        if update.pause not in (PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_ABORT) and not self.stuck:
            await self._until_free(update.info.name, call)
        await self._free(update.info.name, call, abort=update.pause == PAUSE_MODE_ABORT)
        return WeightsReport(tensors=update.staged.tensors, bytes_received=update.staged.nbytes)

    async def commit(self, call: Call) -> WeightsReport:
        """Let what is staged take the place of the adapter of its name. Raises WEIGHTS_INCOMPLETE."""
        update = opened(self._update, call)
        if update.staged is None:
            raise _unread(update)
        self._let_go()
        staged, self._update = update.staged, None
        before = self._table.put(staged)
        if before is not None:
            await self._forget(before)
        return WeightsReport(tensors=staged.tensors, bytes_received=staged.nbytes)

    async def abort(self, call: Call) -> None:
        """Drop the update and what it has staged."""
        opened(self._update, call)
        self._let_go()
        self._drop_staged()
        self._update = None
        await self._sweep()

    async def pause(self, request: PauseGenerationRequest, call: Call, *, stopped: bool) -> None:
        """Stop the requests with one adapter, loaded or not: end them in mode abort, wait for their end in mode drain.
        New ones are refused. ``stopped``: the server generates nothing, so that no request ends by itself.

        Raises UNSUPPORTED, ACTIVE_REQUESTS, DEADLINE_EXCEEDED.
        """
        name, mode = request.adapter, request.mode or PAUSE_MODE_ABORT
        if mode not in PAUSES:
            raise Reason.UNSUPPORTED.error(
                f"{self._product} cannot hold back the requests of one adapter; abort ends them, drain waits for them",
                field="mode",
                outcome=OUTCOME_SKIPPED,
            )
        before = self._requests.is_paused(name)
        self._requests.pause(name)
        try:
            if stopped and mode == PAUSE_MODE_DRAIN:
                self._refuse_held_back(name)
            if mode == PAUSE_MODE_ABORT:
                await self._free(name, call, abort=True)
            await self._until_free(name, call)
        except BaseException:
            if not before:
                self._requests.go_on(name)
            raise

    def go_on(self, name: str) -> None:
        """Let requests use an adapter again."""
        self._requests.go_on(name)

    async def drop(self, request: UnloadAdapterRequest, call: Call) -> AdapterList:
        """Forget an adapter. Raises ADAPTER_NOT_FOUND, ACTIVE_REQUESTS."""
        self._table.find(request.name, "name")
        await self._free(request.name, call, abort=request.abort_requests)
        await self._forget(self._table.drop(request.name))
        return self.listed

    async def drop_all(self) -> None:
        """Forget every adapter, with the base weights that they were made for; what uses them ends."""
        for name in list(self._table.by_name):
            await self._forget(self._table.drop(name))

    def check(self, request: CheckWeightsRequest, ranks: Collection[WorkerCoordinates]) -> list[RankResult]:
        """The digest of an adapter, which the server speaks for all ranks of: as the open update has staged it, or as
        it serves.

        Raises UNSUPPORTED, FIELD_CONFLICT, ADAPTER_NOT_FOUND, WEIGHTS_INCOMPLETE, DIGEST_MISMATCH.
        """
        if (request.action or CHECK_ACTION_CHECKSUM) != CHECK_ACTION_CHECKSUM:
            raise Reason.UNSUPPORTED.error("of an adapter, only checksums are taken", field="action")
        if request.shadow:
            raise Reason.FIELD_CONFLICT.error("adapters have no shadow copy", field="shadow")
        if request.per_tensor or request.fingerprints:
            raise Reason.UNSUPPORTED.error("an adapter is digested as a whole", outcome=OUTCOME_SKIPPED)
        if self._update is not None and self._update.info.name == request.adapter:
            held = self._update.staged
            if held is None:
                raise _unread(self._update)
        else:
            held = self._table.find(request.adapter, "adapter")
        if request.expected_digest and request.expected_digest != held.info.digest:
            raise Reason.DIGEST_MISMATCH.error(
                f"the adapter's digest is {held.info.digest}, {request.expected_digest} was expected",
                field="expected_digest",
                metadata={"expected": request.expected_digest, "found": held.info.digest},
            )
        report = CheckReport(action=CHECK_ACTION_CHECKSUM, tensor_count=held.tensors, model_digest=held.info.digest)
        return [
            RankResult(coordinates=rank, outcome=OUTCOME_APPLIED, evidence=EVIDENCE_ENGINE, check=report)
            for rank in ranks
        ]

    def _refuse_unfit(self, config: AdapterConfig, stored: Checkpoint, path: str) -> None:
        """Raise why the server must not hear of an adapter."""
        expected = self._refuse_config(config, "path")
        compare(stored.metas, {meta.name: meta for pair in expected.values() for meta in pair}, what=f"adapter {path}")

    def _refuse_config(self, config: AdapterConfig, field: str) -> dict[str, tuple[TensorMeta, TensorMeta]]:
        """Raise, naming ``field``, why no adapter with this config can be loaded; else its tensors, by module."""
        limits = self._limits
        if config.lora_rank > limits.rank:
            raise Reason.UNSUPPORTED.error(
                f"it has rank {config.lora_rank}, and the server was started with --max-lora-rank {limits.rank}",
                field=field,
            )
        held = len(self._table.by_name) + len(self._left)
        if limits.most and held >= limits.most:
            raise Reason.UNSUPPORTED.error(
                f"{self._product} holds {held} adapters and would forget one that serves; see --max-loaded-loras",
                field="name",
                next_step="Unload one, or start the server with room for one more: a new version comes beside the old.",
            )
        expected = lora.expected(config, self._layers, field=field)
        if beyond := sorted({module.rpartition(".")[2] for module in expected} - set(limits.targets)):
            raise Reason.UNSUPPORTED.error(
                f"it adds to {', '.join(beyond)}, which the server was not started for: --lora-target-modules",
                field=field,
            )
        self.refuse(config, expected, field)
        return expected

    @property
    def _layers(self) -> dict[str, tuple[int, int]]:
        """Sizes of the layers that adapters can add to, by module."""
        found = {}
        for name, meta in self._checkpoints.reference.items():
            module = name.removesuffix(".weight")
            if module != name and module.rpartition(".")[2] in LAYERS and _is_plain(module, meta):
                found[module] = (meta.shape[0], meta.shape[1])
        return found

    async def _free(self, name: str, call: Call, *, abort: bool) -> None:
        """Refuse while requests use the adapter that serves under a name, or end them."""
        using = self._requests.using(name) if name in self._table.by_name else []
        if not using:
            return
        count = {"count": str(len(using))}
        if not abort:
            raise Reason.ACTIVE_REQUESTS.error(
                f"{len(using)} requests run with adapter {name!r}",
                metadata=count,
                next_step="Name a pause mode: abort ends them, every other one waits for them.",
            )
        if self.stuck:
            self._refuse_held_back(name)
        await self._requests.abort(using, all_of_them=False)
        await self._until_free(name, call)

    def _refuse_held_back(self, name: str) -> None:
        """Raise ACTIVE_REQUESTS for requests with an adapter that cannot end while the server is paused."""
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
        """Of what no new request gets any more: end those that have it, and unload it once the server can.

        Raises as :meth:`Requests.abort`, at least DIRTY: what new requests get has changed.
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

    async def _sweep(self) -> None:
        """Unload what nobody may ask for any more; what cannot be unloaded now is tried at the next occasion."""
        async with self._unloading:
            for name in list(self._left):
                if not self.stuck and not self._table.users(name) and await self.unload(name):
                    self._left.remove(name)

    def sweep_soon(self) -> None:
        """A pause is over: unload what could not be unloaded in it, beside what comes next."""
        if self._left and (self._sweeping is None or self._sweeping.done()):
            self._sweeping = asyncio.create_task(self._sweep())


def _unread(update: OpenAdapter) -> RlctlError:
    missing = update.sent.missing if update.sent is not None else []
    names = ", ".join(missing[:5])
    said = f"{len(missing)} tensors of the adapter did not come: {names}" if missing else "no adapter was read"
    return Reason.WEIGHTS_INCOMPLETE.error(said, metadata={"missing": "\n".join(missing)} if missing else None)


def _is_plain(module: str, meta: TensorMeta) -> bool:
    return len(meta.shape) == 2 and ".experts." not in module

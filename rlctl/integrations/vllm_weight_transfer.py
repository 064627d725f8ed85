"""The trainer's half of vLLM's NCCL weight transfer, over a torch process group that the ranks of a fleet can join.

Names and wire format are vLLM's (``vllm/distributed/weight_transfer``): a trainer imports the names from this module
instead. vLLM's own communicator is PyNccl's, which no torch process group can share; the rest of the protocol is the
same.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch._C._distributed_c10d import TCPStore

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.vllm_groups import PACKED_BYTES, group_name
from rlctl.weights.group.process_group import WeightGroup, join
from rlctl.weights.tensor.tensors import as_bytes

TIMEOUT_S = 300.0

SAYS_S = 1.0
"""Wait for the engines' error after an interrupted broadcast, seconds."""


class _Store:
    """The store of the engines' ranks, for groups of different names.

    Under a used name the ranks would meet the remains of the earlier group.
    """

    def __init__(self, host: str, port: int, world_size: int) -> None:
        self.names: set[str] = set()
        self.listening: TCPStore | None = TCPStore(host, port, world_size, is_master=True, wait_for_workers=False)

    def close(self) -> None:
        """Free the TCP port."""
        self.listening = None


_stores: weakref.WeakValueDictionary[int, _Store] = weakref.WeakValueDictionary()
"""By TCP port, each as long as one of its groups."""


@dataclass
class NCCLTrainerSendWeightsArgs:
    """Settings for sending tensors; ``src`` is always 0 here."""

    group: WeightGroup
    src: int = 0
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor] | None = None
    packed: bool = False
    stream: Any = None
    packed_buffer_size_bytes: int = PACKED_BYTES
    packed_num_buffers: int = 2


def trainer_init(init_info: Any, rank: int = 0, *, stop: threading.Event | None = None) -> WeightGroup:
    """Form the group of rank 0, with its store at ``master_address:master_port``; return when all ranks have joined.

    ``init_info``: a mapping or a dataclass with both and ``world_size``, and with ``packed`` and
    ``packed_buffer_size_bytes`` if the engines get these too. The backend is NCCL if torch has NCCL and a GPU, else
    gloo: the gateway's choice for a request without a backend. ``stop`` ends the rendezvous early. Raises GROUP_FAILED.
    """
    del rank
    info = asdict(init_info) if is_dataclass(init_info) and not isinstance(init_info, type) else dict(init_info)
    host, port, world_size = info["master_address"], int(info["master_port"]), int(info["world_size"])
    name = group_name(int(info.get("packed_buffer_size_bytes", PACKED_BYTES)) if info.get("packed") else 0)
    nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    store = _store(host, port, world_size, name)
    try:
        group = join(
            (host, port),
            name=name,
            rank=0,
            world_size=world_size,
            backend="nccl" if nccl else "gloo",
            timeout_s=TIMEOUT_S,
            interface_host=host,
            stop=stop,
        )
    except BaseException:
        del store  # a stored error would keep the TCP port
        raise
    group.store = store
    return group


def _store(host: str, port: int, world_size: int, name: str) -> _Store:
    """Return a store without an earlier group of this name. Raises GROUP_FAILED if the store cannot listen."""
    store = _stores.get(port)
    if store is not None and name in store.names:
        store.close()
        store = None
    if store is None:
        try:
            store = _stores[port] = _Store(host, port, world_size)
        except RuntimeError as error:
            message = (str(error).splitlines() or [""])[0]
            raise Reason.GROUP_FAILED.error(f"no store can listen on {host}:{port}: {message}") from error
    store.names.add(name)
    return store


def packed_nccl_broadcast_producer(
    iterator: Iterable[tuple[str, torch.Tensor]],
    group: WeightGroup,
    src: int = 0,
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor] | None = None,
    buffer_size_bytes: int = PACKED_BYTES,
    num_buffers: int = 2,
) -> None:
    """Send tensors' bytes together: a broadcast ends with the tensor that exceeds ``buffer_size_bytes``."""
    del src, num_buffers
    pack: list[torch.Tensor] = []
    for item in iterator:
        tensor = post_iter_func(item) if post_iter_func is not None else item[1]
        pack.append(as_bytes(tensor))
        if sum(part.numel() for part in pack) > buffer_size_bytes:
            group.broadcast(torch.cat(pack))
            pack = []
    if pack:
        group.broadcast(torch.cat(pack))


class NCCLWeightTransferEngine:
    """vLLM's transfer engine, with the methods for trainers."""

    trainer_init = staticmethod(trainer_init)

    @staticmethod
    def trainer_send_weights(
        iterator: Iterable[tuple[str, torch.Tensor]], trainer_args: NCCLTrainerSendWeightsArgs | Mapping[str, Any]
    ) -> None:
        """Send all tensors, packed or one by one; ``update_info`` must state the same."""
        options = trainer_args
        args = options if isinstance(options, NCCLTrainerSendWeightsArgs) else NCCLTrainerSendWeightsArgs(**options)
        if args.packed:
            packed_nccl_broadcast_producer(
                iterator,
                args.group,
                post_iter_func=args.post_iter_func,
                buffer_size_bytes=args.packed_buffer_size_bytes,
            )
            return
        for item in iterator:
            tensor = args.post_iter_func(item) if args.post_iter_func is not None else item[1]
            args.group.broadcast(tensor.detach().contiguous())


class SyncClient(Protocol):
    """The client that commands the engines, for example vLLM's ``HTTPVLLMWeightSyncClient``."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Form the group; return when the group is complete."""

    def start_weight_update(self) -> None:
        """Open an update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Announce tensors; return when the engines have received the tensors."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit the update."""


class Weights(Protocol):
    """vLLM's ``WeightSource``: the same tensors in each pass, as in ``metadata``."""

    def metadata(self) -> Sequence[Any]:
        """Return ``name``, ``dtype`` and ``shape`` of each tensor."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


@dataclass
class NCCLTrainerInitInfo:
    """The trainer's store and way of sending; as in vLLM from 0.28 on."""

    backend: ClassVar[str] = "rlctl"

    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = PACKED_BYTES
    packed_num_buffers: int = 2
    rank: int = field(kw_only=True)


class NCCLTrainerWeightTransferEngine:
    """vLLM's stateful trainer engine; ``WeightTransferTrainerFactory.register_engine("rlctl", ...)`` registers it."""

    init_info_cls = NCCLTrainerInitInfo

    def __init__(self, info: NCCLTrainerInitInfo, client: SyncClient, source: Weights) -> None:
        """Construct through :meth:`trainer_init`, at every rank of the trainer; rank 0 sends."""
        self.is_sender = info.rank == 0
        self.model_update_group: WeightGroup | None = None
        self._info = info
        self._client = client
        self._source = source

    @classmethod
    def trainer_init(cls, init_info: NCCLTrainerInitInfo, *, client: SyncClient, source: Weights) -> Self:
        """Form the group. Raises GROUP_FAILED, and the client's error, at once if the engines refuse."""
        engine = cls(init_info, client, source)
        if engine.is_sender:
            init_fields = {name: value for name, value in asdict(init_info).items() if name != "rank"}
            refused = threading.Event()

            def tell() -> None:
                try:
                    client.init_weight_transfer_engine({**init_fields, "rank_offset": 1})
                except BaseException:
                    refused.set()  # no engine will join
                    raise

            threads = ThreadPoolExecutor(1)
            try:
                joined = threads.submit(tell)
                try:
                    engine.model_update_group = trainer_init(init_info, stop=refused)
                except RlctlError as error:
                    _raise_why(error, joined)
                    raise
                joined.result()
            except BaseException:
                engine.shutdown()
                raise
            finally:
                threads.shutdown(wait=False)  # engines that wait in vain end by their own timeout
        return engine

    def send_weights(self) -> None:
        """Send an update: every rank iterates over the weights, rank 0 sends the weights.

        Raises FIELD_CONFLICT if a pass differs from the announcement, GROUP_FAILED, and the client's error, at once if
        the engines refuse. The group is spent after a failure before the last tensor was sent: the engines cannot tell
        the bytes of the next update from the missing bytes.
        """
        announced = list(self._source.metadata())
        tensors = iter(self._source)
        if not self.is_sender:
            deque(tensors, maxlen=0)
            return
        try:
            self._send(announced, tensors)
        finally:
            # The other ranks wait for this rank in every gather. An error was raised before, or no longer matters.
            with contextlib.suppress(Exception):
                deque(tensors, maxlen=0)

    def _send(self, announced: Sequence[Any], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        group = self.model_update_group
        assert group is not None
        update_info = {
            "names": [each.name for each in announced],
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in announced],
            "shapes": [list(each.shape) for each in announced],
        }
        all_sent = threading.Event()

        def take() -> None:
            try:
                self._client.update_weights(update_info)
            except BaseException:
                if not all_sent.is_set():
                    group.interrupt()  # the engines have left the group
                raise

        self._client.start_weight_update()
        threads = ThreadPoolExecutor(1)
        try:
            update_call = threads.submit(take)
            info = self._info
            arguments = NCCLTrainerSendWeightsArgs(
                group, packed=info.packed, packed_buffer_size_bytes=info.packed_buffer_size_bytes
            )
            try:
                NCCLWeightTransferEngine.trainer_send_weights(_as_announced(tensors, announced), arguments)
            except BaseException as error:
                group.interrupt(f"the trainer gave up: {error}")  # the engines wait for the remaining bytes
                if isinstance(error, RlctlError):
                    _raise_why(error, update_call)
                raise
            all_sent.set()
            update_call.result()
        finally:
            threads.shutdown(wait=False)  # engines that wait in vain end by their own timeout
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the group."""
        if self.model_update_group is not None:
            self.model_update_group.close()
            self.model_update_group = None


def _raise_why(error: RlctlError, engine_call: Future[None]) -> None:
    """Raise the engines' own error for a failed group, if available: their error has the cause."""
    if error.reason is Reason.GROUP_FAILED:
        done, _ = wait([engine_call], SAYS_S)
        for each in done:
            each.result()


def _as_announced(
    tensors: Iterator[tuple[str, torch.Tensor]], announced: Sequence[Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    announcements = iter(announced)
    for name, tensor in tensors:
        expected = next(announcements, None)
        actual = (name, tensor.dtype, tuple(tensor.shape))
        if expected is None or actual != (expected.name, expected.dtype, tuple(expected.shape)):
            raise Reason.FIELD_CONFLICT.error(f"the weights give {actual} where {expected} was announced")
        yield name, tensor
    missing = next(announcements, None)
    if missing is not None:
        raise Reason.FIELD_CONFLICT.error(f"{missing} was announced and did not come")

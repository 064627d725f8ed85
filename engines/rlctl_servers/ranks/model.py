"""The port of a rank to the model of its engine."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.verbs_pb2 import UpdateWeightsFromDiskRequest
from rlctl.weights.shards.load_hooks import Load, LoadHooks, Loading
from rlctl.weights.shards.shard_map import Shard, ShardMap
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl_servers.ranks.shadow_copy import ShadowCopy


class RankModel(LoadHooks, abc.ABC):
    """The engine's model at one rank. All methods run on the engine's own thread, between two steps.

    Attributes:
        product: the engine's name in errors.
        rank: this rank's number in its server.
        size: number of the server's ranks.
        device: device of the weights.
    """

    product: str
    rank: int
    size: int
    device: torch.device

    @abc.abstractmethod
    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Hand a full tensor to the engine's loaders. The caller reuses its memory.

        Raises CHECKPOINT_MISMATCH for a tensor that has no place in the model.
        """

    def use_loader(self, load_format: str) -> None:
        """Make :meth:`load` use a further loader of the engine; "": the model's own loader. Raises UNSUPPORTED."""
        if load_format:
            raise Reason.UNSUPPORTED.error(f"there is no loader {load_format!r} at this rank", field="load_format")

    @abc.abstractmethod
    def reload(self, request: UpdateWeightsFromDiskRequest) -> None:
        """Make the engine load a checkpoint. Raises the errors of the engine."""

    def together(self, reference: Mapping[str, TensorMeta]) -> Sequence[tuple[str, ...]]:  # noqa: ARG002
        """Return lists of names that the engine processes together. An update writes all tensors of a list, or none."""
        return ()

    def adapters(self) -> Collection[str]:
        """Return the names under which this rank has loaded adapters. Raises UNSUPPORTED."""
        raise Reason.UNSUPPORTED.error(f"the ranks of {self.product} do not list their adapters")

    def learn(self, reference: Mapping[str, TensorMeta]) -> None:
        """Find the places of the reference's tensors. Called once for each stage server, before it serves.

        Raises UNSUPPORTED if the places cannot be found; ENGINE_FAILED (DIRTY) if the weights are spoilt.
        """

    def learned(self, reference: Mapping[str, TensorMeta]) -> bool:  # noqa: ARG002
        """Return whether :meth:`learn` has nothing to do."""
        return False

    @property
    def confirmed(self) -> bool:
        """Return whether :meth:`confirm` was called."""
        return False

    def confirm(self) -> None:
        """Record that the parts of :meth:`held` had the digest of the checkpoint that the engine had loaded."""

    @abc.abstractmethod
    def held(self, reference: Mapping[str, TensorMeta]) -> ShardMap:
        """Return the rank's weights as parts of the reference's tensors. Raises UNSUPPORTED if they cannot be read."""

    def places(self, reference: Mapping[str, TensorMeta]) -> Places:
        """Return the destination of an update's tensors, by default :meth:`load`."""
        return LoaderMap(reference, self)

    def unstaged(self, reference: Mapping[str, TensorMeta]) -> str:  # noqa: ARG002
        """Return why updates cannot be staged, or "" if staged updates are possible."""
        return f"where {self.product} has its weights is not known"

    def shadow(self, reference: Mapping[str, TensorMeta], load: Load) -> ShadowCopy:  # noqa: ARG002
        """Return a copy for a staged update, not allocated yet. Raises UNSUPPORTED if updates cannot be staged."""
        raise no_shadow(self.unstaged(reference))

    def swap(self, load: Load, copy: Callable[[], None]) -> None:
        """Write a shadow copy into the weights by ``copy``, with the engine's steps before and after a load."""
        loading = Loading(self, load)
        loading.prepare()
        try:
            copy()
            loading.finalise()
        except BaseException:
            loading.abandon()
            raise


def no_shadow(cause: str) -> RlctlError:
    """Return the error for an update that cannot be staged."""
    return Reason.UNSUPPORTED.error(
        f"the update cannot be staged: {cause}", field="apply", next_step="Update in place."
    )


class Places(ShardMap):
    """A shard map that an update is written to."""

    def begin(self) -> None: ...

    def touched(self, begun: Collection[str]) -> bool:
        """Return whether the weights have changed in this update. ``begun``: tensors whose placing has begun."""
        return bool(begun)

    def refuse_again(self, names: Iterable[tuple[str, str]]) -> None:
        """Raise FIELD_INVALID for a tensor that must not come twice. ``names``: each name with its field."""


class LoaderMap(Places):
    """Hands tensors to the engine's loaders. The tensors have no own memory."""

    def __init__(self, reference: Mapping[str, TensorMeta], model: RankModel) -> None:
        shards = {}
        for name, meta in reference.items():
            # A single element, seen in the full shape: the map needs device and shape of its destination.
            local = torch.empty(1, dtype=meta.dtype, device=model.device).as_strided(meta.shape, (0,) * len(meta.shape))
            shards[name] = Shard(meta, local)
        super().__init__(shards, model.together(reference))
        self._model = model
        self._loaded: set[str] = set()

    def begin(self) -> None:
        self._loaded = set()

    def touched(self, begun: Collection[str]) -> bool:  # noqa: ARG002
        """Return whether the loaders have taken a tensor. Before that, received bytes are in a buffer only."""
        return bool(self._loaded)

    def place(self, name: str, full: torch.Tensor) -> None:
        self._loaded.add(name)
        self._model.load(name, full)

    def refuse_again(self, names: Iterable[tuple[str, str]]) -> None:
        """Raise FIELD_INVALID for a tensor that comes twice in an update.

        Loaders may count elements. They would count the repeated tensor as a missing tensor, and refuse it once its
        layer is complete.
        """
        loaded = set(self._loaded)
        for name, field in names:
            if name in loaded:
                raise Reason.FIELD_INVALID.error(f"{name} comes twice in this update", field=field)
            loaded.add(name)

    def full_in_place(self, name: str) -> torch.Tensor | None:  # noqa: ARG002
        """Return None, since there is no memory to receive into."""
        return None


class MemoryMap(Places):
    """Writes tensors into the memory that the engine computes with.

    The loaders take tensors that are also for a draft model, or for a loader of the user.
    """

    def __init__(self, bind: Callable[[], Mapping[str, Shard]], loading: Callable[[], bool], model: RankModel) -> None:
        """``bind``: returns the parts in the present memory. ``loading``: whether the loaders take the tensors."""
        super().__init__(bind())
        self._bind = bind
        self._loading = loading
        self._model = model

    def begin(self) -> None:
        """Bind the parts again: the memory may have moved since the last update."""
        self.shards = dict(self._bind())

    def place(self, name: str, full: torch.Tensor) -> None:
        """Write the rank's part, or hand the tensor to the loaders."""
        if self._loading():
            self._model.load(name, full)
        else:
            super().place(name, full)

    def full_in_place(self, name: str) -> torch.Tensor | None:
        """Return the memory itself, unless the loaders take the tensors."""
        return None if self._loading() else super().full_in_place(name)

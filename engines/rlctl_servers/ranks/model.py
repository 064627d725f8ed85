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
    """The engine's model at one rank. All methods run in the engine's own thread, between two steps.

    Attributes:
        product: the engine's name in errors.
        rank: this rank's number in its server.
        size: number of the server's ranks.
        device: where the weights are.
    """

    product: str
    rank: int
    size: int
    device: torch.device

    @abc.abstractmethod
    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Hand a full tensor to the engine's loaders; the caller uses its memory again.

        Raises CHECKPOINT_MISMATCH for a tensor that has no place in the model.
        """

    def use_loader(self, load_format: str) -> None:
        """Have :meth:`load` use another of the engine's loaders; "": the model's own. Raises UNSUPPORTED."""
        if load_format:
            raise Reason.UNSUPPORTED.error(f"there is no loader {load_format!r} at this rank", field="load_format")

    @abc.abstractmethod
    def reload(self, request: UpdateWeightsFromDiskRequest) -> None:
        """Have the engine load a checkpoint. Raises the errors of the engine."""

    def together(self, reference: Mapping[str, TensorMeta]) -> Sequence[tuple[str, ...]]:  # noqa: ARG002
        """Names of tensors that the engine processes together: an update writes all of a list or none."""
        return ()

    def learn(self, reference: Mapping[str, TensorMeta]) -> None:
        """Find the places of the reference's tensors. Called once for each stage server, before it serves.

        Raises UNSUPPORTED where the places cannot be found; ENGINE_FAILED (DIRTY) if the weights are spoilt.
        """

    def learned(self, reference: Mapping[str, TensorMeta]) -> bool:  # noqa: ARG002
        """Whether :meth:`learn` has nothing to do."""
        return False

    @property
    def confirmed(self) -> bool:
        """Whether :meth:`confirm` was called."""
        return False

    def confirm(self) -> None:
        """The parts of :meth:`held` had the digest of the checkpoint that the engine had loaded."""

    @abc.abstractmethod
    def held(self, reference: Mapping[str, TensorMeta]) -> ShardMap:
        """The rank's weights, as parts of the reference's tensors. Raises UNSUPPORTED where they cannot be read."""

    def places(self, reference: Mapping[str, TensorMeta]) -> Places:
        """Where an update's tensors go. By default to :meth:`load`."""
        return LoaderMap(reference, self)

    def unstaged(self, reference: Mapping[str, TensorMeta]) -> str:  # noqa: ARG002
        """Why updates cannot be staged; "": they can."""
        return f"where {self.product} has its weights is not known"

    def shadow(self, reference: Mapping[str, TensorMeta], load: Load) -> ShadowCopy:  # noqa: ARG002
        """A copy for a staged update, not allocated yet. Raises UNSUPPORTED where updates cannot be staged."""
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
    """The refusal of a staged update."""
    return Reason.UNSUPPORTED.error(
        f"the update cannot be staged: {cause}", field="apply", next_step="Update in place."
    )


class Places(ShardMap):
    """A shard map that an update is written to."""

    def begin(self) -> None:
        """An update begins."""

    def touched(self, begun: Collection[str]) -> bool:
        """Whether the weights have changed in this update; ``begun``: names whose placing has begun."""
        return bool(begun)

    def refuse_again(self, names: Iterable[tuple[str, str]]) -> None:
        """Raise FIELD_INVALID for a tensor that must not come twice; ``names``: each with the field that names it."""


class LoaderMap(Places):
    """Tensors have no memory of their own: the engine's loaders take them."""

    def __init__(self, reference: Mapping[str, TensorMeta], model: RankModel) -> None:
        shards = {}
        for name, meta in reference.items():
            # One element, seen in the full shape: the map wants to know device and shape of what it writes to.
            local = torch.empty(1, dtype=meta.dtype, device=model.device).as_strided(meta.shape, (0,) * len(meta.shape))
            shards[name] = Shard(meta, local)
        super().__init__(shards, model.together(reference))
        self._model = model
        self._loaded: set[str] = set()

    def begin(self) -> None:
        """An update begins."""
        self._loaded = set()

    def touched(self, begun: Collection[str]) -> bool:  # noqa: ARG002
        """Whether the loaders have taken a tensor. Before that, received bytes are in a buffer only."""
        return bool(self._loaded)

    def place(self, name: str, full: torch.Tensor) -> None:
        """Hand a full tensor to the loaders."""
        self._loaded.add(name)
        self._model.load(name, full)

    def refuse_again(self, names: Iterable[tuple[str, str]]) -> None:
        """Raise FIELD_INVALID for a tensor that comes twice in an update.

        Loaders may count elements. They would count the repeated tensor as a missing one, and refuse it once its layer
        is complete.
        """
        loaded = set(self._loaded)
        for name, field in names:
            if name in loaded:
                raise Reason.FIELD_INVALID.error(f"{name} comes twice in this update", field=field)
            loaded.add(name)

    def full_in_place(self, name: str) -> torch.Tensor | None:  # noqa: ARG002
        """There is no memory to receive into."""
        return None


class MemoryMap(Places):
    """Tensors are written where the engine computes with them.

    The loaders take tensors that are also for a draft model, or for a loader of the user.
    """

    def __init__(self, bind: Callable[[], Mapping[str, Shard]], loading: Callable[[], bool], model: RankModel) -> None:
        """``bind``: the parts in the memory as it is now. ``loading``: whether the loaders are to take tensors."""
        super().__init__(bind())
        self._bind = bind
        self._loading = loading
        self._model = model

    def begin(self) -> None:
        """An update begins: the memory may be elsewhere than at the last one."""
        self.shards = dict(self._bind())

    def place(self, name: str, full: torch.Tensor) -> None:
        """Write the rank's part, or hand the tensor to the loaders."""
        if self._loading():
            self._model.load(name, full)
        else:
            super().place(name, full)

    def full_in_place(self, name: str) -> torch.Tensor | None:
        """The memory itself, unless the loaders are to take tensors."""
        return None if self._loading() else super().full_in_place(name)

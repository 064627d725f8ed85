"""The shard map of a rank (the slice and the memory of each tensor), and the model digest of a stage for any layout.

An engine shards, fuses and pads its parameters freely. For every tensor of the checkpoint its shard map has the slice
at this rank and the memory of the slice. This suffices to place full tensors, and to digest the stage's weights in the
form of the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1 import common_pb2
from rlctl.weights.checkpoint.checkpoint import StoredWeights, compare
from rlctl.weights.shards.gather import Gathering, Job, Transfer, parts_held
from rlctl.weights.shards.rank_exchange import Exchange, GroupExchange, LocalExchange, agree_to_go_on
from rlctl.weights.tensor.digest import TensorHash, combine, tensor_digests
from rlctl.weights.tensor.keyed_digest import Sum, identity, keyed_sums
from rlctl.weights.tensor.slices import Shard, Slice, owners
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl.weights.tensor.work import Stop, usable_cores

__all__ = [
    "Exchange",
    "GroupExchange",
    "LocalExchange",
    "ModelDigestResult",
    "Shard",
    "ShardMap",
    "Slice",
    "model_digest",
]

DIGEST_BYTES = 32 << 20
"""Bytes of full tensors that an owner gathers at a time. During their digest, as many bytes are gathered."""


class ShardMap:
    """The parts of a model at one rank.

    Attributes:
        shards: the tensors with a part at this rank, by checkpoint name.
        together: atomic lists: an update writes all tensors of a list or none.
    """

    def __init__(self, shards: Mapping[str, Shard], together: Iterable[tuple[str, ...]] = ()) -> None:
        """Create a map. Raises FIELD_INVALID if a shard's name, slice and memory do not fit."""
        for name, shard in shards.items():
            full = shard.meta.shape
            if shard.meta.name != name:
                raise Reason.FIELD_INVALID.error(f"the shard of {name!r} describes {shard.meta.name!r}")
            if not shard.slice.fits(full) or tuple(shard.local.shape) != shard.slice.shape(full):
                raise Reason.FIELD_INVALID.error(
                    f"{name}: memory of shape {tuple(shard.local.shape)} is not {shard.slice} of {full}"
                )
        self.shards = dict(shards)
        self.together = list(together)

    @property
    def reference(self) -> dict[str, TensorMeta]:
        return {name: shard.meta for name, shard in self.shards.items()}

    def fingerprint(self) -> str:
        """Return the SHA-256 over names, dtypes, full shapes and slices of the rank's parts, hex; not over contents."""
        return hashlib.sha256(json.dumps(parts_held(self.shards), sort_keys=True).encode()).hexdigest()

    def place(self, name: str, full: torch.Tensor) -> None:
        """Copy the rank's part of a full tensor into place, cast to the dtype of the memory.

        Raises FIELD_INVALID for an unknown name or another shape, before any write.
        """
        shard = self._shard(name)
        if tuple(full.shape) != shard.meta.shape:
            raise Reason.FIELD_INVALID.error(f"{name}: shape {tuple(full.shape)} instead of {shard.meta.shape}")
        shard.local.detach().copy_(shard.slice.of(full.detach()))

    def place_local(self, name: str, part: torch.Tensor) -> None:
        """Copy a tensor that is already the rank's part into place. Raises as :meth:`place`."""
        shard = self._shard(name)
        if part.shape != shard.local.shape:
            raise Reason.FIELD_INVALID.error(
                f"{name}: a part of shape {tuple(part.shape)} instead of {tuple(shard.local.shape)}"
            )
        shard.local.detach().copy_(part.detach())

    def load(self, stored: StoredWeights, *, ignore: Set[str] = frozenset(), only: Set[str] | None = None) -> set[str]:
        """Read the rank's part of every tensor directly into place; return the names.

        ``ignore`` are tensors that may be stored beside the tensors of the map. With ``only``, no other tensors are
        read, and other stored tensors do not matter. Raises CHECKPOINT_MISMATCH if names or shapes differ,
        CHECKPOINT_NOT_FOUND if a file changes or disappears; with outcome DIRTY after a possible write.
        """
        names = self.select(stored, ignore=ignore, only=only)
        stored.check_unchanged()
        parts = [(name, self.shards[name].slice, self.part_in_place(name)) for name in names]
        try:
            stored.read_into(parts)
        except RlctlError as error:
            error.outcome = common_pb2.OUTCOME_DIRTY
            raise
        return set(names)

    def select(
        self, stored: StoredWeights, *, ignore: Set[str] = frozenset(), only: Set[str] | None = None
    ) -> Set[str]:
        """Return the names that :meth:`load` would read, in order, with the same checks, without a read."""
        chosen = self.shards.keys() if only is None else only
        reference = {name: meta for name, meta in self.reference.items() if name in chosen}
        metas = {
            name: meta
            for name, meta in stored.metas.items()
            if name in reference or (only is None and name not in ignore)
        }
        compare(metas, reference, what=f"the checkpoint {stored.path}")
        return reference.keys()

    def part_in_place(self, name: str) -> torch.Tensor:
        """Return the memory of the rank's part of a tensor, for writing. Raises FIELD_INVALID for an unknown name."""
        return self._shard(name).local.detach()

    def full_in_place(self, name: str) -> torch.Tensor | None:
        """Return the memory of a tensor that is whole here in the reference's dtype and C order; else None.

        A receive into this memory needs no further copy. Raises FIELD_INVALID for an unknown name.
        """
        shard = self._shard(name)
        fits = shard.slice.whole(shard.meta.shape) and shard.local.dtype == shard.meta.dtype
        return shard.local.detach() if fits and shard.local.is_contiguous() else None

    def _shard(self, name: str) -> Shard:
        if name not in self.shards:
            raise Reason.FIELD_INVALID.error(f"the model has no tensor {name!r}")
        return self.shards[name]


@dataclass(frozen=True)
class ModelDigestResult:
    """Digests of a stage's weights.

    Attributes:
        digest: model digest, hex; the same at every rank.
        digests: hex digest of each full tensor of this rank's share, by checkpoint name. Over all ranks every tensor is
            in exactly one share.
        every: hex digest of each full tensor, by checkpoint name; the same at every rank.
        inconsistent: names of tensors with different copies at two ranks; the digest then differs from that of any
            valid weights.
    """

    digest: str
    digests: dict[str, str]
    every: dict[str, str]
    inconsistent: list[str]


def model_digest(
    shards: ShardMap,
    exchange: Exchange,
    *,
    max_bytes: int = DIGEST_BYTES,
    stop: Stop | None = None,
    known_digests: Mapping[str, str] | None = None,
    key: bytes = b"",
) -> ModelDigestResult:
    """Digest a stage's weights as full tensors under their checkpoint names and reference dtypes.

    All ranks call together. The result equals :class:`~rlctl.weights.tensor.digest.ModelDigest` over the full tensors,
    for any layout. Divided tensors are distributed over the ranks. Each is gathered at its owner, at most ``max_bytes``
    (or one row) at a time, and digested there. Every rank digests its own copy of parts that several ranks have, and
    the copies are compared. The weights must not change meanwhile: set ``stop`` at any rank before a change, to end the
    digest at all ranks. ``known_digests``: SHA-256 digests, by checkpoint name, of full tensors at this rank, computed
    since their last write; each under its reference dtype. With a ``key`` every rank digests its own parts, and only
    the sums are exchanged.

    Raises the cause of a rank's ``stop``, or the error of a rank's own work, at every rank. Raises INTERNAL if the
    ranks' shard maps contradict each other; GROUP_FAILED if the ranks cannot exchange.
    """
    if key:
        return _keyed_digest(shards, exchange, stop or Stop(), key)
    return _Digesting(shards, exchange, max_bytes, stop or Stop(), known_digests or {}).run()


def _keyed_digest(shards: ShardMap, exchange: Exchange, stop: Stop, key: bytes) -> ModelDigestResult:
    spreads = Gathering(shards.shards, exchange).spreads
    local_shards = [shards.shards[name] for name in sorted(shards.shards)]
    sums: list[Sum] = []
    with stop.on_error():
        sums = keyed_sums(key, local_shards, stop)
    agree_to_go_on(exchange, stop)
    local_sums = {shard.meta.name: each.words for shard, each in zip(local_shards, sums, strict=True)}
    rank_sums = [json.loads(answer) for answer in exchange.all_gather_bytes(json.dumps(local_sums).encode())]
    digests: dict[str, str] = {}
    inconsistent: list[str] = []
    for name, spread in spreads.items():
        total = identity(key, spread.meta)
        for piece in spread.pieces:
            copies = {Sum.of(*rank_sums[rank][name]) for rank in piece.holders}
            if len(copies) > 1:
                inconsistent.append(name)
            total += Sum.of(*rank_sums[piece.holders[0]][name])
        digests[name] = total.hex()
    for name in set(inconsistent):
        mixture = json.dumps([digests[name], [answer.get(name) for answer in rank_sums]])
        digests[name] = hashlib.sha256(mixture.encode()).hexdigest()[: len(digests[name])]
    owner = owners(spreads, exchange.size)
    share = {name: digest for name, digest in digests.items() if owner[name] == exchange.rank}
    return ModelDigestResult(combine(digests, key), share, digests, sorted(set(inconsistent)))


class _Digesting:
    """One run of :func:`model_digest` at one rank."""

    def __init__(
        self, shards: ShardMap, exchange: Exchange, max_bytes: int, stop: Stop, known_digests: Mapping[str, str]
    ) -> None:
        self._shards = shards.shards
        self._exchange = exchange
        self._max_bytes = max_bytes
        self._stop = stop
        self._known_digests = known_digests
        self._gathering = Gathering(shards.shards, exchange)
        self._spreads = self._gathering.spreads
        self._owner = owners(self._spreads, exchange.size)

    def run(self) -> ModelDigestResult:
        copies = self._digest_copies()
        owned = self._digest_cut_up()
        # Every rank has read its weights: a later stop does not matter.
        self._go_on()
        answers = self._exchange.all_gather_bytes(json.dumps({"copies": copies, "owned": owned}).encode())
        rank_digests = [json.loads(answer) for answer in answers]
        digests: dict[str, str] = {}
        inconsistent: list[str] = []
        for name, spread in self._spreads.items():
            piece_digests = [
                [rank_digests[rank]["copies"][name] for rank in piece.holders]
                for piece in spread.pieces
                if spread.whole or len(piece.holders) > 1
            ]
            digests[name] = piece_digests[0][0] if spread.whole else rank_digests[self._owner[name]]["owned"][name]
            if any(len(set(copy_digests)) > 1 for copy_digests in piece_digests):
                inconsistent.append(name)
                mixture = json.dumps([digests[name], piece_digests])
                digests[name] = hashlib.sha256(mixture.encode()).hexdigest()
        share = {name: digests[name] for name in digests if self._owner[name] == self._exchange.rank}
        return ModelDigestResult(combine(digests), share, digests, sorted(inconsistent))

    def _digest_copies(self) -> dict[str, str]:
        """Digest parts with copies at other ranks, and tensors that are whole here."""
        tensors: dict[str, tuple[torch.Tensor, torch.dtype]] = {}
        for name, spread in self._spreads.items():
            local_pieces = [piece for piece in spread.pieces if self._exchange.rank in piece.holders]
            if local_pieces and (spread.whole or len(local_pieces[0].holders) > 1):
                tensors[name] = (self._shards[name].local, spread.meta.dtype)
        digests = {
            name: self._known_digests[name]
            for name in tensors
            if name in self._known_digests and self._spreads[name].whole
        }
        self._go_on()
        with self._stop.on_error():
            digests |= tensor_digests({name: tensors[name] for name in tensors.keys() - digests.keys()}, self._stop)
        return digests

    def _digest_cut_up(self) -> dict[str, str]:
        """Digest this rank's share of the divided tensors; gather for the other ranks' shares."""
        hashes = {
            name: TensorHash(spread.meta)
            for name, spread in self._spreads.items()
            if not spread.whole and self._owner[name] == self._exchange.rank
        }
        hashing: list[Future[None]] = []
        with ThreadPoolExecutor(usable_cores(), thread_name_prefix="digest") as pool:
            # In every step each rank gathers one batch of its own share; the previous batch is digested meanwhile.
            for step in zip_longest(*(self._batches_of(owner) for owner in range(self._exchange.size))):
                transfers: list[Transfer] = []
                with self._stop.on_error():
                    for owner, batch in enumerate(step):
                        if batch is not None:
                            transfers.append(self._gathering.prepare(batch, owner))
                self._go_on()
                for transfer in transfers:
                    self._gathering.exchange(transfer)
                with self._stop.on_error():
                    for job in hashing:
                        job.result()
                    hashing = [
                        pool.submit(_take_in, hashes[name], blocks)
                        for transfer in transfers
                        if transfer.owner == self._exchange.rank
                        for name, blocks in self._gathering.blocks(transfer).items()
                    ]
            with self._stop.on_error():
                for job in hashing:
                    job.result()
        return {name: hash_.hexdigest() for name, hash_ in hashes.items()}

    def _batches_of(self, owner: int) -> Iterator[list[Job]]:
        """Yield the batches of an owner, in order, of at most ``max_bytes`` (or one block) each."""
        batch: list[Job] = []
        room = self._max_bytes
        for name, spread in self._spreads.items():
            if spread.whole or self._owner[name] != owner:
                continue
            for block in spread.blocks(self._max_bytes):
                size = spread.meta.nbytes // spread.meta.shape[0] * block.length
                if batch and size > room:
                    yield batch
                    batch, room = [], self._max_bytes
                batch.append((name, block))
                room -= size
        if batch:
            yield batch

    def _go_on(self) -> None:
        """Raise the cause of any rank's stop at every rank."""
        agree_to_go_on(self._exchange, self._stop)


def _take_in(hash_: TensorHash, blocks: Sequence[torch.Tensor]) -> None:
    for block in blocks:
        hash_.update(block)

"""Descriptions of the engine for its callers: capabilities, layout, model and server information."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from rlctl.contract.durations import duration
from rlctl.contract.verbs import VERBS
from rlctl.v1 import common_pb2, fleet_pb2
from rlctl.v1.verbs_pb2 import ModelInfo, ServerInfo
from rlctl.version import __version__
from rlctl.weights.checkpoint.load_formats import load_formats
from rlctl.weights.formats.block_fp8 import CODES
from rlctl.weights.tensor.placement import device_id, host_id
from rlctl.weights.tensor.tensors import dtype_name, to_proto
from rlctl_torch.options import float_dtypes
from rlctl_torch.rank import Rank
from rlctl_torch.verbs import check_weights, memory, pause


def capabilities(rank: Rank, verbs: Sequence[str]) -> fleet_pb2.Capabilities:
    cuda = rank.device.type == "cuda"
    transports = [common_pb2.TRANSPORT_TORCH_GLOO, common_pb2.TRANSPORT_DISK]
    verification = [
        common_pb2.VERIFICATION_LEVEL_NONE,
        common_pb2.VERIFICATION_LEVEL_PROBE,
        common_pb2.VERIFICATION_LEVEL_RECEIVED,
        common_pb2.VERIFICATION_LEVEL_REPLICA,
    ]
    if cuda:
        transports.insert(1, common_pb2.TRANSPORT_TORCH_NCCL)
    if host_id():
        transports.append(common_pb2.TRANSPORT_SHARED_MEMORY)
    if host_id() and cuda:
        transports.append(common_pb2.TRANSPORT_CUDA_IPC)
    if rank.model.lossless:
        # Otherwise the digest of the held weights cannot equal the digest of the sent weights.
        verification.append(common_pb2.VERIFICATION_LEVEL_EXPECTED)
    return fleet_pb2.Capabilities(
        verbs=verbs,
        pause_modes=pause.PAUSE_MODES,
        adapter_pause_modes=pause.PAUSE_MODES,
        transports=transports,
        verification=verification,
        load_dtypes=[dtype_name(dtype) for dtype in (*float_dtypes(), *([CODES] if rank.model.block else []))],
        memory_tags=memory.TAGS,
        check_actions=check_weights.actions(rank),
        decode_check_time=None if rank.calibration is None else duration(rank.calibration.seconds),
        cache_tiers=pause.CACHE_TIERS,
        kv_transports=[common_pb2.TRANSPORT_SHARED_MEMORY] if rank.options.disaggregation_mode != "null" else (),
        staged_apply=True,
        keyed_digests=True,
        keeps_weights=True,
        fenced=True,
        experimental=["transport.torch_nccl"] if cuda else [],
        unsupported={name: "the torch engine has no code for it" for name in VERBS if name not in verbs},
    )


def layout(rank: Rank, store: tuple[str, int]) -> fleet_pb2.StageLayout:
    """Return every rank's coordinates and the address of the store for the stage's own groups; all ranks together."""
    place = {"node": rank.config.node, "device": device_id(rank.device), "host_id": host_id()}
    message = json.dumps([place, rank.model.shards.fingerprint()]).encode()
    with rank.ranks.exchanging() as exchange:
        answers = [json.loads(answer) for answer in exchange.all_gather_bytes(message)]
    places = [place for place, _ in answers]
    return fleet_pb2.StageLayout(
        tp_size=rank.ranks.size,
        pp_size=1,
        dp_size=1,
        ep_size=1,
        store_host=store[0],
        store_port=store[1],
        shards_sha256=hashlib.sha256(json.dumps([shards for _, shards in answers]).encode()).hexdigest(),
        workers=[common_pb2.WorkerCoordinates(rank=number, tp=number, **place) for number, place in enumerate(places)],
    )


def model_info(rank: Rank, version: common_pb2.WeightVersion, *, reference: bool, adapter: str) -> ModelInfo:
    """Return the loaded model. ``reference`` adds every tensor of the checkpoint that the model was built from, or of
    ``adapter``.

    Raises ADAPTER_NOT_FOUND.
    """
    model = rank.model
    shards = rank.adapters.find(adapter, "adapter").shards if adapter else model.shards
    tensors = shards.reference.values() if reference else ()
    return ModelInfo(
        model_path=rank.checkpoint,
        model_type=model.config.model_type,
        architectures=model.config.architectures or [],
        weight_version=version,
        dtype=dtype_name(model.dtype),
        vocab_size=model.vocab_size,
        context_length=rank.longest,
        local_parameters=sum(parameter.numel() for parameter in model.module.parameters()),
        tokenizer_path="" if rank.tokenizer is None else rank.tokenizer.path,
        reference=[to_proto(meta) for meta in tensors],
    )


def server_info(rank: Rank, name: str, started: float) -> ServerInfo:
    """Return the rank's settings; ``started`` is on :func:`time.monotonic`'s clock."""
    options = rank.options
    settings = {
        "model_path": rank.config.model_path,
        "rank": rank.ranks.rank,
        "tp_size": rank.ranks.size,
        "device": rank.config.device,
        "dtype": rank.config.dtype,
        "max_running": options.max_running,
        "max_total_tokens": options.max_total_tokens,
        "context_length": rank.longest,
        "kv_dtype": dtype_name(options.kv_dtype or rank.model.dtype),
        "threads": options.threads,
        "seed": "" if options.seed is None else options.seed,
        "allowed_roots": rank.roots,
        "disaggregation_mode": options.disaggregation_mode,
        "load_formats": ", ".join(load_formats()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    info = ServerInfo(
        engine=name,
        engine_version=__version__,
        rlctl_version=__version__,
        pid=os.getpid(),
        node=rank.config.node,
        settings={key: str(value) for key, value in settings.items()},
        uptime=duration(time.monotonic() - started),
    )
    info.arguments.update({key: value for key, value in settings.items() if isinstance(value, str | int | float)})
    return info


def end_tokens(rank: Rank) -> frozenset[int]:
    """Return the ids that end the model's outputs, from config, generation config and tokenizer."""
    entries: list[Any] = [getattr(rank.model.config, "eos_token_id", None)]
    generation = Path(rank.config.model_path) / "generation_config.json"
    if generation.exists():
        entries.append(json.loads(generation.read_text()).get("eos_token_id"))
    if rank.tokenizer is not None:
        entries.append(rank.tokenizer.eos_token_id)
    ids: set[int] = set()
    for entry in entries:
        ids.update(entry if isinstance(entry, list) else [] if entry is None else [entry])
    return frozenset(ids)

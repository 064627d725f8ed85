"""Backends of the process groups that carry weights."""

from __future__ import annotations

from rlctl.contract import vllm_groups
from rlctl.v1.common_pb2 import TRANSPORT_TORCH_GLOO, TRANSPORT_TORCH_NCCL, TRANSPORT_VLLM_NCCL

BACKENDS = {
    TRANSPORT_TORCH_GLOO: "gloo",
    TRANSPORT_TORCH_NCCL: "nccl",
    TRANSPORT_VLLM_NCCL: vllm_groups.BACKEND,
}
"""Backend of the process groups, by transport."""

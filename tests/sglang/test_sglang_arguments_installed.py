"""The real SGLang's arguments are found."""

from __future__ import annotations

from rlctl_sglang.arguments import known_options


def test_the_installed_one_has_the_arguments_that_everybody_uses() -> None:
    known = known_options({})
    assert known is not None
    used = {"mem_fraction_static", "context_length", "chunked_prefill_size", "enable_torch_compile", "watchdog_timeout"}
    assert used | {"disaggregation_mode", "disaggregation_bootstrap_port", "encoder_only", "pp_size"} <= known.names
    assert len(known.names) > 200
    assert "mem_fraction_statik" not in known.names
    assert "tp_size" in known.taken

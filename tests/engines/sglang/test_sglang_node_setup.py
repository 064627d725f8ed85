"""A further node of an SGLang server, attached with a setup that no rank 0 sends."""

from __future__ import annotations

import pytest
from rlctl_sglang.server.nodes import SGLangNode

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import EngineConfig
from rlctl.v1.control_pb2 import Attach

SETUP = {"nodes": "2", "tp_size": "2", "address": "127.0.0.1:1", "dtype": "auto"}


@pytest.mark.parametrize(
    "setup", [{}, *({**SETUP, name: ""} for name in ("nodes", "tp_size", "address")), {**SETUP, "nodes": "1"}]
)
async def test_a_setup_of_no_server_is_refused(setup: dict[str, str]) -> None:
    node = SGLangNode(EngineConfig("model", rank=1), lambda failure: None)
    with pytest.raises(RlctlError) as refused:
        await node.start(Attach(engine_setup=setup).engine_setup)
    assert (refused.value.reason, refused.value.field) == (Reason.FIELD_INVALID, "attach.engine_setup")

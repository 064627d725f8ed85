"""vLLM's routes for adapters, and SkyRL's route that replaces an adapter of the same name.

An adapter belongs to a model, so every engine URL has the same effect. Generation names an adapter as its ``model``.
"""

from __future__ import annotations

import functools

from rlctl.contract.errors import Reason
from rlctl.gateway.http import engine_urls
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Reply, Route
from rlctl.v1.verbs_pb2 import LoadAdapterRequest, UnloadAdapterRequest


async def load(call: Call, *, replaces: bool = False) -> Reply:
    """LoadAdapter at every engine of the model."""
    fields = await call.fields()
    name = fields.take("lora_name", str)
    if fields.take("is_3d_lora_weight", bool, False):
        raise Reason.UNSUPPORTED.error("stacked matrices of experts are not supported", field="is_3d_lora_weight")
    if name in [model.name for model in await call.fleet.models()]:
        raise Reason.FIELD_INVALID.error(f"{name!r} is a model's name", field="lora_name")
    replaces = fields.take("load_inplace", bool, replaces)
    request = LoadAdapterRequest(name=name, path=fields.take("lora_path", str), only_new=not replaces)
    await call.operate(await engine_urls.aimed(call, request))
    return Reply(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(call: Call) -> Reply:
    """UnloadAdapter at every engine of the model."""
    fields = await call.fields()
    fields.accept("lora_int_id")
    request = UnloadAdapterRequest(name=fields.take("lora_name", str))
    await call.operate(await engine_urls.aimed(call, request))
    return Reply(f"Success: LoRA adapter '{request.name}' removed successfully.")


ROUTES = (
    Route("POST", "/v1/load_lora_adapter", load, lasting=False),
    Route(
        "POST",
        "/skyrl/v1/load_lora_adapter",
        functools.partial(load, replaces=True),
        doc="The same, which replaces one of that name.",
        lasting=False,
    ),
    Route("POST", "/v1/unload_lora_adapter", unload, lasting=False),
)

"""SGLang's routes for adapters. An adapter belongs to the model, so all engines have it, or no engine."""

from __future__ import annotations

from typing import Any

from rlctl.gateway.dialects.sglang.replies import saying_success
from rlctl.gateway.http import weight_fields
from rlctl.gateway.http.dialect import Reply
from rlctl.gateway.http.table import Field, Row, RowCall
from rlctl.v1 import verbs_pb2
from rlctl.v1.results_pb2 import Operation


@saying_success(error_message=None, loaded_adapters={})
async def load_lora(row_call: RowCall) -> Reply:
    """Load an adapter at every engine of the model."""
    request = verbs_pb2.LoadAdapterRequest(
        header=await row_call.header(model=row_call.model()),
        name=row_call["lora_name"],
        path=row_call["lora_path"],
        pinned=row_call["pinned"],
    )
    return _adapters(await row_call.call.operate(request))


@saying_success(error_message=None, loaded_adapters={})
async def unload_lora(row_call: RowCall) -> Reply:
    """Unload an adapter at every engine of the model."""
    request = verbs_pb2.UnloadAdapterRequest(
        header=await row_call.header(model=row_call.model()), name=row_call["lora_name"]
    )
    return _adapters(await row_call.call.operate(request))


@saying_success(error_message=None, loaded_adapters={})
async def load_lora_from_tensors(_: RowCall) -> Reply:
    """Not supported: pickles."""
    raise weight_fields.pickled(
        "serialized_named_tensors", "Save the adapter and load it, or send it with the SDK's publisher."
    )


def _adapters(operation: Operation) -> Reply:
    loaded = {adapter.name: adapter.path for adapter in operation.adapters}
    return Reply({"success": True, "error_message": None, "loaded_adapters": loaded})


_LOADED: Any = {200: "done", 400: "not done, and why"}

ROWS = (
    Row(
        "POST",
        "/load_lora_adapter",
        load_lora,
        "LoadAdapter",
        [Field("lora_name", str), Field("lora_path", str), Field("pinned", bool, False), Field("lora_id", str, None)],
        answers=_LOADED,
        note="at all engines of the model; replaces an adapter of the same name",
    ),
    Row("POST", "/unload_lora_adapter", unload_lora, "UnloadAdapter",
        [Field("lora_name", str), Field("lora_id", str, None)], answers=_LOADED,
        note="refused while requests use the adapter"),
    Row(
        "POST",
        "/load_lora_adapter_from_tensors",
        load_lora_from_tensors,
        "",
        [Field("lora_name", str), Field("config_dict", dict), Field("serialized_named_tensors", [str])],
        answers={400: "not supported"},
        note="refused: pickles",
    ),
)  # fmt: skip

"""vLLM's settings that keep, copy or move weights or KV entries (0.32.0); see
:mod:`rlctl_servers.server.update_blockers`.

vLLM's own store of KV entries in host memory (``OffloadingConnector``) is no obstacle if every request has a cache
salt. The store finds entries by block hashes, which contain salt and adapter. A flush empties the store, and the store
ends with the server. ``ExampleConnector`` finds entries by token ids alone. The other connectors were never tried.

Read and found harmless in 0.32.0: prefix caching and the encoder cache of the workers (emptied), ``cpu_offload_gb``
(the parameter itself lies in host memory), sleep mode (level 1 brings the same bytes back), speculative decoding (a
stale draft costs tokens that are not accepted), the cache of preprocessed pictures (no weights take part).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlctl_servers.server.update_blockers import COPIES, EMBEDDINGS, EXPERTS, SHARED, STORE, Keeper, keepers_in

KEEPERS = (
    Keeper("kv_transfer_config", STORE),
    Keeper("kv_offloading_size", STORE),
    Keeper("ec_transfer_config", EMBEDDINGS),
    Keeper("ec_manager_config", EMBEDDINGS),
    Keeper("enable_eplb", EXPERTS),
    Keeper("enable_elastic_ep", EXPERTS),
    Keeper("offload_group_size", COPIES),
    Keeper("load_format", SHARED, on=("ipc_cache",)),
)

_PLACES: Mapping[str, tuple[str, ...]] = {
    "kv_transfer_config": ("kv_transfer_config", "kv_connector"),
    "kv_offloading_size": ("cache_config", "kv_offloading_size"),
    "ec_transfer_config": ("ec_transfer_config", "ec_connector"),
    "ec_manager_config": ("ec_manager_config", "encoder_cache_manager_cls"),
    "enable_eplb": ("parallel_config", "enable_eplb"),
    "enable_elastic_ep": ("parallel_config", "enable_elastic_ep"),
    "offload_group_size": ("offload_config", "prefetch", "offload_group_size"),
    "load_format": ("load_config", "load_format"),
}
"""Place of the effective value of an argument in a server's configuration."""


def kept_by(config: Mapping[str, Any], *, salted: bool = False) -> list[Keeper]:
    """Return the keepers in the configuration of a server.

    ``config``: the configuration, by section. ``salted``: every request at the server has rlctl's cache salt.
    """
    keepers = keepers_in(KEEPERS, {name: _at(config, place) for name, place in _PLACES.items()})
    return [keeper for keeper in keepers if not (keeper.stores and salted and _is_salted_store(config))]


def kept_with(arguments: Mapping[str, str]) -> list[Keeper]:
    """Return the keepers of a server launched with these arguments."""
    keepers = keepers_in(KEEPERS, arguments)
    try:
        transfer = json.loads(arguments.get("kv_transfer_config", "{}"))
    except ValueError:
        return keepers
    native = arguments.get("kv_offloading_backend", "native") == "native"
    if native and isinstance(transfer, dict) and any(keeper.name == "kv_offloading_size" for keeper in keepers):
        transfer["kv_connector"] = "OffloadingConnector"  # vLLM's choice
    salted = _is_salted_store({"kv_transfer_config": transfer})
    return [keeper for keeper in keepers if not (keeper.stores and salted)]


def _is_salted_store(config: Mapping[str, Any]) -> bool:
    extra = _at(config, ("kv_transfer_config", "kv_connector_extra_config")) or {}
    spec = extra.get("spec_name", "CPUOffloadingSpec") if isinstance(extra, Mapping) else ""
    connector = _at(config, _PLACES["kv_transfer_config"])
    return (connector, spec) == ("OffloadingConnector", "CPUOffloadingSpec")


def _at(config: Mapping[str, Any], place: tuple[str, ...]) -> object:
    value: Any = config
    for name in place:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value

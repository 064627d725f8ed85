"""SGLang's settings that keep, copy or move weights or KV entries (0.5.23); see
:mod:`rlctl_servers.server.update_blockers`.

Read and found harmless in 0.5.23: the radix cache with its tiers in memory (a flush empties them), hierarchical sparse
attention (its host entries end with their request), ``cpu_offload_gb`` (the parameter itself lies in host memory),
redundant experts without rebalancing (the loader writes every copy), backups of released weights (made at the release),
speculative decoding (a stale draft costs tokens that are not accepted), the cache of preprocessed pictures (no weights
take part).
"""

from __future__ import annotations

from rlctl_servers.server.update_blockers import COPIES, EMBEDDINGS, EXPERTS, SHARED, STORE, Keeper

KEEPERS = (
    Keeper("hicache_storage_backend", STORE),
    Keeper("enable_lmcache", STORE),
    Keeper("enable_flexkv", STORE),
    Keeper("radix_cache_backend", STORE),
    Keeper("enable_unified_cache_external_linker", STORE),
    Keeper("disaggregation_decode_enable_offload_kvcache", STORE),
    Keeper("enable_streaming_session", STORE),
    Keeper("enable_mm_global_cache", EMBEDDINGS),
    Keeper("enable_prefix_mm_cache", EMBEDDINGS),
    Keeper("enable_eplb", EXPERTS),
    Keeper("elastic_ep_backend", EXPERTS),
    Keeper("enable_elastic_expert_backup", EXPERTS),
    Keeper("enable_paged_experts", COPIES),
    Keeper("kt_weight_path", COPIES),
    Keeper("offload_group_size", COPIES),
    Keeper("dwdp_size", COPIES, off=("1",)),
    Keeper("weight_cache_mode", SHARED),
    Keeper("ple_offload_backend", SHARED, on=("file",)),
)

"""LoRA adapters at a server: loaded beside the serving adapter, swapped by the commit.

Imports: rlctl_servers.updates, rlctl_servers.requests, rlctl.engine, rlctl.contract, rlctl.weights.

Start with ``adapters.py`` (``Adapters``) and ``lora_table.py`` (``LoraTable``: names at the server, pure).
"""

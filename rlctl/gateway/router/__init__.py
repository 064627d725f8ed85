"""sglang-router in front of a gateway: its process, its worker list, and its split requests to pairs.

Decides the router's list. A stage is removed from the list before it is paused or written to.

Imports: gateway.generation, gateway.http, client, sdk, rollout.picking, contract, runtime, transport.

Start with ``worker_list.py`` (``Keeper``) and ``process.py`` (``SglangRouter``). ``confirmed_watch.py`` confirms
changes to the coordinator; ``split_pairs.py`` joins the two requests of a pair.
"""

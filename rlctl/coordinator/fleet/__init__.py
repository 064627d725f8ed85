"""The stages of the fleet: slots, links, leases, versions, pauses by name, routing followers.

Decides the state of each stage, whether it is routable, which versions it may serve and until when. Serving
leases are granted in ``stage_links.py`` (``Peers.grant``); a stage that must not serve is silenced there
(``Peers.silence``).

Imports: coordinator.journal, command_stream, contract, ports.

Start with ``roster.py`` (``Slot``, ``ModelState``, ``Roster.register``, ``Roster.quarantine``) and
``versions.py`` (``publish``, ``adoptable``). ``inflight_replay.py`` repeats commands after a broken link;
``replaced_leases.py`` waits for replaced processes; ``kept_pauses.py`` holds pauses by name; ``admission.py``
says which slots may be filled.
"""

"""The stages of the fleet: slots, links, leases, versions, pauses by name, routing followers.

Decides the state of each stage, whether the stage is routable, which versions it may serve and until when. Serving
leases are granted in ``stage_links.py`` (``Peers.grant``); a stage that must not serve is silenced there
(``Peers.silence``).

Imports: coordinator.journal, command_stream, contract, ports.

Start with ``slot.py`` (``Slot.state``, ``Slot.not_routable``), ``roster.py`` (``Roster.register``,
``Roster.quarantine``) and ``versions.py`` (``publish``, ``adoptable``). ``model_state.py`` has the state of a model,
``fleet_messages.py`` the messages for watchers. ``inflight_replay.py`` repeats commands after a broken link;
``replaced_leases.py`` waits for replaced processes; ``kept_pauses.py`` holds pauses by name; ``admitted_slots.py``
(``AdmittedSlots.refuse``) refuses a stage in a slot that is not admitted.

Callers of ``Roster.quarantine``:

- ``coordinator/operations/fanout.py``: a command ended UNKNOWN or DIRTY.
- ``coordinator/transaction/commit.py``: a target failed verification, or did not continue.
- ``coordinator/transaction/transfer.py``: a target was lost.
- ``stage_links.py``: a batch is not verified yet, or the weights of a stage are unknown.

A stage that loses a rank quarantines itself in ``stage/state_machine.py`` (``Stage.rank_lost``).
"""

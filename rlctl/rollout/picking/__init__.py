"""Picks a stage for a request. Pure: no I/O, no clock of its own.

Decides by admission, health, policy and session which stage, or which prefill and decode pair, serves a request.

Imports: contract.

Start with ``router.py`` (``Router.pick``). ``policies.py`` has the policies, ``health.py`` the waits after refusals and
failures. ``sessions.py`` keeps a session at one stage, on the ring of ``hash_ring.py``.

``admission.py`` (``Admission.floor``) computes the lowest version, and ``Router._may_take`` excludes older stages. The
request carries this version, and an older stage refuses the request: ``Serving.refuse`` in ``stage/serving_state.py``.
"""

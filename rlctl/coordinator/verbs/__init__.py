"""The verbs of the table, from the request to the operation.

Decides for each verb its targets, its refusals, the work that ends before it, and the work besides a fan-out to stages.

Imports: coordinator.updates, coordinator.transaction, coordinator.pauses, coordinator.operations, coordinator.fleet,
contract.

Start with ``routes.py`` (``ROUTES``: one row for each verb that is not only fanned out; ``Route``: the columns), then
``carrier.py`` (``Carrier.carry_out``).
"""

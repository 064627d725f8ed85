"""Rules for the requests of the contract: one rule for each type of request. Pure.

Decides the allowed values of fields, which fields are required, and which fields exclude each other. A rule reads the
request alone. Rules that depend on the state of the fleet belong to the coordinator and the stage.

Imports: contract.

Start with ``table.py`` (``Rules``: a rule by type of request) and ``fields.py`` (rules for single fields). A further
rule belongs to ``generation.py``, ``weights.py``, ``weight_checks.py``, ``updates.py`` or ``fleet.py``. ``options.py``
has rules that updates and their verbs share. ``contract/validation.py`` (``check``) applies the rules.
"""

"""From a YAML file to a plan: document, schema, resolve, plan, diff. No I/O beyond reading the file.

Decides the meaning of a topology file, the errors, and the changes in a running fleet.

Imports: launch.interface, launch.local, engine, contract.

Start with ``schema.py`` (the table of keys, source of the reader, the JSON Schema and the reference page),
``resolve.py`` (``resolve``), ``plan.py`` (``plan``) and ``diff.py`` (``difference``). ``support.py`` lists the settings
that this version cannot run.
"""

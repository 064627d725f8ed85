"""From a YAML file to a plan: document, schema, resolve, plan, diff. No I/O beyond reading the file.

Decides the meaning of a topology file, its errors, and the changes that it makes in a running fleet.

Imports: launch.interface, launch.local, engine, contract.

Start with ``schema.py`` (the table of keys: reader, JSON Schema and reference page come from it),
``resolve.py`` (``resolve``), ``plan.py`` (``plan``) and ``diff.py`` (``difference``). ``support.py`` lists what
this version cannot run.
"""

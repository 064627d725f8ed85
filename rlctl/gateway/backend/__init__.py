"""Generates for the routes: samples through the SDK, with each caller's token, and tokenizers.

Decides how many samples run at a time, which model a request means, and which tokenizer renders a chat. Picks and
retries are rlctl.rollout's.

Imports: sdk, rollout, contract, runtime, transport.

Start with ``service.py`` (``Generation.complete``). ``tokenizers.py`` loads tokenizers on first use. ``data_ports.py``
(``Exchange``) sends one HTTP request to the data port of a stage.
"""

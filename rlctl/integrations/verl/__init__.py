"""verl over an rlctl fleet: its checkpoint engine and its rollout replica.

Imports: trainer, rollout, weights.tensor, contract.

Start with ``checkpoint_engine.py`` (``FleetCheckpointEngine``). ``weights.py`` reads the weights of a training engine;
``incarnations.py`` fences the trainer of before.
"""

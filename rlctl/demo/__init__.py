"""``rlctl demo``: a tiny Llama trained by GRPO on sums of two digits, through a real fleet on this machine.

``task`` says what is learned, ``tiny`` makes the model, ``grpo`` is the trainer, ``loop`` runs trainer and fleet
together, ``judge`` decides whether what was seen is what rlctl promises, ``show`` prints and plots it.
"""

"""Tensors that SGLang's clients serialise: pickles of handles, read as data without unpickling.

Decides which opcodes and names such a pickle may contain, how large it may be, and which handles are readable.

Imports: contract.

Start with ``payload.py`` (``read_payloads``: the tensors of each rank), then ``handles.py`` (``CONSTRUCTORS``: every
accepted name) and ``pickle_reader.py`` (``PickleReader``: the stack machine). ``checkpoint_engine.py`` reads the
messages of checkpoint-engine's parameter servers. Written from SGLang 0.5.23 and torch 2.13.
"""

"""Reader of tensors serialised by SGLang's clients: pickles of handles, read as data without unpickling.

Decides the allowed opcodes and names in such a pickle, the largest size, and the readable handles.

Imports: contract.

Start with ``payload.py`` (``read_payloads``: the tensors of each rank), then ``handles.py`` (``CONSTRUCTORS``: every
accepted name) and ``pickle_reader.py`` (``PickleReader``: the stack machine). ``checkpoint_engine.py`` reads the
messages of checkpoint-engine's parameter servers. Written from SGLang 0.5.23 and torch 2.13.
"""

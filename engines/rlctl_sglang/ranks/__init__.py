"""Code inside SGLang's scheduler processes: rlctl's ranks over SGLang's model.

Imports: rlctl_servers.ranks, rlctl.contract, rlctl.weights, SGLang. No HTTP, no gRPC.

Start with ``plugin.py`` (``register``: the entry point that SGLang calls), then ``model.py`` (``SGLangModel``).
SGLang's own loaders are called in ``SGLangModel._load_into`` (tensors of an update), ``SGLangModel.reload`` (a
checkpoint) and ``SGLangModel._find_out`` (the search for the places of elements). The steps of an update are in
``rlctl_servers.ranks``.
"""

"""SGLang's HTTP interface in front of one vLLM server: ``rlctl sidecar vllm``.

A request is read once (:mod:`.asking`), becomes one request of vLLM's for each sample
(:mod:`rlctl_vllm.requests.bodies`, as for the plug-in), and what vLLM says of a sample is put into SGLang's words
(:mod:`.telling`). :mod:`.running` holds what is under way and ends it; :mod:`.upstream` is the server behind;
:mod:`.admin` are the admin verbs of a server that no coordinator drives, carried out by the plug-in itself; :mod:`.app`
are the routes, :mod:`.serving` puts it together, :mod:`.registering` tells a router.
"""

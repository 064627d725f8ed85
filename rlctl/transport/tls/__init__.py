"""TLS of every hop: identities in certificates, credentials that are reread, the check of callers, a private CA.

Decides who may call whom, which name a server's certificate must have, and which files a process reads.

Imports: contract, runtime, and ``grpc`` from transport; ``cryptography`` (extra ``tls``) where certificates are read.

Start with ``identity.py`` (``Identity``, ``refusal``), ``credentials.py`` (``Tls``: the files of a process as
credentials of channels, servers and HTTP) and ``peers.py`` (``peer_identity``). ``authority.py`` is the private CA.
"""

"""TLS of every hop: identities in certificates, and the check of callers.

Decides who may call whom, and which name a server's certificate must have.

Imports: contract, and ``grpc`` from transport.

Start with ``identity.py`` (``Identity``, ``refusal``) and ``peers.py`` (``peer_identity``, ``PeerGuard``).
"""

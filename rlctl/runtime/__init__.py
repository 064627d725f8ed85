"""Process-level tools: event loops, addresses, private files, HTTP limits, shutdown of servers.

Decides how a server process announces itself and ends, which addresses need a token, who may read a file that
rlctl writes, how long an HTTP caller may take, and how large bodies are bounded and parsed. ``shielding.py`` lets
accepted work continue after its caller disconnects.

Imports: contract, ports.

Start with ``server_process.py`` (``announce``, ``end_with_parent``) and ``event_loops.py`` (``LoopThread``).
"""

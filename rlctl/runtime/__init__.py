"""Process-level tools: event loops, addresses, private files, HTTP limits, shutdown of servers.

Decides how a server process announces itself and ends (``server_process.py``), how long a killed process is waited for
(``kills.py``), which addresses need a token (``addresses.py``), who may read the files that rlctl writes, and how such
a file is replaced (``private_files.py``). For HTTP, the package decides the time and the size that a request may take
(``http_limits.py``, ``http_bodies.py``), how an answer carries a typed error (``http_errors.py``), and which headers a
forwarded request keeps (``http_forwarding.py``). ``http_client.py`` sends such requests, and ``http_answers.py`` parses
the answers. ``keepalive.py`` breaks connections to a lost peer. ``shielding.py`` lets accepted work continue after its
caller disconnects. ``progress_line.py`` shows a program's waits at a terminal. ``zmq_reply.py`` is the replying end of
a ZeroMQ connection.

Imports: contract, ports.

Start with ``server_process.py`` (``announce``, ``end_with_parent``) and ``event_loops.py`` (``LoopThread``).
"""

"""The coordinator: one fleet, its operations and its weight updates.

``core`` is what the RPCs call; ``roster`` is who there is, ``peers`` the links to them, ``fanout`` one verb to many,
``operations`` the record of what was asked, ``updates`` the weight-update session, ``versions`` what may be served.
Nothing here imports grpc or sqlite3 but ``server`` and ``sqlite_journal``.
"""

"""The page of ``rlctl coordinator --web``: the fleet, operations and timelines, read-only, over HTTP.

The tables are made by cli.render of the coordinator's own objects in the same process. ``page.html`` draws the tables
and reads new tables every 2 s; nothing is computed while no page is open.

Decides the callers that may read the page, the headers of answers, and the bounds of sizes.

Imports: aiohttp, cli.render, contract, coordinator, runtime, transport.

Start with ``server.py`` (``WebServer``); ``content.py`` (``Content``) makes the tables.
"""

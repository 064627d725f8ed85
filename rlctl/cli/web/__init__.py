"""The page of ``rlctl coordinator --web``: the fleet, its operations and their timelines, read-only, over HTTP.

The tables are those of cli.render, made of the coordinator's own objects in its process. The page in ``page.html``
draws them and reads them again every 2 s; nothing is computed while no page is open.

Decides who may read the page, the headers of its answers, and the bounds of their size.

Imports: aiohttp, cli.render, contract, coordinator, runtime, transport.

Start with ``server.py`` (``WebServer``); ``content.py`` (``Content``) makes the tables.
"""

"""The trainer's SDK: ``connect`` for blocking code, ``aio.connect`` for asyncio. Import from ``rlctl``."""

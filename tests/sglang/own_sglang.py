"""An SGLang server of a user, with rlctl beside it and without a stage server: to be attached to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlctl_sglang.options import Options
from rlctl_sglang.server.process import SGLangProcess

from rlctl.engine import EngineConfig
from rlctl.runtime.event_loops import LoopThread


@contextlib.contextmanager
def own_sglang(
    checkpoint: Path,
    place: Path,
    tp_size: int,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    arguments: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, dict[str, str]]]:
    """The URL of the server, and the options of a stage server for its keys; ``place``: a directory for the keys."""
    loop = LoopThread("own")
    config = EngineConfig(str(checkpoint), tp_size=tp_size, device=device, dtype=dtype)
    process = SGLangProcess(config, Options(arguments=dict(arguments or {})))
    options = {}
    for name, option in (("api-key", "api_key_file"), ("admin-api-key", "admin_key_file")):
        (place / name).write_text(process._keys[name])
        options[option] = str(place / name)
    try:
        loop.submit(process.start(lambda error: None)).result(400)
        yield process.http.url, options
    finally:
        loop.submit(process.stop()).result(60)
        loop.stop()

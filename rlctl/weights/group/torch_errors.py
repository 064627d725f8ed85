"""Causes of torch.distributed's failures in plain words.

The raw texts name source files of gloo, and advise readers to look for a core dump.
"""

from __future__ import annotations

import re

_SOURCE = re.compile(r"\[[^\]]*\.(?:cc|cpp|cu|h|hpp):\d+\]\s*")
"""``[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] ``"""

_PEER = r"\[(?P<host>[^\]]*)\]:(?P<port>\d+)"
_WORDS = (
    (re.compile(rf"Connection closed by peer {_PEER}"), "the peer at {host}:{port} closed its connection"),
    (re.compile(rf"(?:Read|Write) error {_PEER}: (?P<cause>[^.\n]+)"), "connection to {host}:{port}: {cause}"),
    (re.compile(r"Timed out waiting (?P<ms>\d+)ms for (?P<what>send|recv)"), "no answer of a peer within {ms} ms"),
    (re.compile(r"Application timeout caused pair closure"), "no answer of a peer in time"),
)


def cause_of(error: BaseException | str) -> str:
    text = str(error)
    for pattern, words in _WORDS:
        if match := pattern.search(text):
            return words.format(**match.groupdict())
    lines = _SOURCE.sub("", text).strip().splitlines()
    return lines[0] if lines else (error if isinstance(error, str) else type(error).__name__)

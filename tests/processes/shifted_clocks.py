"""Wall clocks of single processes that a test sets: `shifted_clock.c`, built and loaded into them."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("shifted_clock.c")
COMPILER = shutil.which("cc") if sys.platform == "linux" else None
"""Without a compiler, or on another system, no clock can be shifted."""

_PAIR = struct.Struct("=qq")
_MOST = 16


class ShiftedClocks:
    """The clocks of all processes that were started with :attr:`variables`.

    Attributes:
        variables: environment of the processes.
    """

    def __init__(self, directory: Path) -> None:
        library, self._file = directory / "shifted_clock.so", directory / "shifts"
        subprocess.run([str(COMPILER), "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
        self._file.write_bytes(bytes(_MOST * _PAIR.size))
        self.variables = {"LD_PRELOAD": str(library), "SHIFTED_CLOCKS": str(self._file)}

    def set(self, ahead_s: dict[int, float]) -> None:
        """Set the clocks of these processes ahead, or back, by pid. All other clocks are right again."""
        pairs = [_PAIR.pack(pid, round(seconds * 1e9)) for pid, seconds in ahead_s.items()]
        content = b"".join(pairs).ljust(_MOST * _PAIR.size, b"\0")
        with self._file.open("r+b") as file:  # in place: the processes have mapped it
            file.write(content)

"""An rlctl process: `python -m other_host ARGUMENTS`.

With OTHER_HOST set it takes itself to be on a host of that boot id, which shares no memory with this one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def main() -> None:
    given = os.environ.get("OTHER_HOST")
    if given:
        from rlctl.weights.tensor import placement

        with tempfile.TemporaryDirectory() as directory:
            placement._BOOT_ID = Path(directory) / "boot_id"
            placement._BOOT_ID.write_text(given)
            assert placement.host_id().startswith(given)  # from here on it is remembered
    from rlctl.cli.main import main as rlctl_main

    rlctl_main()


if __name__ == "__main__":
    main()

"""The file with the metrics addresses of a fleet, for Prometheus (``file_sd_configs``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rlctl.launch.interface.launcher import Launched
from rlctl.runtime import private_files

FILE = "metrics-targets.json"


class MetricsTargets:
    """Writes the file after a change of the addresses."""

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        """``say`` takes a warning."""
        self._path = directory / FILE
        self._say = say
        self._text = ""
        self._failed = False

    def write(self, processes: Sequence[Launched]) -> None:
        """Write the addresses of the processes with an announced address.

        A failed write is a warning, once until a write succeeds. The next call writes again.
        """
        text = json.dumps([_target(each) for each in processes if "metrics_address" in each.facts], indent=1)
        if text == self._text:
            return
        draft = self._path.with_suffix(".draft")
        try:
            private_files.write_text(draft, text + "\n")
            draft.replace(self._path)  # Prometheus reads at any time
        except OSError as error:  # the fleet runs without the file
            if not self._failed:
                self._say(f"Warning: {self._path} was not written, Prometheus reads older addresses: {error.strerror}")
            self._failed = True
            return
        self._text, self._failed = text, False


def _target(process: Launched) -> dict[str, object]:
    kind = "gateway" if process.name.startswith("gateway-") else "stage"
    job = f"rlctl-{'coordinator' if process.name == 'coordinator' else kind}"
    return {"targets": [process.facts["metrics_address"]], "labels": {"job": job, "process": process.name}}

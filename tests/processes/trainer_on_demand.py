"""A trainer that publishes a version for each line that it reads: ``python trainer_on_demand.py ADDRESS``.

It says "connected" first. A line is a label. The answer is a line of JSON: the present time here, and the sequence of
the version or the failure.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

import rlctl
from rlctl.contract.errors import RlctlError
from rlctl.demo import tiny


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    torch.set_num_threads(1)
    with rlctl.connect(sys.argv[1]) as fleet:
        publisher = fleet.publisher("actor")
        say("connected")
        for seed, line in enumerate(sys.stdin):
            answer: dict[str, Any] = {"clock": time.time()}
            try:
                update = publisher.update(tiny.make(seed=seed), version=line.strip(), pause="retract", deadline_s=60)
                answer["sequence"] = update.version.sequence
            except RlctlError as error:
                answer["failure"] = str(error)
            say(json.dumps(answer))


if __name__ == "__main__":
    main()

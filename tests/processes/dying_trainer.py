"""A trainer that stays in the middle of a broadcast until it is killed: ``python dying_trainer.py ADDRESS TOKEN``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from interrupted_weights import Interrupted

import rlctl
from rlctl.demo import tiny

LONGEST_S = 100.0


def stay() -> None:
    sys.stdout.write("in the middle\n")
    sys.stdout.flush()
    time.sleep(LONGEST_S)


def main() -> None:
    torch.set_num_threads(1)
    address, token = sys.argv[1:]
    with rlctl.connect(address, token=token) as fleet:
        fleet.publisher("actor", bucket_bytes=100_000).update(
            Interrupted(tiny.make(seed=5), stay), version="never", pause="retract"
        )


if __name__ == "__main__":
    main()

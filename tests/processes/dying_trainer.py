"""A trainer that stays half-way through a broadcast until it is killed: ``python dying_trainer.py ADDRESS SETTINGS``.

SETTINGS is JSON: ``token``, and the options of the update.
"""

from __future__ import annotations

import json
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
    sys.stdout.write("half-way\n")
    sys.stdout.flush()
    time.sleep(LONGEST_S)


def main() -> None:
    torch.set_num_threads(1)
    address, settings = sys.argv[1], json.loads(sys.argv[2])
    with rlctl.connect(address, token=settings.pop("token")) as fleet:
        publisher = fleet.publisher("actor", bucket_bytes=4096)
        publisher.update(Interrupted(tiny.make(seed=5), stay), version="never", **settings)


if __name__ == "__main__":
    main()

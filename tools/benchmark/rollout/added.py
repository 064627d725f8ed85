"""The added time of a request through the SDK and through sglang-router."""

from __future__ import annotations

from tools.benchmark.figures import Reading, Setting
from tools.benchmark.rollout import clients
from tools.benchmark.rollout.ways import BODY, running
from tools.benchmark.rounds import Spread, interleaved, median
from tools.benchmark.servers import post_all


def sdk(setting: Setting) -> Reading:
    """Measure both additions in each round, and their ratio."""
    ways = setting.shared(running)
    count = 50 if setting.quick else 1000
    sides = {
        "sdk": lambda: clients.run(setting, clients.sdk(ways.coordinator, count, 1)),
        "bare": lambda: clients.run(setting, clients.bare(ways.stage, count, 1, stream=True)),
        "unary": lambda: clients.run(setting, clients.bare(ways.stage, count, 1, stream=False)),
        "router": lambda: clients.run(setting, post_all(ways.router, BODY, count, 1)),
        "direct": lambda: clients.run(setting, post_all(ways.direct, BODY, count, 1)),
        "gateway": lambda: clients.run(setting, post_all(ways.gateway, BODY, count, 1)),
    }
    took = {
        name: [median(each) * 1000 for each in rounds] for name, rounds in interleaved(setting.rounds, sides).items()
    }
    ours = [a - b for a, b in zip(took["sdk"], took["bare"], strict=True)]
    theirs = [a - b for a, b in zip(took["router"], took["direct"], strict=True)]
    spread = Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
    details = {f"{name}_ms": median(values) for name, values in took.items()}
    return Reading.of(spread, floor=median(theirs), floor_unit="ms", added_ms=median(ours), **details)

"""A real Prometheus reads a coordinator and a stage, and evaluates the alert rules of examples/monitoring."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "examples" / "monitoring" / "alerts.yaml"


@pytest.fixture
def prometheus() -> Path:
    place = subprocess.run([ROOT / "tools" / "prometheus", "path"], capture_output=True, text=True, check=False)
    if place.returncode:
        pytest.skip("Prometheus is not installed here: tools/prometheus install")
    return Path(place.stdout.strip()) / "prometheus"


def configure(directory: Path, targets: Mapping[str, str]) -> None:
    """Scrape and evaluate every second."""
    rules = yaml.safe_load(ALERTS.read_text())
    rules["groups"][0]["interval"] = "1s"
    (directory / "alerts.yaml").write_text(yaml.safe_dump(rules))
    jobs = [{"job_name": name, "static_configs": [{"targets": [address]}]} for name, address in targets.items()]
    config = {"global": {"scrape_interval": "1s"}, "rule_files": ["alerts.yaml"], "scrape_configs": jobs}
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))


@contextlib.asynccontextmanager
async def running(program: Path, directory: Path) -> AsyncIterator[str]:
    """The URL of its API."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = ("--config.file=prometheus.yaml", "--storage.tsdb.path=data", f"--web.listen-address={address}")
    with (directory / "prometheus.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(program, *options, cwd=directory, stderr=log)
    try:
        yield f"http://{address}/api/v1"
    finally:
        process.terminate()
        await process.wait()


async def ask(url: str) -> Any:
    def read() -> Any:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    return await asyncio.to_thread(read)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError):  # it has not begun to listen
                if await condition():
                    return
            await asyncio.sleep(0.2)


async def test_prometheus_reads_the_fleet_and_evaluates_the_rules(
    make_fleet: Callable, prometheus: Path, tmp_path: Path
) -> None:
    async with make_fleet(a=1, metrics="127.0.0.1:0") as fleet:
        stage = fleet.stages["a"]
        configure(tmp_path, {"rlctl-coordinator": fleet.server.metrics_address, "rlctl-stage": stage.metrics_address})
        async with running(prometheus, tmp_path) as api:

            async def value(expression: str) -> list[str]:
                answer = await ask(f"{api}/query?query={urllib.parse.quote(expression)}")
                return [each["value"][1] for each in answer["result"]]

            async def is_read() -> bool:
                return await value("rlctl_stage_routable") == await value("rlctl_serving_version") == ["1"]

            async def is_evaluated() -> bool:
                return {rule["health"] for rule in (await ask(f"{api}/rules"))["groups"][0]["rules"]} == {"ok"}

            await until(is_read)
            await until(is_evaluated)
            assert await value("rlctl_epoch") == ["1"]
            assert {target["health"] for target in (await ask(f"{api}/targets"))["activeTargets"]} == {"up"}
            assert not (await ask(f"{api}/alerts"))["alerts"]

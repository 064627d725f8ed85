"""docs/dialects.md has every route of these dialects."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlctl.gateway import dialects
from rlctl.gateway.backend.service import Settings
from rlctl.gateway.http.table import ENGINE

DOCUMENT = Path(__file__).parents[2] / "docs" / "dialects.md"

SECTIONS = {"slime": "## slime's router", "omni": "## SGLang-Omni", "vllm": "## vLLM and SkyRL"}


class _Generation:
    settings = Settings()


@pytest.mark.parametrize("name", SECTIONS)
def test_every_route_is_documented(name: str) -> None:
    routes = dialects.load(name, _Generation()).routes  # type: ignore[arg-type]
    paths = {route.path.removeprefix(ENGINE) for route in routes}
    if name == "slime":
        paths -= {route.path.removeprefix(ENGINE) for route in dialects.load("sglang", _Generation()).routes}  # type: ignore[arg-type]
    text = DOCUMENT.read_text().partition(SECTIONS[name] + "\n")[2]
    text = re.split(r"\n## ", text)[0]
    documented = set(re.findall(r"(/[a-z_/0-9{}]+)", text))
    assert {re.sub(r"\{(\w+):[^}]*\}", r"{\1}", path) for path in paths} <= documented

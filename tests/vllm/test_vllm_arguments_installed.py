"""The real vLLM's arguments are found, and all of those that are found it has."""

from __future__ import annotations

import subprocess

from rlctl_servers.options import OURS
from rlctl_vllm.server.arguments import known_options
from rlctl_vllm.server.update_blockers import KEEPERS

PARSED = """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
actions = make_arg_parser(FlexibleArgumentParser())._actions
print(*(option for action in actions for option in action.option_strings))
"""


def test_they_are_those_that_its_own_parser_takes(vllm: str) -> None:
    known = known_options({"python": vllm})
    assert known is not None
    done = subprocess.run([vllm, "-c", PARSED], capture_output=True, text=True, check=True, timeout=100)
    words = [word for word in done.stdout.splitlines()[-1].split() if word.startswith("--")]
    real = {word.removeprefix("--").replace("-", "_") for word in words} - {"help"}
    assert known.names - set(OURS) <= real
    left_out = {name for name in real - known.names if name.removeprefix("no_") not in known.taken}
    assert not left_out
    assert len(known.names) > 200


def test_settings_that_rule_out_updates_are_arguments_of_the_installed_one(vllm: str) -> None:
    known = known_options({"python": vllm, "enable_eplb": "true", "load_format": "auto"})
    assert known is not None
    assert {keeper.name for keeper in KEEPERS} <= known.names
    assert list(known.frozen) == ["enable_eplb"]

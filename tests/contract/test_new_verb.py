"""A new verb with an answer is proto messages and RPCs, a table row and an engine method; nothing else changes.

The steps are those of CONTRIBUTING.md. The checkout is copied, the steps are done in the copy, and the verb is used
there through the coordinator, the SDK, a stage's unary call and the command line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.contract.comments import ANSWERS
from tests.contract.test_stubs import copy

MESSAGE = """
// Asks a rank to tell its mood.
message TellMoodRequest {
  // Request id, target, timeout, fence.
  RequestHeader header = 1;
  // What to be cheerful about.
  string subject = 2;
}

// A rank's mood.
message Mood {
  // In a word.
  string word = 1;
}
"""
RPC = """\
  // Asks each rank for its mood.
  //
  // Effect: none but the answer.
  // Idempotency: with the same request_id, yes.
  // States: all but FAILED, UNREACHABLE and RETIRED.
  // Partial failure: a target that does not answer is UNKNOWN; nothing else happens.
  // Retry: UNAVAILABLE and DEADLINE_EXCEEDED, with the same request_id.
  // Deadline: 7 s.
  rpc TellMood(TellMoodRequest) returns ({result});
"""
ROW = '    Verb("TellMood", ANY, 7, ordered=True, cli="mood tell", data="mood"),\n'
METHOD = '''
    async def tell_mood(self, request: verbs.TellMoodRequest, call: Call) -> verbs.Mood:
        """Cheerful about everything."""
        await self._begin("tell_mood", call)
        return verbs.Mood(word=f"cheerful about {request.subject}")
'''

SCRIPT = """
import asyncio, sys
from pathlib import Path
from rlctl.sdk import aio
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.stage_pb2_grpc import StageServiceStub
from rlctl.transport.channel import open_channel

async def main(directory):
    checkpoint = directory / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "weights.txt").write_text("one")
    specs = [StageSpec("a", str(checkpoint), tp_size=2)]
    async with InProcessFleet(directory / "journal.db", specs) as fleet:
        async with await aio.connect(fleet.server.address) as client:
            operation = await client.call(v.TellMoodRequest(subject="rain"))
            print([r.mood.word for s in operation.stage_results for r in s.rank_results], flush=True)
        async with open_channel(fleet.stages["a"].address) as channel:
            request = v.TellMoodRequest(subject="snow")
            request.header.fence.fleet_epoch = 1
            result = await StageServiceStub(channel).TellMood(request)
            print([r.mood.word for r in result.rank_results], flush=True)
        command = [sys.executable, "-m", "rlctl", "--endpoint", fleet.server.address, "-o", "json", "mood", "tell"]
        process = await asyncio.create_subprocess_exec(*command, "--subject", "wind")
        print("exit", await process.wait(), flush=True)

asyncio.run(main(Path(sys.argv[1])))
"""


def insert(path: Path, after: str, text: str, *, before: bool = False) -> None:
    content = path.read_text()
    assert content.count(after) >= 1, f"{path} has no {after!r}"
    replacement = text + after if before else after + text
    path.write_text(content.replace(after, replacement, 1))


@pytest.mark.timeout(300)
@pytest.mark.processes
def test_a_proto_a_row_and_a_method_are_all_it_takes(tmp_path: Path) -> None:
    checkout = copy(tmp_path / "checkout")
    protos = checkout / "protos" / "rlctl" / "v1"
    insert(protos / "verbs.proto", "// Reads model information.\n", MESSAGE + "\n", before=True)
    insert(protos / "results.proto", "    Loads loads = 29;\n", "    // Of TellMood.\n    Mood mood = 1000;\n")
    for service, result in (("coordinator", "Operation"), ("stage", "StageResult"), ("worker", "RankResult")):
        path = protos / f"{service}.proto"
        insert(path, f"service {service.capitalize()}Service {{\n", RPC.format(result=result))
    insert(checkout / "rlctl" / "contract" / "verbs.py", "_ROWS = (\n", ROW)
    insert(checkout / "rlctl" / "testing" / "fake_engine.py", "    # Weights.\n", METHOD + "\n", before=True)

    environment = {**os.environ, "PYTHONPATH": f"{checkout}:{checkout / 'engines'}"}
    generated = subprocess.run(
        [checkout / "tools" / "protos"], capture_output=True, text=True, env=environment, check=False
    )
    assert generated.returncode == 0, generated.stderr
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path],
        capture_output=True,
        text=True,
        cwd=checkout,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == str(["cheerful about rain"] * 2)
    assert lines[1] == str(["cheerful about snow"] * 2)
    assert run.stdout.count("cheerful about wind") == 2
    assert lines[-1] == "exit 0"
    page = (checkout / "docs" / "reference" / "verbs.md").read_text()
    section = page.partition("TellMood\n")[2].partition("\n## ")[0]
    assert [question for question in ANSWERS if f"| {question} |" not in section] == []

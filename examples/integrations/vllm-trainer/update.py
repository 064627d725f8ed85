"""vLLM's RLHF example over HTTP, request by request, against a fleet behind rlctl's gateway (--dialect vllm).

What ``examples/rl/rlhf_http_nccl.py`` of vLLM sends (commit 27cb2fe8): completions by OpenAI's client, the size of the
world, the group in a thread, pause, start, one packed update, finish, resume, completions. The gateway's root is the
server, however many engines there are, of whatever size.

    python examples/integrations/vllm-trainer/update.py --model DIR \\
        --url http://127.0.0.1:8000 --coordinator 127.0.0.1:5080
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

import rlctl
from rlctl.compat.vllm import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_trainer import described, free_port, request

PROMPTS = ("12+34=", "7*8=")


def completions(client: OpenAI, model: str) -> list[str]:
    """What the fleet makes of the prompts."""
    answers = [client.completions.create(model=model, prompt=each, max_tokens=32, temperature=0) for each in PROMPTS]
    return [answer.choices[0].text for answer in answers]


def init(url: str, threads: ThreadPoolExecutor) -> Any:
    """The group: the server is told in a thread, since it waits for the trainer."""
    world_size = 1 + request("GET", f"{url}/get_world_size")["world_size"]
    where = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": world_size}
    body = {"init_info": {**where, "rank_offset": 1}}
    told = threads.submit(request, "POST", f"{url}/init_weight_transfer_engine", body)
    group = NCCLWeightTransferEngine.trainer_init(where)
    told.result()
    return group


def update(url: str, threads: ThreadPoolExecutor, group: Any, model: Any) -> None:
    """One update."""
    request("POST", f"{url}/pause")
    request("POST", f"{url}/start_weight_update", {"is_checkpoint_format": True})
    info = described([(name, parameter.data) for name, parameter in model.named_parameters()])
    info = {**info, "dtype_names": info.pop("dtypes"), "packed": True}
    told = threads.submit(request, "POST", f"{url}/update_weights", {"update_info": info})
    NCCLWeightTransferEngine.trainer_send_weights(
        iterator=model.named_parameters(), trainer_args=NCCLTrainerSendWeightsArgs(group=group, packed=True)
    )
    told.result()
    request("POST", f"{url}/finish_weight_update", {})
    request("POST", f"{url}/resume")


def main() -> None:
    """Train for some steps, update after each, and compare every engine's weights with the trainer's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True, help="the gateway")
    parser.add_argument("--coordinator", required=True, help="for the comparison, which the example does not make")
    parser.add_argument("--model", required=True, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    client = OpenAI(base_url=f"{arguments.url}/v1", api_key="EMPTY")
    name = client.models.list().data[0].id
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    with ThreadPoolExecutor(1) as threads, rlctl.connect(arguments.coordinator) as fleet:
        before = completions(client, name)
        group = init(arguments.url, threads)
        for step in range(1, arguments.steps + 1):
            tokens = torch.randint(model.config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(step))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            update(arguments.url, threads, group, model)
            results = fleet.check_weights().stage_results
            held = {rank.check.model_digest for result in results for rank in result.rank_results}
            if held != {rlctl.model_digest(model)}:
                raise SystemExit(f"step {step}: the engines hold {held}, not {rlctl.model_digest(model)}")
            print(
                json.dumps({"step": step, "model_digest": held.pop(), "texts": completions(client, name)}), flush=True
            )
        assert before, "the example shows what was generated before, too"


if __name__ == "__main__":
    main()

"""vLLM's RLHF example over HTTP, request by request, against a fleet behind rlctl's gateway (--dialect vllm).

What ``examples/rl/rlhf_http_nccl.py`` of vLLM sends (commit 27cb2fe8): completions by OpenAI's client, the size of the
world, the group in a thread, pause, start, one packed update, finish, resume, completions. The gateway's root is the
server, however many engines there are, of whatever size.

With ``--stateful`` the updates are those of vLLM's stateful trainer engine (0.28 and later): packed by what was agreed
when the group was formed, and driven by the engine itself.

    python examples/integrations/vllm-trainer/update.py --model DIR \\
        --url http://127.0.0.1:8000 --coordinator 127.0.0.1:5080
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

import rlctl
from rlctl.integrations.vllm_weight_transfer import (
    NCCLTrainerInitInfo,
    NCCLTrainerSendWeightsArgs,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)

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


class Client:
    """What vLLM's ``HTTPVLLMWeightSyncClient`` posts."""

    def __init__(self, url: str) -> None:
        self.url = url

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Form the group."""
        request("POST", f"{self.url}/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Open an update."""
        request("POST", f"{self.url}/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Announce tensors."""
        request("POST", f"{self.url}/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit it."""
        request("POST", f"{self.url}/finish_weight_update", {"weight_version": weight_version})


class Source:
    """What vLLM's ``ModuleSource`` is."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def metadata(self) -> list[Any]:
        """Every parameter."""
        return [
            SimpleNamespace(name=name, dtype=parameter.dtype, shape=parameter.shape)
            for name, parameter in self.model.named_parameters()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.data


def stateful(url: str, model: Any) -> Callable[[], None]:
    """Updates by the stateful engine, between a pause and a resume."""
    world_size = 1 + request("GET", f"{url}/get_world_size")["world_size"]
    info = NCCLTrainerInitInfo("127.0.0.1", free_port(), world_size, packed_buffer_size_bytes=1 << 14, rank=0)
    engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=Client(url), source=Source(model))

    def send() -> None:
        request("POST", f"{url}/pause")
        engine.send_weights()
        request("POST", f"{url}/resume")

    return send


def stateless(url: str, model: Any, threads: ThreadPoolExecutor) -> Callable[[], None]:
    """Updates as the example makes them."""
    group = init(url, threads)
    return lambda: update(url, threads, group, model)


def main() -> None:
    """Train for some steps, update after each, and compare every engine's weights with the trainer's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True, help="the gateway")
    parser.add_argument("--coordinator", required=True, help="for the comparison, which the example does not make")
    parser.add_argument("--model", required=True, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--stateful", action="store_true", help="by vLLM's stateful trainer engine")
    arguments = parser.parse_args()
    client = OpenAI(base_url=f"{arguments.url}/v1", api_key="EMPTY")
    name = client.models.list().data[0].id
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    with ThreadPoolExecutor(1) as threads, rlctl.connect(arguments.coordinator) as fleet:
        before = completions(client, name)
        send = stateful(arguments.url, model) if arguments.stateful else stateless(arguments.url, model, threads)
        for step in range(1, arguments.steps + 1):
            tokens = torch.randint(model.config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(step))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            send()
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

"""SkyRL's weight update and rollout, request by request, against a fleet behind rlctl's gateway (--dialect vllm).

What SkyRL's ``RemoteInferenceClient`` sends (NovaSky-AI/SkyRL): control requests to every server at its own address,
generation to the router. ``--client first`` is that of commit 13284665, whose trainer broadcasts over a torch process
group, one tensor at a time; ``--client present`` is its successor's, with vLLM's own phases (README.md says what its
trainer's sender needs).

    python examples/integrations/skyrl/update.py --model DIR --proxy http://127.0.0.1:8000 --coordinator 127.0.0.1:5080
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import rlctl

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_trainer import Engines, broadcast, buckets, described, free_port, join_as_source, request

FIRST_GROUP, PRESENT_GROUP = "skyrl", "weight_transfer"
Chunk = list[tuple[str, torch.Tensor]]


class First:
    """The client of commit 13284665, and the sender beside it."""

    def init(self, servers: Engines) -> Any:
        """``init_weight_update_communicator``: the same body to every server, which finds out its own offset."""
        told = servers.start(lambda _, url: request("GET", f"{url}/get_server_info", {}))()
        servers.ranks = [body["world_size"] for body in told]
        port = free_port()
        body = {
            "master_addr": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": servers.world_size,
            "group_name": FIRST_GROUP,
            "backend": "gloo",
            "model_dtype_str": "float32",
            "override_existing_receiver": True,
        }
        joining = servers.start(lambda _, url: request("POST", f"{url}/init_weight_transfer", body))
        group = join_as_source(FIRST_GROUP, port, servers.world_size)
        joining()
        return group

    def update(self, servers: Engines, group: Any, model: Any) -> None:
        """``pause``, ``update_named_weights`` for every parameter, ``finalize_weight_update``, ``resume``."""
        servers.post("/pause", {"wait_for_inflight_request": False})
        for name, parameter in model.named_parameters():
            chunk = [(name, parameter.data.contiguous())]
            body = described(chunk)
            told = servers.start(lambda _, url, body=body: request("POST", f"{url}/update_weights", body))  # type: ignore[misc]
            broadcast(group, [tensor for _, tensor in chunk])
            told()
        servers.post("/finalize_weight_update", {})
        servers.post("/resume", {})

    def generate(self, proxy: str, prompt: list[int], session: str) -> list[int]:
        """``_generate_single``: a completion, whose text is tokenised again."""
        body = {"max_tokens": 8, "temperature": 0.0, "model": "actor", "prompt": prompt}
        [choice] = request("POST", f"{proxy}/v1/completions", body, {"X-Session-ID": session})["choices"]
        body = {"model": "actor", "prompt": choice["text"], "add_special_tokens": False}
        tokens: list[int] = request("POST", f"{proxy}/tokenize", body)["tokens"]
        return tokens


class Present:
    """Its successor, with vLLM's phases."""

    def init(self, servers: Engines) -> Any:
        """``init_weight_update_communicator``: each server is told its offset."""
        told = servers.start(lambda _, url: request("GET", f"{url}/get_world_size", {}))()
        servers.ranks = [body["world_size"] for body in told]
        port = free_port()

        def join(index: int, url: str) -> Any:
            info = {
                "master_address": "127.0.0.1",
                "master_port": port,
                "rank_offset": 1 + sum(servers.ranks[:index]),
                "world_size": servers.world_size,
            }
            return request("POST", f"{url}/init_weight_transfer_engine", {"init_info": info})

        joining = servers.start(join)
        group = join_as_source(PRESENT_GROUP, port, servers.world_size)
        joining()
        return group

    def update(self, servers: Engines, group: Any, model: Any) -> None:
        """``pause_generation`` (keep), the phases, ``resume_generation``."""
        servers.post("/pause?mode=keep&clear_cache=false", {})
        servers.post("/start_weight_update", {"is_checkpoint_format": True})
        for chunk in buckets(model):
            described_ = described(chunk)
            info = {**described_, "dtype_names": described_.pop("dtypes"), "packed": False}
            body = {"update_info": info}
            told = servers.start(lambda _, url, body=body: request("POST", f"{url}/update_weights", body))  # type: ignore[misc]
            broadcast(group, [tensor for _, tensor in chunk])
            told()
        servers.post("/finish_weight_update", {})
        servers.post("/resume", {})

    def generate(self, proxy: str, prompt: list[int], session: str) -> list[int]:
        """``_generate_single`` and ``detokenize``."""
        body = {
            "sampling_params": {"max_tokens": 8, "temperature": 0.0, "logprobs": 0},
            "model": "actor",
            "token_ids": prompt,
        }
        [choice] = request("POST", f"{proxy}/inference/v1/generate", body, {"X-Session-ID": session})["choices"]
        tokens: list[int] = choice["token_ids"]
        request("POST", f"{proxy}/detokenize", {"model": "actor", "tokens": tokens})
        request("POST", f"{proxy}/finish_session?session_id={session}", {})
        return tokens


def main() -> None:
    """Train for some steps, update after each, and compare every server's weights with the trainer's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--client", choices=["first", "present"], default="present")
    parser.add_argument("--proxy", required=True, help="the gateway")
    parser.add_argument("--coordinator", required=True, help="for the comparison, which SkyRL does not make")
    parser.add_argument("--model", required=True, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    client = First() if arguments.client == "first" else Present()
    servers = Engines(request("GET", f"{arguments.proxy}/servers")["servers"], [])
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    group = client.init(servers)
    with rlctl.connect(arguments.coordinator) as fleet:
        for step in range(1, arguments.steps + 1):
            tokens = torch.randint(model.config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(step))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            client.update(servers, group, model)
            results = fleet.check_weights().stage_results
            held = {rank.check.model_digest for result in results for rank in result.rank_results}
            if held != {rlctl.model_digest(model)}:
                raise SystemExit(f"step {step}: the servers hold {held}, not {rlctl.model_digest(model)}")
            generated = client.generate(arguments.proxy, [1, 5, 6], f"session-{step}")
            print(json.dumps({"step": step, "model_digest": held.pop(), "tokens": generated}), flush=True)
    servers.post("/shutdown_weight_transfer_engine", {})


if __name__ == "__main__":
    main()

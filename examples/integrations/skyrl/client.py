"""SkyRL's own client, unmodified, against a fleet behind rlctl's gateway (--dialect vllm).

    pip install --no-deps skyrl==0.3.0
    python examples/integrations/skyrl/client.py --model DIR --proxy http://127.0.0.1:8000 --coordinator 127.0.0.1:5080

Every request is one of ``RemoteInferenceClient``'s; the calls are in the order of SkyRL's dispatcher and FSDP worker:
pause, start, one packed broadcast, finish, reset the prefix cache, resume; or, co-located, between two halves of waking
up. What takes the place of vLLM's ``NCCLWeightTransferEngine`` on the trainer's side is
``rlctl.integrations.vllm_weight_transfer``'s, as in the patch beside this script.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typing_extensions
from transformers import AutoModelForCausalLM

import rlctl
from rlctl.integrations.vllm_weight_transfer import NCCLWeightTransferEngine

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_trainer import described, free_port

# skyrl 0.3.0 has pydantic look at typing.TypedDict, which it can from Python 3.12 on only.
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # type: ignore[import-not-found]  # noqa: E402
    RemoteInferenceClient,
)


@dataclass
class InitInfo:
    """What the client asks of SkyRL's ``BroadcastInitInfo``, whose module needs Ray."""

    master_port: int
    world_size: int
    rank_offset: int = 1

    def for_servers(self, world_size_per_server: int, num_servers: int, dp_size: int = 1) -> Sequence[InitInfo]:
        """One for each server."""
        return [
            replace(self, rank_offset=self.rank_offset + index // dp_size * world_size_per_server)
            for index in range(num_servers)
        ]

    def to_api_payload(self) -> dict[str, Any]:
        """The body."""
        return {"master_address": "127.0.0.1", **vars(self)}


async def write(client: RemoteInferenceClient, group: Any, model: Any) -> None:
    """``broadcast_to_inference_engines``."""
    told = described([(name, parameter.data) for name, parameter in model.named_parameters()])
    info = {**told, "dtype_names": told.pop("dtypes"), "packed": True}
    await client.start_weight_update(is_checkpoint_format=True)
    writing = asyncio.create_task(client.update_weights_nccl(info))
    await asyncio.to_thread(
        NCCLWeightTransferEngine.trainer_send_weights,
        iterator=model.named_parameters(),
        trainer_args={"group": group, "packed": True},
    )
    await writing
    await client.finish_weight_update()
    await client.reset_prefix_cache(reset_running_requests=True)


async def update(client: RemoteInferenceClient, group: Any, model: Any, *, colocated: bool) -> None:
    """``save_weights_for_sampler``."""
    if colocated:
        await client.wake_up(tags=["weights"])
        await write(client, group, model)
        await client.wake_up(tags=["kv_cache"])
    else:
        await client.pause_generation()
        try:
            await write(client, group, model)
        finally:
            await client.resume_generation()
    client.increment_weight_version()


async def run(arguments: argparse.Namespace) -> None:
    """Roll out, train, update, and compare every engine's weights with the trainer's, for some steps."""
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    # The client wants all servers of one size: engines of several are one server to it, the gateway.
    client = RemoteInferenceClient(arguments.proxy, [arguments.proxy], 1, model_name="actor")
    world_size, _ = await client.get_world_size()
    info = InitInfo(free_port(), 1 + world_size)
    joining = asyncio.create_task(client.init_weight_update_communicator(info))
    group = await asyncio.to_thread(NCCLWeightTransferEngine.trainer_init, info.to_api_payload())
    await joining
    prompts = {
        "prompt_token_ids": [[1, 5, 6], [1, 7]],
        "sampling_params": {"max_tokens": 60, "temperature": 0.0, "logprobs": 0, "ignore_eos": True},
        "session_ids": ["episode-1", "episode-2"],
        "cache_salt": "0",
    }
    for step in range(1, arguments.steps + 1):
        rollout = asyncio.create_task(client.generate(prompts))
        if arguments.colocated:
            await rollout
            await client.sleep()
        tokens = torch.randint(model.config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        await update(client, group, model, colocated=arguments.colocated)
        output = await rollout
        await asyncio.gather(*map(client.finish_session, prompts["session_ids"]))
        with rlctl.connect(arguments.coordinator) as fleet:
            results = (await asyncio.to_thread(fleet.check_weights)).stage_results
        held = {rank.check.model_digest for result in results for rank in result.rank_results}
        if held != {rlctl.model_digest(model)}:
            raise SystemExit(f"step {step}: the engines hold {held}, not {rlctl.model_digest(model)}")
        told = {"step": step, "model_digest": held.pop(), "stop_reasons": output["stop_reasons"]}
        print(json.dumps({**told, "lengths": list(map(len, output["response_ids"]))}), flush=True)
    await client.teardown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--proxy", required=True, help="the gateway")
    parser.add_argument("--coordinator", required=True, help="for the comparison, which SkyRL does not make")
    parser.add_argument("--model", required=True, help="directory of the checkpoint")
    parser.add_argument("--colocated", action="store_true", help="the engines sleep while the trainer trains")
    parser.add_argument("--steps", type=int, default=2)
    asyncio.run(run(parser.parse_args()))

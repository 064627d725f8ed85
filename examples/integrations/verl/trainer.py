"""verl's own trainer side, patched, against a fleet: its FSDP workers, its checkpoint manager, its client.

    python examples/integrations/verl/trainer.py --model DIR --coordinator 127.0.0.1:5080

README.md has the environment that it needs.

What ``PPOTrainerSeparateAsync`` makes, in its order: actor workers (here two on the CPU, over gloo, with the model
sharded between them), a standalone ``LLMServerManager``, a ``CheckpointEngineManager`` for both, and a client of agent
loops. Between the updates the workers take a training step of verl's on what the client generated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import hydra
import ray
import torch
import verl
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.checkpoint_engine import CheckpointEngineManager
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from verl.workers.rollout.replica import TokenOutput
from verl.workers.utils.padding import left_right_2_no_padding

import rlctl

RANKS = 2
PROMPTS = [[3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]


class Actor(DetachActorWorker):
    """verl's, whose process group is gloo's alone: its own names a device's backend beside the CPU's."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """As verl's, in that group."""
        torch.distributed.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
        super().init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digest(self, like: str) -> str:
        """Return the model digest of the present weights, with the function and key of a digest."""
        return rlctl.model_digest(self.actor.engine.get_per_tensor_param()[0], like=like)


def configuration(arguments: argparse.Namespace) -> DictConfig:
    """verl's, with what its user sets for a fleet, and what makes the actor a small one on a CPU."""
    fleet = {"coordinator": arguments.coordinator, "publisher": {"host": "127.0.0.1"}}
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        # A user's:
        f"{rollout}.name=rlctl",
        f"{rollout}.checkpoint_engine.backend=rlctl",
        f"{rollout}.checkpoint_engine.custom_backend_module=rlctl.integrations.verl.checkpoint_engine",
        f"+{rollout}.checkpoint_engine.engine_kwargs.rlctl={json.dumps(fleet)}".replace('"', ""),
        *(f"{rollout}.{name}=1" for name in ("nnodes", "n_gpus_per_node", "tensor_model_parallel_size")),
        "actor_rollout_ref.hybrid_engine=false",
        # A small CPU's:
        f"actor_rollout_ref.model.path={arguments.model}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=2",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.actor.use_torch_compile=false",
        "data.max_response_length=16",
        "trainer.device=cpu",
    ]
    directory = Path(verl.__file__).parent / "trainer" / "config"
    with hydra.initialize_config_dir(str(directory), version_base=None):
        return hydra.compose("ppo_trainer", overrides)


async def generate(client: FullyAsyncLLMServerClient) -> list[TokenOutput]:
    """What an agent loop asks for, one sample of each prompt."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    calls = [
        client.generate(str(number), prompt_ids=prompt, sampling_params={**sampling, "ignore_eos": True})
        for number, prompt in enumerate(PROMPTS)
    ]
    return list(await asyncio.gather(*calls))


def training_batch(outputs: list[TokenOutput], config: DictConfig) -> TensorDict:
    """As the trainer makes it of samples that are all of one length; every other one is to become more likely."""
    responses = torch.tensor([output.token_ids for output in outputs])
    input_ids = torch.cat([torch.tensor(PROMPTS), responses], dim=1)
    mask = torch.ones_like(responses)
    batch = left_right_2_no_padding(
        tensordict_utils.get_tensordict(
            {
                "prompts": torch.tensor(PROMPTS),
                "responses": responses,
                "input_ids": input_ids,
                "attention_mask": torch.ones_like(input_ids),
                "position_ids": torch.arange(input_ids.shape[1]).expand_as(input_ids).clone(),
                "response_mask": mask,
                "old_log_probs": torch.tensor([output.log_probs for output in outputs]),
                "advantages": mask * torch.tensor([[1.0], [-1.0]]).repeat(len(outputs) // 2, 1),
            }
        )
    )
    size = config.actor_rollout_ref.actor.ppo_mini_batch_size
    tensordict_utils.assign_non_tensor(
        batch, temperature=1.0, calculate_entropy=False, distillation_use_topk=False, distillation_only=False,
        global_batch_size=size, mini_batch_size=size, epochs=1, seed=0, dataloader_kwargs={"shuffle": False},
        compute_loss=True,
    )  # fmt: skip
    return batch


def main() -> None:
    """Update, generate, train; and compare every engine's weights with the actor's after every update."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--model", required=True, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    config = configuration(arguments)
    ray.init("local", num_cpus=64, include_dashboard=False, _node_ip_address="127.0.0.1")
    actor = RayWorkerGroup(
        resource_pool=RayResourcePool([RANKS], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(Actor), config=config.actor_rollout_ref, role="actor"),
        use_gpu=False,
        device_name="cpu",
    )
    actor.init_model()
    servers = LLMServerManager.create(config=config)
    manager = CheckpointEngineManager(
        config=omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine),
        actor_wg=actor,
        replicas=servers.get_replicas(),
    )
    client = servers.get_client(client_cls=FullyAsyncLLMServerClient)
    with rlctl.connect(arguments.coordinator) as fleet:
        for step in range(arguments.steps):
            metrics = manager.update_weights(global_steps=step)
            checked = fleet.check_weights().stage_results
            held = {rank.check.model_digest for stage in checked for rank in stage.rank_results}
            sent = set(actor.digest(min(held, default="")))
            if held != sent:
                raise SystemExit(f"step {step}: the engines hold {held}, not {sent}")
            outputs = asyncio.run(generate(client))
            told = {
                "step": step,
                "model_digest": held.pop(),
                "metrics": sorted(metrics),
                "tokens": [len(output.token_ids) for output in outputs],
                "steps": [output.extra_fields["min_global_steps"] for output in outputs],
            }
            print(json.dumps(told), flush=True)
            actor.update_actor(training_batch(outputs, config))
    ray.shutdown()


if __name__ == "__main__":
    main()

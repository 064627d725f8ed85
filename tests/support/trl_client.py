"""TRL's VLLMClient, unmodified: ``trl_client.py URL PORT [CHECKPOINT]``. One line of JSON for each of its calls.

The client generates without a checkpoint, and updates with a checkpoint, over a group at this TCP port. TRL imports
vLLM for updates only; rlctl's names of vLLM's trainer replace vLLM's, over gloo.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from trl.generation import vllm_client  # type: ignore[import-not-found]

from rlctl.demo.tiny import encode

CHAT = [{"role": "user", "content": "1+2"}]


def add(a: int) -> int:
    """Adds.

    Args:
        a: A number.
    """
    return a


def say(call: str, told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"call": call, **told}) + "\n")
    sys.stdout.flush()


def generate(client: Any) -> None:
    """Run the cases of TRL's own tests of generation."""
    prompt = encode("1+2=")
    say("generate", client.generate([prompt, prompt], n=2, max_tokens=4, generation_kwargs={"ignore_eos": True}))
    say("chat", client.chat([CHAT], n=2, max_tokens=4, tools=[add]))
    say("sequence", client.get_sequence_logprobs([prompt], [2], top_logprobs=3, temperature=1.0))
    say("world", {"size": client.get_world_size(), "info": client.get_server_info()})
    client.reset_prefix_cache()
    say("texts", client.generate(["1+2=", "3+4="]))
    say("texts without logprobs", client.generate(["1+2="], logprobs=None))
    say("chat without logprobs", client.chat([CHAT], logprobs=None))
    settings = {"n": 2, "repetition_penalty": 0.9, "temperature": 0.8, "max_tokens": 32}
    say("texts with settings", client.generate(["1+2=", "3+4="], **settings))
    settings = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.05, "max_tokens": 8}
    say("several logprobs", client.generate(["1+2=", "3+4="], logprobs=5, generation_kwargs={"seed": 1234}, **settings))


def update(client: Any, checkpoint: str, *, stateful: bool) -> None:
    """Update whole models, single tensors in one update, and with an error half-way."""
    from torch import no_grad
    from transformers import AutoModelForCausalLM

    import rlctl
    from rlctl.integrations import vllm_weight_transfer

    vllm_client.get_ip = lambda: "127.0.0.1"
    vllm_client._HAS_STATEFUL_TRAINER_ENGINE = stateful
    vllm_client.open_trainer_endpoint = vllm_weight_transfer.trainer_init
    for name in ("packed_nccl_broadcast_producer", "NCCLWeightTransferEngine", "NCCLTrainerSendWeightsArgs"):
        setattr(vllm_client, name, getattr(vllm_weight_transfer, name))
    model = AutoModelForCausalLM.from_pretrained(checkpoint)

    def step(factor: float) -> None:
        with no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)

    client.init_communicator(device="cuda")  # the current device: no device is asked for
    step(0.9)
    client.update_model_params(model)
    say("model", {"digest": rlctl.model_digest(model)})
    step(0.9)
    with client.weight_update():
        for name, parameter in model.named_parameters():
            client.update_named_param(name, parameter.data)
    say("tensors", {"digest": rlctl.model_digest(model)})
    step(0.9)
    try:
        with client.weight_update():
            for number, (name, parameter) in enumerate(model.named_parameters()):
                if number == 2:
                    raise RuntimeError("the trainer fails")
                client.update_named_param(name, parameter.data)
    except Exception as error:  # noqa: BLE001 - its client raises no other class
        say("half", {"error": str(error)})
    client.update_model_params(model)
    say("after it", {"digest": rlctl.model_digest(model)})
    client.communicator.group = SimpleNamespace(store=None, socket=None)  # the closed communicator is vLLM's
    client.close_communicator()


def main() -> None:
    vllm_client.is_vllm_available = lambda *_, **__: True
    client = vllm_client.VLLMClient(base_url=sys.argv[1], group_port=int(sys.argv[2]), connection_timeout=10.0)
    if len(sys.argv) == 3:
        generate(client)
    else:
        update(client, sys.argv[3], stateful="--stateful" in sys.argv)


if __name__ == "__main__":
    main()

"""The README's trainer: rollouts through the fleet, a step, the new weights to every rank.

python examples/make_tiny_model.py /tmp/tiny
rlctl up --hf-checkpoint /tmp/tiny --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 --device cpu --detach
python examples/trainer.py
"""

from transformers import AutoModelForCausalLM

import rlctl

model = AutoModelForCausalLM.from_pretrained("/tmp/tiny")
with rlctl.connect("127.0.0.1:5080") as fleet, fleet.publisher("actor") as publisher:
    # The publisher keeps its process groups from update to update.
    for step in range(1, 4):
        samples = fleet.generate_batch(["1+2=", "3+4="], n=4, max_new_tokens=8, return_logprob=True)
        for parameter in model.parameters():  # your gradient step
            parameter.data.mul_(0.999)
        result = publisher.update(model, version=f"step-{step}", pause="retract")
        print(result.version.label, f"paused {result.pause_s * 1e3:.0f} ms", result.model_digest[:12])
    digests = {rank.check.model_digest for stage in fleet.check_weights().stage_results for rank in stage.rank_results}
    assert digests == {result.model_digest}
    assert rlctl.has_digest(model, result.model_digest)

"""A real SGLang-Diffusion server on a CPU, and a checkpoint of its smallest kind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import rlctl_sglang
import torch
from safetensors.torch import load_file, save_file

START_S = 240.0

MAKE = """
import json, sys, torch
from pathlib import Path
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

place = Path(sys.argv[1])
torch.manual_seed(1)
transformer = FluxTransformer2DModel(
    patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
    joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8))
vae = AutoencoderKL(
    block_out_channels=(4,), in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",),
    up_block_types=("UpDecoderBlock2D",), latent_channels=4, norm_num_groups=1, use_quant_conv=False,
    use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5, sample_size=32)
clip = CLIPTextModel(CLIPTextConfig(
    hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, vocab_size=128,
    projection_dim=32, bos_token_id=0, eos_token_id=2, pad_token_id=1))
t5 = T5EncoderModel(T5Config(vocab_size=128, d_model=32, d_ff=37, d_kv=8, num_heads=4, num_layers=2))
modules = {"transformer": transformer, "vae": vae, "text_encoder": clip, "text_encoder_2": t5}
for name, module in modules.items():
    module.to(torch.bfloat16).save_pretrained(place / name)
FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).save_pretrained(place / "scheduler")
words = {word: number for number, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz "])}
tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
for name in ("tokenizer", "tokenizer_2"):
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        model_max_length=77).save_pretrained(place / name)
kinds = {
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"], "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"], "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    "tokenizer_2": ["transformers", "PreTrainedTokenizerFast"], "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"]}
index = {"_class_name": "FluxPipeline", "_diffusers_version": "0.37.0", **kinds}
(place / "model_index.json").write_text(json.dumps(index))
"""
"""Makes a Flux of 100 000 parameters, in bfloat16, with SGLang's Python."""


def packages() -> Path:
    """Where the packages are that it needs beside SGLang's; skips without them."""
    place = Path(os.environ.get("RLCTL_SGLANG_DIFFUSION") or Path(sys.prefix).parent / ".venv-sglang-diffusion")
    if not (place / "diffusers").is_dir():
        pytest.skip("SGLang-Diffusion is not installed: run `tools/engines install sglang-diffusion`")
    return place


def environment() -> dict[str, str]:
    """What SGLang-Diffusion needs around it on a CPU."""
    path = [str(Path(rlctl_sglang.__file__).parent / "cpu"), str(packages())]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONWARNINGS": "ignore",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def make(python: str, place: Path) -> None:
    """Make a checkpoint."""
    subprocess.run([python, "-c", MAKE, str(place)], env=environment(), check=True, timeout=START_S)


def weights_of(checkpoint: Path, module: str) -> Path:
    """The one file of a module."""
    (file,) = (checkpoint / module).glob("*.safetensors")
    return file


def derived(first: Path, place: Path, modules: Sequence[str]) -> Path:
    """A checkpoint that differs from another in these modules."""
    shutil.copytree(first, place)
    for module in modules:
        file = weights_of(place, module)
        tensors = {name: tensor + torch.ones_like(tensor) / 64 for name, tensor in load_file(file).items()}
        save_file(tensors, file)
    return place


class DiffusionServer:
    """One server: a front, and a process that does the work."""

    def __init__(self, python: str, checkpoint: Path, place: Path, arguments: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = place / "server.log"
        self._place = place
        command = [python, "-m", "sglang.multimodal_gen.runtime.entrypoints.cli.main", "serve"]
        command += ["--model-path", str(checkpoint), "--host", "127.0.0.1", "--port", str(port)]
        self._command = [*command, "--warmup-mode", "off", "--sleep-on-idle", *arguments]
        self.start()

    def start(self) -> None:
        """Start it, after :meth:`stop` again, at the same address."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=environment(), cwd=self._place, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Until it serves."""
        deadline = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, self.log.read_text()[-2000:]
            with contextlib.suppress(OSError):
                self.ask("/health")
                return
            time.sleep(0.5)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> Any:
        """What it answers itself; what it refuses, too."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if path == "/health":
                raise
            return json.load(error)

    def kill_scheduler(self) -> None:
        """Kill the process that does the work, and leave the front."""
        listed = subprocess.run(
            ["ps", "-o", "pid=,args=", "-g", str(self._process.pid)], capture_output=True, text=True, check=True
        )
        (pid,) = (line.split()[0] for line in listed.stdout.splitlines() if "sgl_diffusion::scheduler" in line)
        os.kill(int(pid), signal.SIGKILL)

    def stop(self) -> None:
        """End it, and whatever it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)


@contextmanager
def serving(python: str, checkpoint: Path, place: Path, *arguments: str) -> Iterator[DiffusionServer]:
    """A server while it is needed."""
    server = DiffusionServer(python, checkpoint, place, arguments)
    try:
        server.wait()
        yield server
    finally:
        server.stop()

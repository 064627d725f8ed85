"""A fleet of real processes over mTLS: each has its own certificate, and the command line finds one for its user."""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from openai import DefaultHttpxClient, OpenAI
from up_helpers import known, own_state, rlctl_command

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls

pytestmark = pytest.mark.processes


def test_up_gives_every_process_a_certificate_and_refuses_plain_text(
    checkpoint: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "tls"
    with own_state(monkeypatch, tmp_path):
        assert rlctl_command("certs", "init", str(directory), "--fleet", "lab").returncode == 0
        up = rlctl_command(
            "up", "-d", "--name", "lab", "--tls", str(directory), "--hf-checkpoint", checkpoint("one"),
            "--engine", "fake", "--rollout-num-gpus", "1",
            "--listen", "127.0.0.1:0", "--gateways", "127.0.0.1",
        )  # fmt: skip
        assert up.returncode == 0, up.stderr
        names = ("coordinator", "stage/actor-0", "gateway/actor", "client/supervisor")
        assert all((directory / f"{name}.crt").exists() for name in names)

        status = rlctl_command("status", "-o", "json")
        assert status.returncode == 0, status.stderr
        assert [stage["routable"] for stage in json.loads(status.stdout)["stages"]] == [True]
        generated = rlctl_command("generate", "hello")
        assert generated.returncode == 0, generated.stderr

        state = known("lab")
        with pytest.raises(RlctlError) as caught:
            rlctl.connect(state.endpoint, tls=False)
        assert caught.value.reason is Reason.TLS_FAILED
        authority = Authority(directory)
        with rlctl.connect(state.endpoint, tls=Tls(authority.ensured("client/alice"))) as fleet:
            assert [stage.registration.slot for stage in fleet.status().stages] == ["actor-0"]
        stage = Tls(authority.ensured("stage/actor-0"))
        with rlctl.connect(state.endpoint, tls=stage) as fleet, pytest.raises(RlctlError) as caught:
            fleet.status()
        assert caught.value.reason is Reason.PEER_NOT_ALLOWED

        url = state.gateways["actor"]
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(authority.certificate))
        with urllib.request.urlopen(f"{url}/health", context=context, timeout=20) as answer:
            assert answer.status == 200
        own = authority.ensured("client/alice")
        context.load_cert_chain(own.cert, own.key)
        with DefaultHttpxClient(verify=context) as http:
            client = OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0)
            assert [model.id for model in client.models.list()] == ["actor"]
        assert rlctl_command("down", "--name", "lab", "-y").returncode == 0

"""The commands in the chart start together: coordinator, stage server and gateway as processes of this machine."""

from __future__ import annotations

import contextlib
import json
import secrets
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from kubelet import Kubelet
from kubernetes_chart import rendered

from rlctl.transport.tls.authority import Authority

pytestmark = pytest.mark.processes


def fetch(url: str, tls: ssl.SSLContext | None = None, token: str = "", body: Any = None) -> tuple[int, bytes]:
    """Status and body of an answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30, context=tls) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def url(scheme: str, address: str, path: str) -> str:
    """The URL of a bound address on this machine."""
    port = address.removesuffix("/").rpartition(":")[2]
    return f"{scheme}://127.0.0.1:{port}{path}"


def certificate(authority: Authority, identity: str) -> dict[str, bytes]:
    """The content of a secret with a certificate."""
    files = authority.issue(identity, hosts=["127.0.0.1"])
    contents = {"tls.crt": files.cert, "tls.key": files.key, "ca.crt": authority.certificate}
    return {key: Path(path).read_bytes() for key, path in contents.items()}


def access_token(path: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "rlctl", "tokens", "new", *arguments, "--file", str(path), "-o", "name"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def status(environment: dict[str, str]) -> Any:
    """What `kubectl exec ... -- rlctl status` prints in the coordinator's container."""
    command = [sys.executable, "-m", "rlctl", "status", "-o", "json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_fleet_with_tls_access_file_metrics_and_page_generates(tmp_path: Path, tiny: tuple[Any, Path]) -> None:
    case = rendered("everything")
    coordinator = case.workloads["rlctl-coordinator"]
    authority = Authority.init(tmp_path / "ca", "lab")
    own = certificate(authority, "stage/rlctl-draft-0")
    trainer = access_token(tmp_path / "access.json", "trainer", "--scope", "rollout")
    fleet = secrets.token_hex(32)
    contents = {
        "lab-token": {"fleet": fleet.encode()},
        "lab-access": {"tokens.json": (tmp_path / "access.json").read_bytes()},
        "lab-coordinator": certificate(authority, "coordinator"),
        "rlctl-gateway-openai-tls": certificate(authority, "gateway/openai"),
        "rlctl-draft-tls": {
            "rlctl-draft-0.crt": own["tls.crt"], "rlctl-draft-0.key": own["tls.key"], "ca.crt": own["ca.crt"],
        },
    }  # fmt: skip
    models = tmp_path / "models"
    models.mkdir()
    for name in ("actor", "draft"):
        (models / name).symlink_to(tiny[1])
    kubelet = Kubelet(tmp_path, contents, {"models": models, "checkpoint": models})
    tls = ssl.create_default_context(cafile=str(authority.certificate))
    with contextlib.ExitStack() as running:
        announced, _ = running.enter_context(kubelet.run(coordinator, "rlctl-coordinator-0"))
        kubelet.reach(coordinator, "rlctl-coordinator", announced)
        draft, _ = running.enter_context(kubelet.run(case.workloads["rlctl-draft"], "rlctl-draft-0"))
        gateway, _ = running.enter_context(
            kubelet.run(case.workloads["rlctl-gateway-openai"], "rlctl-gateway-openai-0")
        )

        page = url("https", announced["web_address"], "/api/state")
        assert fetch(page, tls)[0] == 401
        assert b"rlctl-draft-0" in fetch(page, tls, fleet)[1]
        for process in (announced, draft, gateway):
            assert b"rlctl_" in fetch(url("http", process["metrics_address"], "/metrics"))[1]

        completions = url("https", gateway["address"], "/v1/completions")
        body = {"model": "draft", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
        assert fetch(completions, tls, "", body)[0] == 401
        code, answer = fetch(completions, tls, trainer, body)
        assert code == 200, answer
        assert json.loads(answer)["usage"]["completion_tokens"] >= 1


@pytest.mark.long
def test_the_default_values_start_and_the_pod_of_the_coordinator_has_the_command_line(tmp_path: Path) -> None:
    case = rendered("defaults")
    coordinator = case.workloads["rlctl-coordinator"]
    fleet = secrets.token_hex(32)
    kubelet = Kubelet(tmp_path, {"rlctl": {"token": fleet.encode()}}, {})
    with contextlib.ExitStack() as running:
        announced, environment = running.enter_context(kubelet.run(coordinator, "rlctl-coordinator-0"))
        kubelet.reach(coordinator, "rlctl-coordinator", announced)
        gateway, _ = running.enter_context(
            kubelet.run(case.workloads["rlctl-gateway-sglang"], "rlctl-gateway-sglang-0")
        )
        assert fetch(url("http", gateway["address"], "/health"))[0] == 503, "there is no stage"
        assert fetch(url("http", gateway["address"], "/v1/models"))[0] == 401
        assert fetch(url("http", gateway["address"], "/v1/models"), token=fleet)[0] == 200
        assert status(kubelet.here(environment))["stages"] == []


@pytest.mark.long
def test_certificates_and_an_access_file_suffice_without_a_token(tmp_path: Path) -> None:
    case = rendered("cert-manager")
    coordinator = case.workloads["rlctl-coordinator"]
    authority = Authority.init(tmp_path / "ca", "lab")
    reader = access_token(tmp_path / "access.json", "reader", "--scope", "viewer")
    contents = {
        "rlctl-access": {"access.json": (tmp_path / "access.json").read_bytes()},
        "rlctl-coordinator-tls": certificate(authority, "coordinator"),
        "rlctl-gateway-openai-tls": certificate(authority, "gateway/openai"),
    }
    kubelet = Kubelet(tmp_path, contents, {})
    tls = ssl.create_default_context(cafile=str(authority.certificate))
    with contextlib.ExitStack() as running:
        announced, environment = running.enter_context(kubelet.run(coordinator, "rlctl-coordinator-0"))
        kubelet.reach(coordinator, "rlctl-coordinator", announced)
        gateway, _ = running.enter_context(
            kubelet.run(case.workloads["rlctl-gateway-openai"], "rlctl-gateway-openai-0")
        )
        models = url("https", gateway["address"], "/v1/models")
        assert fetch(models, tls)[0] == 401
        assert fetch(models, tls, reader)[0] == 200
        assert status(kubelet.here(environment))["stages"] == [], "the command line has the coordinator's certificate"

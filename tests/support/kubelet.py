"""Runs a rendered container as a process of this machine: its command and variables, with volumes as directories."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kubernetes_chart import Object, argv, option, variables

START_S = 60.0
END_S = 30.0
PACKAGES = [path for path in sys.path if path]


class Kubelet:
    """Starts the rlctl containers of pods.

    Args:
        directory: for volumes and logs.
        secrets: content by secret and key.
        volumes: directories of volumes that are neither secrets nor empty, by volume.

    Attributes:
        addresses: the address of this machine for each ``service:port``.
    """

    def __init__(
        self, directory: Path, secrets: Mapping[str, Mapping[str, bytes]], volumes: Mapping[str, Path]
    ) -> None:
        self.directory = directory
        self.secrets = secrets
        self.volumes = volumes
        self.addresses: dict[str, str] = {}

    @contextlib.contextmanager
    def run(self, spec: Object, name: str) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
        """Run the container of pod ``name``. Yields its announcement and its environment; it ends with the block."""
        (container,) = spec["template"]["spec"]["containers"]
        places = self._mount(spec, container, name)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(PACKAGES), "OMP_NUM_THREADS": "1"}
        for variable, value in variables(container).items():
            reference = {"metadata.name": name, "status.podIP": "127.0.0.1"}
            text = reference[value["fieldRef"]["fieldPath"]] if isinstance(value, dict) else value
            environment[variable] = self._here(_expanded(text, environment), places)
        program, *arguments = argv(container)
        assert program == "rlctl"
        command = [self._here(_expanded(argument, environment), places) for argument in arguments]
        log = self.directory / f"{name}.log"
        with (
            log.open("w") as stderr,
            subprocess.Popen(
                [sys.executable, "-m", "rlctl", *command],
                stdout=subprocess.PIPE, stderr=stderr, env=environment, cwd=self.directory, text=True,
            ) as process,
        ):  # fmt: skip
            try:
                yield self._announced(process, log), environment
                process.terminate()
                assert process.wait(END_S) == 0, log.read_text()
            finally:
                process.kill()

    def reach(self, spec: Object, service: str, announced: Mapping[str, str]) -> None:
        """Let later processes reach a started coordinator, by its name in the cluster and within its pod."""
        (container,) = spec["template"]["spec"]["containers"]
        port = option(container, "listen").rpartition(":")[2]
        here = f"127.0.0.1:{announced['address'].rpartition(':')[2]}"
        self.addresses |= {f"{service}:{port}": here, f"127.0.0.1:{port}": here}

    def here(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment of a further process in a pod, as ``kubectl exec`` starts one."""
        return {name: self._here(value, {}) for name, value in environment.items()}

    def _mount(self, spec: Object, container: Object, name: str) -> dict[str, Path]:
        """The directory of each mount."""
        volumes = {volume["name"]: volume for volume in spec["template"]["spec"]["volumes"]}
        places = {}
        for mount in container["volumeMounts"]:
            volume = volumes.get(mount["name"], {})
            place = self.volumes.get(mount["name"], self.directory / name / mount["name"])
            place.mkdir(parents=True, exist_ok=True)
            if secret := volume.get("secret"):
                content = self.secrets[secret["secretName"]]
                items = secret.get("items", [{"key": key, "path": key} for key in content])
                for item in items:
                    (place / item["path"]).write_bytes(content[item["key"]])
            places[mount["mountPath"]] = place
        return places

    def _here(self, text: str, places: Mapping[str, Path]) -> str:
        """Replace the paths of mounts, the addresses of services, and fixed TCP ports: other tests may have them."""
        for path, place in places.items():
            text = re.sub(rf"(^|[=:]){re.escape(path)}(?=[/:]|$)", lambda match, to=place: f"{match[1]}{to}", text)
        for address, here in self.addresses.items():
            text = re.sub(rf"(^|=){re.escape(address)}$", lambda match, to=here: f"{match[1]}{to}", text)
        return re.sub(r"=0\.0\.0\.0:\d+$", "=0.0.0.0:0", text)

    def _announced(self, process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
        assert process.stdout is not None
        deadline = time.monotonic() + START_S
        while not select.select([process.stdout], [], [], 0.2)[0]:
            assert time.monotonic() < deadline, log.read_text()
        line = process.stdout.readline()
        assert line, log.read_text()
        announced: dict[str, Any] = json.loads(line)
        return announced


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], text)

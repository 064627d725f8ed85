"""Checks of this host for a coordinator, an engine, a trainer or a client."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rlctl.cli.app.local_fleets import DEFAULT_ENDPOINT
from rlctl.cli.doctor.findings import Finding, failure, ok, size, warning
from rlctl.launch.local.gpus import gpu_count
from rlctl.launch.supervisor import fleet_state
from rlctl.runtime.addresses import split
from rlctl.version import CONTRACT_VERSION, __version__

LIBRARIES = ("grpcio", "protobuf", "torch", "sglang", "vllm", "ray")

SHARED_MEMORY = "/dev/shm"
ENOUGH_SHARED = 1 << 30
CONTAINER_SHARED = 64 << 20
LEAST_SHARED = 16 << 20
"""With less, no segment fits, and engines with several ranks fail to start."""

ENOUGH_FILES = 4096
LEAST_FILES = 1024
ENOUGH_PROCESSES = 4096
LEAST_LOCKED = 64 << 20

ENOUGH_DISK = 1 << 30
LEAST_DISK = 64 << 20

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOCAL = ("127.0.0.1", "localhost")

GPU_PROBE_S = 60.0
_GPU_PROBE = """
import torch
count = torch.cuda.device_count()
print(torch.version.cuda, count)
for a in range(count):
    for b in range(count):
        if a != b and not torch.cuda.can_device_access_peer(a, b):
            print(a, b)
"""


@dataclass(frozen=True)
class Plugin:
    """A plug-in for engines. ``version``: version of the package."""

    name: str
    module: str
    version: str
    installed: bool


@dataclass(frozen=True)
class Gpus:
    """GPUs of this host.

    Attributes:
        files: number of device files.
        usable: number of GPUs that PyTorch sees.
        apart: pairs of GPUs: the first cannot access the memory of the second.
        error: reason why PyTorch sees no GPU, or "".
    """

    files: int
    usable: int = 0
    apart: Sequence[tuple[int, int]] = ()
    error: str = ""


@dataclass(frozen=True)
class Space:
    """Bytes of a file system, and whether a file can be made there."""

    total: int
    free: int
    writable: bool = True


@dataclass(frozen=True)
class HostReadings:
    """The readings for the checks of this host.

    Attributes:
        versions: versions of installed libraries, by name.
        shared_memory: space of /dev/shm; None: no such directory.
        limits: soft limits by the letter of ``ulimit``; -1: unlimited.
        listens: whether a process listens at the coordinator's default address.
        fleets: endpoints of fleets that are up on this host.
        state: name and space of the directory of journals and logs.
        rdma: the host has RDMA devices.
    """

    versions: Mapping[str, str]
    plugins: Sequence[Plugin]
    shared_memory: Space | None
    limits: Mapping[str, int]
    environment: Mapping[str, str]
    listens: bool
    fleets: Sequence[str]
    state: tuple[str, Space]
    rdma: bool
    gpus: Gpus


def read_host() -> HostReadings:
    state = fleet_state.state_directory("")
    return HostReadings(
        versions={name: version for name in LIBRARIES if (version := _version(name))},
        plugins=[_plugin(point) for point in sorted(metadata.entry_points(group="rlctl.engines"))],
        shared_memory=_space(Path(SHARED_MEMORY)) if Path(SHARED_MEMORY).is_dir() else None,
        limits={
            letter: resource.getrlimit(number)[0]
            for letter, number in (
                ("n", resource.RLIMIT_NOFILE),
                ("u", resource.RLIMIT_NPROC),
                ("l", resource.RLIMIT_MEMLOCK),
            )
        },
        environment=dict(os.environ),
        listens=_listens(DEFAULT_ENDPOINT),
        fleets=[fleet.endpoint for fleet in fleet_state.up()],
        state=(str(state), _space(state)),
        rdma=Path("/dev/infiniband").is_dir(),
        gpus=_gpus(),
    )


def check_versions(host: HostReadings) -> Iterator[Finding]:
    """Report the versions of rlctl and of the libraries below it."""
    libraries = ", ".join(f"{name} {version}" for name, version in host.versions.items())
    yield ok(
        "versions",
        "this host",
        f"rlctl {__version__}, contract {CONTRACT_VERSION}, Python {platform.python_version()}, {libraries}",
    )


def check_plugins(host: HostReadings) -> Iterator[Finding]:
    """Check that engine plug-ins are installed in rlctl's version."""
    for plugin in host.plugins:
        subject = f"plug-in {plugin.name}"
        if not plugin.installed:
            yield failure(
                "plug-ins",
                subject,
                f"its module {plugin.module} is not installed",
                "Install rlctl and the plug-in again into this environment, from one release.",
            )
        elif plugin.version != __version__:
            yield warning(
                "plug-ins",
                subject,
                f"version {plugin.version}, rlctl is {__version__}",
                f"Install the plug-in of rlctl {__version__}.",
            )
    usable = [plugin.name for plugin in host.plugins if plugin.installed and plugin.version == __version__]
    if usable:
        yield ok("plug-ins", "engine plug-ins", ", ".join(usable))
    if not host.plugins:
        mend = "Install rlctl again: pip install 'rlctl[torch]'."
        yield failure("plug-ins", "engine plug-ins", "none is installed", mend)


def check_shared_memory(host: HostReadings) -> Iterator[Finding]:
    """Check /dev/shm, the path of tensors between processes of this host."""
    check, space = "shared-memory", host.shared_memory
    mend = (
        "docker: --shm-size=8g; Kubernetes: an emptyDir of medium Memory at /dev/shm; "
        "else `mount -o remount,size=8G /dev/shm`. Without it, send with path='broadcast'."
    )
    if space is None:
        yield failure(check, SHARED_MEMORY, "there is none", mend)
        return
    observation = f"{size(space.free)} of {size(space.total)} free"
    if not space.writable:
        yield failure(check, SHARED_MEMORY, "it cannot be written to", "Make it writable for this user (mode 1777).")
    elif space.free < LEAST_SHARED:
        yield failure(check, SHARED_MEMORY, f"it is full: {observation}", f"Remove files that no process uses. {mend}")
    elif space.total <= CONTAINER_SHARED:
        yield warning(check, SHARED_MEMORY, f"{observation}, as containers have it by default", mend)
    elif space.free < ENOUGH_SHARED:
        yield warning(check, SHARED_MEMORY, f"{observation}; large tensors need more", mend)
    else:
        yield ok(check, SHARED_MEMORY, observation)


def check_limits(host: HostReadings) -> Iterator[Finding]:
    """Check the limits of this process, inherited from the shell."""
    files, processes, locked = (host.limits.get(letter, -1) for letter in "nul")
    mend = "In this shell: ulimit -n 65536; systemd: LimitNOFILE=65536; docker: --ulimit nofile=65536."
    if 0 <= files < LEAST_FILES:
        yield failure("limits", "ulimit -n", f"{files} open files", mend)
    elif 0 <= files < ENOUGH_FILES:
        yield warning("limits", "ulimit -n", f"{files} open files; a gateway needs one for each request", mend)
    else:
        yield ok("limits", "ulimit -n", _limit(files))
    if 0 <= processes < ENOUGH_PROCESSES:
        yield warning(
            "limits",
            "ulimit -u",
            f"{processes} processes and threads; an engine starts hundreds",
            "In this shell: ulimit -u 65536; systemd: LimitNPROC=65536, TasksMax=infinity; docker: --pids-limit=-1.",
        )
    else:
        yield ok("limits", "ulimit -u", _limit(processes))
    if host.rdma and 0 <= locked < LEAST_LOCKED:
        yield warning(
            "limits",
            "ulimit -l",
            f"{size(locked)} of locked memory, and this host has RDMA devices",
            "In this shell: ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1.",
        )


def check_proxies(host: HostReadings) -> Iterator[Finding]:
    """Check web proxies: HTTP clients would miss gateways and servers on this host. rlctl's gRPC ignores proxies."""
    environment = {name.lower(): value for name, value in host.environment.items() if value}
    proxies = [name for name in PROXIES if name in environment]
    if not proxies:
        yield ok("proxies", "proxy variables", "none is set")
        return
    excepted = {name.strip() for name in environment.get("no_proxy", "").split(",")}
    proxied = [name for name in LOCAL if not excepted & {name, "*"}]
    names = ", ".join(proxies)
    if proxied:
        observation = (
            f"set, and no_proxy does not name {', '.join(proxied)}: HTTP clients ask the proxy for servers of this host"
        )
        exceptions = ",".join((*LOCAL, *sorted(excepted - {"", *LOCAL})))
        mend = f"export no_proxy={exceptions} NO_PROXY={exceptions}, with the hosts of the fleet."
        yield warning("proxies", names, observation, mend)
    else:
        yield ok("proxies", names, f"set; no_proxy names {', '.join(LOCAL)}")


def check_port(host: HostReadings) -> Iterator[Finding]:
    """Check the default address of a coordinator."""
    if not host.listens:
        yield ok("port", DEFAULT_ENDPOINT, "free")
    elif DEFAULT_ENDPOINT in host.fleets:
        yield ok("port", DEFAULT_ENDPOINT, "a fleet of this host is up there")
    else:
        yield warning(
            "port",
            DEFAULT_ENDPOINT,
            "a process that `rlctl up` did not start listens there",
            "If it is no coordinator: `fleet.listen` in the topology, or `rlctl coordinator --listen`, takes another.",
        )


def check_state(host: HostReadings) -> Iterator[Finding]:
    """Check the directory of journals and logs."""
    name, space = host.state
    observation = f"{size(space.free)} free"
    if not space.writable:
        yield failure("state", name, "it cannot be written to", "Make it writable, or set XDG_STATE_HOME.")
    elif space.free < LEAST_DISK:
        yield failure("state", name, f"{observation}: the journal takes no more operations", "Free space on this disk.")
    elif space.free < ENOUGH_DISK:
        yield warning("state", name, f"{observation} for journals and logs", "Free space on this disk.")
    else:
        yield ok("state", name, observation)


def check_gpus(host: HostReadings) -> Iterator[Finding]:
    """Check that PyTorch can use every GPU, and that each GPU can access the memory of the rest."""
    gpus = host.gpus
    if not gpus.files:
        yield ok("gpus", "GPUs", "none: engines compute on the CPU")
        return
    if gpus.error or gpus.usable < gpus.files:
        yield failure(
            "gpus",
            "GPUs",
            f"{gpus.files} on this host, PyTorch can use {gpus.usable}{f': {gpus.error}' * bool(gpus.error)}",
            "See `nvidia-smi`, CUDA_VISIBLE_DEVICES, and that PyTorch is a CUDA build which the driver supports.",
        )
    elif gpus.apart:
        pairs = ", ".join(f"{a}→{b}" for a, b in gpus.apart[:8]) + ", …" * (len(gpus.apart) > 8)
        yield warning(
            "gpus",
            "peer access",
            f"{len(gpus.apart)} of {gpus.usable * (gpus.usable - 1)} pairs have none: {pairs}",
            "Put trainer and engine on GPUs that have it (`nvidia-smi topo -p2p r`), or send with path='broadcast'.",
        )
    else:
        yield ok("gpus", "GPUs", f"{gpus.usable}{', each can access the memory of the others' * (gpus.usable > 1)}")


HOST_CHECKS: Sequence[Callable[[HostReadings], Iterator[Finding]]] = (
    check_versions,
    check_plugins,
    check_shared_memory,
    check_limits,
    check_proxies,
    check_port,
    check_state,
    check_gpus,
)


def _limit(number: int) -> str:
    return "unlimited" if number < 0 else str(number)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _plugin(point: metadata.EntryPoint) -> Plugin:
    top = point.module.partition(".")[0]
    installed = importlib.util.find_spec(top) is not None
    return Plugin(point.name, point.module, point.dist.version if point.dist is not None else "", installed)


def _space(directory: Path) -> Space:
    """Return the space of a directory, or of the nearest existing parent."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    usage = shutil.disk_usage(existing)
    return Space(usage.total, usage.free, os.access(existing, os.W_OK))


def _listens(address: str) -> bool:
    try:
        socket.create_connection(split(address), timeout=1.0).close()
    except OSError:
        return False
    return True


def _gpus() -> Gpus:
    """Return the GPUs, read in a separate process: a driver that hangs must not stop the other checks."""
    files = gpu_count()
    if not files:
        return Gpus(0)
    if importlib.util.find_spec("torch") is None:
        return Gpus(files, error="it is not installed")
    probe = subprocess.Popen(
        [sys.executable, "-c", _GPU_PROBE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = probe.communicate(timeout=GPU_PROBE_S)
    except subprocess.TimeoutExpired:
        probe.kill()  # no wait: a process inside a hanging driver does not end
        return Gpus(files, error=f"the driver does not answer within {GPU_PROBE_S:g} s")
    if probe.returncode:
        return Gpus(files, error=errors.strip().splitlines()[-1] if errors.strip() else "it fails")
    first, *pairs = (line.split() for line in output.splitlines())
    error = "this PyTorch is built without CUDA" if first[0] == "None" else ""
    return Gpus(files, int(first[1]), [(int(a), int(b)) for a, b in pairs], error)

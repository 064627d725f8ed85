"""The local launcher: processes on this machine, optionally with reserved cores."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlctl.contract.errors import Reason
from rlctl.launch.interface.launcher import Launched
from rlctl.launch.interface.spec import EngineSpec, Reservation, rank_arguments
from rlctl.launch.local.child_processes import Process
from rlctl.runtime import private_files
from rlctl.transport.auth import token_variables
from rlctl.transport.tls.authority import Authority, certificate_variables


class LocalLauncher:
    """Processes on this machine."""

    def __init__(
        self,
        directory: Path,
        *,
        token: str | None = None,
        insecure: bool = False,
        module: str,
        authority: Authority | None = None,
    ) -> None:
        """``directory``: directory of the logs.

        ``module``: the Python module to run, with the interface of ``rlctl``. ``authority``: issuer of the certificate
        of each process; None for plain text.
        """
        self._authority = authority
        self._directory = directory
        self._common = token_variables(token)
        self._flags = ["--insecure"] if insecure else []
        self._module = module
        self._cores: dict[int, Launched] = {}

    def launch(self, spec: EngineSpec, rank: int, coordinator: str, followers: Sequence[str] = ()) -> Process:
        """Start the server of a rank, on the GPUs of the plan."""
        arguments = rank_arguments(spec, rank, coordinator, followers)
        return self.start(spec.process(rank), arguments, spec.environment, identity=spec.identity(rank), cpus=spec.cpus)

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        identity: str = "",
        hosts: Sequence[str] = (),
        cpus: int = 0,
    ) -> Process:
        """Start ``rlctl ARGUMENTS``, on cores that no running process is bound to.

        ``identity`` and ``hosts`` are for the certificate. Raises FIELD_INVALID for too few cores, TLS_INVALID without
        a certificate, ENGINE_FAILED if the system does not start the process.
        """
        bound = self._free_cores(name, cpus)
        threads = str(cpus) if cpus else os.environ.get("OMP_NUM_THREADS", "1")
        variables = {"OMP_NUM_THREADS": threads, **(environment or {}), **self._common}
        variables |= certificate_variables(self._authority, identity, hosts)
        log = self._directory / f"{name}.log"
        try:
            private_files.make_directory(self._directory)
            process = Process(name, [*arguments, *self._flags], log, variables, self._module, bound)
        except (OSError, RuntimeError) as error:  # no memory, process id, thread, or room for a log
            raise Reason.ENGINE_FAILED.error(f"{name} cannot be started: {error}") from error
        self._cores.update(dict.fromkeys(bound, process))
        return process

    def make_room(self, engines: Sequence[EngineSpec], places: Sequence[Reservation]) -> None:
        """Do nothing: the plan leaves out these GPUs, and no other program assigns GPUs of this machine."""

    def close(self) -> None: ...

    def _free_cores(self, name: str, count: int) -> list[int]:
        if not count:
            return []
        cores = sorted(os.sched_getaffinity(0))
        free = [core for core in cores if core not in self._cores or self._cores[core].returncode is not None]
        if len(free) < count:
            raise Reason.FIELD_INVALID.error(
                f"{name} is to have {count} cores to itself, and {len(free)} of {len(cores)} are free",
                field="cpus_per_rank",
            )
        return free[:count]

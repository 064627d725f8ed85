"""A coordinator inside the trainer's own process: no daemon to run, and the same SDK."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rlctl.contract.errors import Reason
from rlctl.coordinator.server import CoordinatorConfig, CoordinatorServer
from rlctl.engine import recognise
from rlctl.launch.engine_lifecycle import REMIND_S
from rlctl.launch.interface.launcher import Launched
from rlctl.launch.interface.spec import LOAD_S, EngineSpec
from rlctl.launch.local.child_processes import Process, stop_all, unended
from rlctl.launch.local.launcher import LocalLauncher
from rlctl.runtime.addresses import refuse_unreachable
from rlctl.runtime.event_loops import LoopThread
from rlctl.sdk import aio
from rlctl.sdk.blocking import Fleet
from rlctl.transport.auth import load_token
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls

READY_S = 10.0
LOOK_S = 0.05
log = logging.getLogger(__name__)


def embedded(
    stages: Sequence[str] = (),
    *,
    model: str = "actor",
    options: Mapping[str, str] | None = None,
    journal: str | Path | None = None,
    listen: str = "127.0.0.1:0",
    token: str | None = None,
    insecure: bool = False,
    heal_by_hand: Collection[str] = (),
    tls: str | Path | None = None,
) -> EmbeddedFleet:
    """Start a coordinator on threads of this process and attach stages.

    Returns when each stage may serve, or after 10 s: a stage may have to be healed first. The logger
    ``rlctl.launch.embedded`` reports the attaching, and warns if that is slow.

    Args:
        stages: addresses (``host:port``) of stage servers without a coordinator (``rlctl stage``), and URLs
            (``http://host:port``) of SGLang or vLLM servers. Each URL gets a stage server in a child process that ends
            with this process. The server at the URL is attached to, and never ended.
        model: model of the servers at URLs. The slot of the first is ``MODEL-0``.
        options: the plug-in's settings for servers at URLs, as for ``rlctl stage --option`` (``api_key_file``).
        journal: file of the journal; None for a temporary file that ends with this process. Logs of child processes are
            in ``logs`` beside the journal.
        listen: address of the coordinator for other processes, such as ``rlctl`` and stage servers that register by
            themselves.
        token: bearer token, else RLCTL_TOKEN_FILE, else RLCTL_TOKEN, else no token.
        insecure: allow addresses that other hosts reach, without a token.
        heal_by_hand: models whose late or restarted engines wait for :meth:`Fleet.heal`. Engines of all other models
            are healed automatically.
        tls: directory of the fleet's certificates (``rlctl certs init``); None for plain text.

    Raises UNREACHABLE for a stage or server without an answer. Raises FIELD_INVALID for an invalid address, and for a
    URL at which a different kind of server answers. Raises ENGINE_FAILED or DEADLINE_EXCEEDED if attaching to a server
    fails. Raises JOURNAL_FAILED, INSECURE_BIND. After an error, no process and no temporary file is left behind.
    """
    token = token if token is not None else load_token()
    for stage in stages:
        if "://" not in stage:
            refuse_unreachable(stage, "stages")
    with ExitStack() as resources:
        if journal is None:
            journal = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="rlctl-"))) / "journal.db"
        journal = Path(journal)
        loop = LoopThread("rlctl coordinator")
        resources.callback(loop.stop)
        urls = [stage for stage in stages if "://" in stage]
        engines = loop.call(_attached(urls, model, dict(options or {})))
        access_file = os.environ.get("RLCTL_ACCESS_FILE", "")
        authority = Authority(Path(tls)) if tls else None
        coordinator_tls = None if authority is None else Tls(authority.ensured("coordinator"))
        config = CoordinatorConfig(
            journal, listen, token, insecure, heal_by_hand=heal_by_hand, access_file=access_file, tls=coordinator_tls
        )
        server = loop.call(_start(config))
        resources.callback(lambda: loop.call(server.stop()))
        launcher = LocalLauncher(
            journal.parent / "logs", token=token, insecure=insecure, module="rlctl", authority=authority
        )
        children: list[Process] = []
        resources.callback(lambda: _stop(children))
        children.extend(launcher.launch(spec, 0, "") for spec in engines)
        attached = [_announced(child)["address"] for child in children]
        loop.call(_adopt(server, [*attached, *(stage for stage in stages if stage not in urls)]))
        client_loop = LoopThread("rlctl client")
        try:
            client = client_loop.call(aio.connect(server.address, token=token, tls=coordinator_tls or False))
        except BaseException:
            client_loop.stop()
            raise
        return EmbeddedFleet(client, client_loop, server.address, loop, resources.pop_all())


async def _attached(urls: Sequence[str], model: str, options: dict[str, str]) -> list[EngineSpec]:
    servers = await asyncio.gather(*(recognise(url, options) for url in urls))
    return [
        EngineSpec(f"{model}-{index}", checkpoint, model, engine, options={**options, "url": url})
        for index, (url, (engine, checkpoint)) in enumerate(zip(urls, servers, strict=True))
    ]


def _stop(children: Sequence[Launched]) -> None:
    """End the stage servers. The log names the servers that no kill ends."""
    stop_all(children)
    if error := unended(children):
        log.warning("%s", error)


def _announced(child: Process) -> dict[str, str]:
    """Wait for the announcement of a stage server.

    Logs at intervals that the attaching continues, and shows the last log line.
    """
    log.info("%s: attaching; its log is %s", child.name, child.log)
    began, remind_s = time.monotonic(), REMIND_S
    while not child.serves and child.returncode is None and (since_s := time.monotonic() - began) < LOAD_S:
        if since_s >= remind_s:
            remind_s *= 2
            log_line = child.last_log_line()
            log.warning(
                "%s: still attaching after %.0f s%s",
                child.name,
                since_s,
                f"; its log says: {log_line}" if log_line else "",
            )
        time.sleep(LOOK_S)
    if not child.serves and child.returncode is None:
        raise Reason.DEADLINE_EXCEEDED.error(f"{child.name} is not attached after {LOAD_S:g} s; its log is {child.log}")
    facts = child.announced(LOOK_S)
    log.info("%s: attached at %s", child.name, facts["address"])
    return facts


async def _start(config: CoordinatorConfig) -> CoordinatorServer:
    server = CoordinatorServer(config)
    await server.start()
    return server


async def _adopt(server: CoordinatorServer, addresses: Sequence[str]) -> None:
    slots = [await server.coordinator.adopt(address) for address in addresses]
    roster = server.coordinator.roster

    def ready() -> bool:
        versions = [roster.models[slot.model].record.latest.sequence for slot in slots]
        return all(versions) and not any(slot.not_routable() for slot in slots)

    try:
        async with asyncio.timeout(READY_S):
            await roster.until(ready)
    except TimeoutError:
        for slot in slots:
            if why := slot.not_routable():
                log.warning("%s may not serve yet: %s", slot.name, why)


class EmbeddedFleet(Fleet):
    """A :class:`rlctl.sdk.blocking.Fleet` with the coordinator in this process.

    Closing the fleet stops the coordinator.

    Attributes:
        address: address of the coordinator for further clients.
    """

    def __init__(
        self, client: aio.AsyncFleet, client_loop: LoopThread, address: str, loop: LoopThread, resources: ExitStack
    ) -> None:
        """``resources``: closed with the coordinator, which runs on ``loop``."""
        super().__init__(client, client_loop)
        self.address = address
        self._coordinator_loop = loop
        self._resources = resources

    def close(self) -> None:
        """Close the client, end the child processes and stop the coordinator.

        Stages serve until the leases end, and attached servers continue.
        """
        super().close()
        if self._coordinator_loop.running:  # false in a forked process: the resources are the parent's
            with self._closing:
                self._resources.close()

"""A sidecar process: the server behind it, its admin verbs, its routes, and its registrations at routers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web
from rlctl_servers.options import check_url, key
from rlctl_servers.server.http import Http

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import EngineConfig
from rlctl.runtime import http_limits
from rlctl_vllm.engine import VLLMEngine
from rlctl_vllm.options import PRODUCT
from rlctl_vllm.sidecar.admin import Admin
from rlctl_vllm.sidecar.requests import Requests
from rlctl_vllm.sidecar.router_registration import Registration
from rlctl_vllm.sidecar.routes import Sidecar, no_admin, refuse_driven
from rlctl_vllm.sidecar.upstream import Upstream

log = logging.getLogger(__name__)

_of_aiohttp = logging.getLogger(f"{__name__}.aiohttp")
_of_aiohttp.setLevel(logging.CRITICAL)  # logs only invalid HTTP of callers, each time with a traceback

LAUNCHED: Mapping[str, str] = {"enable_sleep_mode": "true", "enforce_eager": "true", "gpu_memory_utilization": "0.9"}
"""Arguments of a launched vLLM by default; docs/sidecar.md gives the reasons."""

_GPU_ONLY = ("enable_sleep_mode", "gpu_memory_utilization")
SHUTDOWN_S = 2.0


@dataclass(frozen=True)
class SidecarConfig:
    """Settings of a sidecar. Fields without an explanation are options of ``rlctl sidecar vllm``.

    Attributes:
        host, port: address to bind; port 0 takes any free port.
        arguments: arguments of the launched vLLM, by name; "false" takes a flag back.
        start_s: longest time until the launched vLLM is ready, in seconds.
        routers: routers to register with.
        token: token that admin verbs require.
    """

    upstream: str = ""
    launch: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    arguments: Mapping[str, str] = field(default_factory=dict)
    tp_size: int = 1
    device: str = "cpu"
    python: str = ""
    start_s: float = 900.0
    api_key_file: str = ""
    coordinator: str = ""
    routers: tuple[str, ...] = ()
    advertise: str = ""
    token: str | None = field(default=None, repr=False)
    route: str = "auto"


class SidecarServer:
    """A sidecar.

    Attributes:
        url: address of the sidecar.
        failed: set, with the error, when a vLLM that was launched or attached here is gone.
        registrations: registrations at routers.
    """

    def __init__(self, config: SidecarConfig) -> None:
        """Check the settings. Raises FIELD_CONFLICT, FIELD_REQUIRED."""
        if not config.upstream and not config.launch:
            raise Reason.FIELD_REQUIRED.error("a running vLLM or a model to launch is required", field="upstream")
        if config.upstream and config.launch:
            raise Reason.FIELD_CONFLICT.error("a vLLM either runs already or is launched", field="launch")
        if config.launch and config.coordinator:
            raise Reason.FIELD_CONFLICT.error(
                "a coordinator's engine is launched by its stage; name its address as upstream", field="coordinator"
            )
        if config.upstream and config.arguments:
            raise Reason.FIELD_CONFLICT.error("a vLLM that runs already takes no arguments", field="arguments")
        self._config = config
        self.url = ""
        self.registrations: list[Registration] = []
        self._engine: VLLMEngine | None = None
        self._http: Http | None = None
        self._runner: web.AppRunner | None = None
        self._telling: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()

    async def start(self) -> None:
        """Launch vLLM or connect to it, bind, and register. Raises the errors of the plug-in, and FIELD_INVALID."""
        config = self._config
        admin: Admin | RlctlError
        if config.launch:
            self._engine = VLLMEngine(_launched(config), self._on_failure)
            await self._engine.start({})
            upstream = Upstream(self._engine.http)
        else:
            self._http = _http(config)
            upstream = Upstream(self._http)
        about = await upstream.about(config.route)
        refusal: RlctlError | None = None
        if config.coordinator:
            refusal = refuse_driven(config.coordinator)
        elif not about.admin:
            refusal = no_admin("it")
        elif self._engine is None:
            refusal = await self._attach(about.path)
        driven = bool(config.coordinator) or self._engine is not None
        version = None if self._engine is None else self._engine.present_version
        requests = Requests(upstream, about, driven=driven, version=version)
        if refusal is not None:
            admin = refusal
        else:
            assert self._engine is not None
            self._engine.leave_requests_to(requests)
            admin = Admin(self._engine, requests)
        sidecar = Sidecar(upstream, about, requests, admin=admin, driven=driven, token=config.token)
        await self._listen(sidecar.application())
        for router in config.routers:
            registration = Registration(router, self.url)
            self.registrations.append(registration)
            self._telling.append(asyncio.create_task(registration.keep_telling()))

    async def stop(self) -> None:
        """Leave the routers, end requests under way, and end a vLLM that was launched here."""
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)
        for registration in self.registrations:
            await registration.leave()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._engine is not None:
            await self._engine.stop()
        if self._http is not None:
            await self._http.close()

    async def _attach(self, path: str) -> RlctlError | None:
        """Attach the plug-in to a running vLLM. Return the reason of a failure, or None."""
        config = self._config
        engine: VLLMEngine | None = None
        try:
            if not config.upstream.startswith("http"):
                raise Reason.UNSUPPORTED.error("a vLLM behind a Unix socket is driven by the process that launched it")
            options = {"url": config.upstream}
            if config.api_key_file:
                options["api_key_file"] = config.api_key_file
            engine = VLLMEngine(EngineConfig(path, options=options), self._on_failure)
            await engine.start({})
        except RlctlError as error:
            if engine is not None:
                await engine.stop()  # else the engine watches the server, and ends this sidecar too
            log.warning("admin verbs are refused: %s", error)
            return Reason.UNSUPPORTED.error(
                f"this sidecar does not drive the vLLM: {error.message}", next_step=error.next_step
            )
        self._engine = engine
        return None

    async def _listen(self, app: web.Application) -> None:
        config = self._config
        # A caller that disconnects ends its request.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, logger=_of_aiohttp, shutdown_timeout=SHUTDOWN_S
        )
        await self._runner.setup()
        await http_limits.Site(self._runner, config.host, config.port).start()
        port = self._runner.addresses[0][1]
        host = config.advertise or config.host
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _on_failure(self, error: RlctlError) -> None:
        """Report that vLLM is gone; from any thread."""

        def tell() -> None:
            if not self.failed.done():
                self.failed.set_exception(error)

        self._loop.call_soon_threadsafe(tell)


def _http(config: SidecarConfig) -> Http:
    api_key = key({"api_key_file": config.api_key_file}, "api_key_file")
    if config.upstream.startswith("unix:"):
        return Http(PRODUCT, "http://vllm", api_key, socket=config.upstream.removeprefix("unix:"))
    if "://" not in config.upstream:
        raise Reason.FIELD_INVALID.error(f"{config.upstream!r} is no http address, and no unix:PATH", field="upstream")
    check_url(config.upstream, "upstream")
    return Http(PRODUCT, config.upstream.rstrip("/"), api_key)


def _launched(config: SidecarConfig) -> EngineConfig:
    """Return the plug-in's settings of the launched vLLM: the defaults, then the given arguments."""
    cpu = config.device.partition(":")[0] == "cpu"
    options = {name: value for name, value in LAUNCHED.items() if not (cpu and name in _GPU_ONLY)}
    for name, value in config.arguments.items():
        if value == "false":
            options.pop(name, None)
            name, value = f"no_{name}", "true"
        else:
            options.pop(name.removeprefix("no_"), None)
        options[name] = value
    options["start_s"] = str(config.start_s)
    if config.python:
        options["python"] = config.python
    return EngineConfig(config.launch, tp_size=config.tp_size, device=config.device, options=options)

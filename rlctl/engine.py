"""The interface of an engine plug-in.

One :class:`Engine` object stands for one rank. Rank 0's object is in the stage server's process, the other objects in
worker processes. An engine has a coroutine method for each admin verb that the engine supports, named after the verb
(``pause_generation`` for PauseGeneration)::

    async def pause_generation(self, request: PauseGenerationRequest, call: Call) -> None

The method returns the verb's data message (``Verb.data`` in :mod:`rlctl.contract.verbs`; None for a verb without data),
or a list of ``RankResult`` when the engine answers for several ranks. A failed method raises
:class:`rlctl.contract.errors.RlctlError`. The error's ``outcome`` states the effect: REJECTED (no effect), DIRTY (a
partial effect), UNKNOWN. A verb without a method is answered SKIPPED. Plug-ins are found through the entry point group
``rlctl.engines``.

Ordered verbs. An engine of several ranks steps in lock-step, and the ranks must carry out a command at the same step.
The worker of every rank calls the method as soon as the command arrives. The method checks the request, registers the
command under ``call.command_id``, calls ``call.accept()`` and waits. Once every rank has accepted, the stage calls
:meth:`Engine.order` on rank 0, and rank 0 puts the command into its step stream. Each rank carries the command out when
the stream reaches the command. If a rank refused or never got the command, the stage calls :meth:`Engine.withdraw` on
all ranks, and no rank carries the command out. An engine of one rank may ignore both and act at once.

Server engines. An engine that is a server with rank processes of its own is also listed in the entry point group
``rlctl.engines.own_ranks``. No followers are started for a server engine: one object answers for all ranks. A single
answer is filed for each rank with evidence ENGINE. An answer with results per rank keeps the evidence of each rank. An
adapter counts as loaded when every rank has reported the load to the server; there is no further proof. For a server
that can span hosts, the entry point group ``rlctl.engines.nodes`` names the engine of every further host. The rank of
such an engine is the number of its host. The engine starts the server's part there and gets no verbs. Running servers
are recognised by the functions in ``rlctl.engines.attached``: see :func:`recognise`.

Weights. An engine with weights that cannot simply be overwritten (packed, quantised or captured) overrides the hooks of
:class:`rlctl.weights.shards.load_hooks.LoadHooks`: ``prepare_load`` before the first tensor of an update,
``finalize_load`` after the last. :class:`rlctl.weights.shards.load_hooks.Loading` calls each hook once.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import ClassVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.verbs import VERBS
from rlctl.v1 import common_pb2, fleet_pb2, rollout_pb2

SETUP = "attach.engine_setup"
"""Field of the error of a follower's engine whose setup is not of a rank 0."""


@dataclass(frozen=True)
class EngineConfig:
    """Start parameters of an engine.

    Attributes:
        model_path: directory of the checkpoint.
        rank: this rank, 0-based.
        tp_size: tensor-parallel size; also the number of ranks for engines without further parallelism.
        nodes: number of hosts over which a server engine is started; ``rank`` is then the number of this host.
        node: name of this host, as other hosts resolve it.
        device: "cpu", or "cuda:0" and so on.
        dtype: dtype of the weights, for example "float32"; "auto" takes the checkpoint's.
        options: the engine's own settings by name; an unknown name is refused.
    """

    model_path: str
    rank: int = 0
    tp_size: int = 1
    node: str = "localhost"
    device: str = "cpu"
    dtype: str = "auto"
    options: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1


@dataclass
class Call:
    """A command at a rank.

    Attributes:
        command_id: id of the command in the step stream.
        deadline: end of the call, on ``asyncio``'s loop clock, seconds.
        update_id: open update that the command belongs to, or "".
        accept: called by the method of an ordered verb once the command is registered. From then on the engine carries
            the command out when ordered. May be called again.
        together: the command came over the command stream, from a sender that commands all ranks.
        step: set by the method of an ordered verb: the step at which this rank carried the command out.
    """

    command_id: str
    deadline: float
    update_id: str = ""
    accept: Callable[[], None] = lambda: None
    step: int = 0
    together: bool = False


@dataclass(frozen=True)
class EngineInfo:
    """Facts about an engine, known after its start.

    Attributes:
        layout: every rank's coordinates, rank 0 first.
        capabilities: the engine's capabilities; ``verbs`` is filled in from the methods, less the names in
            ``unsupported``.
        checkpoint: the loaded checkpoint.
        model_digest: hex digest of the loaded full tensors, or "".
        fenced: only this object can reach the engine.
        bootstrap: of a prefill engine: host and port at which decode engines ask for KV entries.
        http_routes: routes of the engine's own HTTP interface for the stage's data port; empty: there is no data port.
    """

    layout: fleet_pb2.StageLayout
    capabilities: fleet_pb2.Capabilities
    checkpoint: str = ""
    model_digest: str = ""
    fenced: bool = True
    bootstrap: tuple[str, int] | None = None
    http_routes: Sequence[HttpRoute] = ()


@dataclass(frozen=True)
class HttpRoute:
    """A route of an engine's own HTTP interface, forwarded by the data port of the stage.

    Attributes:
        method: HTTP method, for example "POST".
        path: in the syntax of aiohttp's router, for example "/v1/models/{id}".
        gated: the answer is computed with the weights, so the gate of the stage decides.
    """

    method: str
    path: str
    gated: bool = True


@dataclass(frozen=True)
class HttpRequest:
    """A request at the data port.

    Attributes:
        target: path and query, unchanged.
        headers: names and values in their order, without headers of the connection and without credentials. A name may
            be repeated.
        body: unchanged bytes.
        document: the body as JSON; None if the body is not JSON.
        gated: as in the route.
    """

    method: str
    target: str
    headers: Sequence[tuple[str, str]]
    body: bytes = b""
    document: object = None
    gated: bool = True

    @property
    def path(self) -> str:
        """Return the target without its query."""
        return self.target.partition("?")[0]


@dataclass(frozen=True)
class HttpHead:
    """The beginning of an engine's answer.

    Attributes:
        headers: without Content-Length and headers of the connection.
        body: the whole body, if it came with the head; None: it is to be read in pieces.
    """

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes | None = None


class HttpExchange(abc.ABC):
    """A request that the engine has read and not begun. Must be closed once begun.

    Attributes:
        adapter: name of the adapter for the computation, or "".
        model: name of the base model if the body has a name that the engine checks, or "".
    """

    adapter: str = ""
    model: str = ""

    @abc.abstractmethod
    async def begin(self) -> HttpHead:
        """Send the request, once, and return the head of the answer.

        Raises RlctlError: RID_IN_USE, STAGE_NOT_SERVING, UNREACHABLE and so on.
        """

    @abc.abstractmethod
    async def read(self) -> bytes:
        """Return the next piece of the body; b"" at its end. Raises the cause of an interruption."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the request at the engine, unless the answer has ended."""


class Engine(abc.ABC):
    """A rank of an inference engine. Admin methods run on the admin event loop, generation on the generation loop."""

    name: ClassVar[str]
    """Name of the plug-in, for example "torch"."""

    @abc.abstractmethod
    def __init__(self, config: EngineConfig, on_failure: Callable[[RlctlError], None]) -> None:
        """Prepare without heavy work. ``on_failure`` is called from any thread when the engine can no longer work."""

    @abc.abstractmethod
    def setup(self) -> dict[str, str]:
        """Return rank 0's setup for the followers' engines, for example a rendezvous address. Called before start."""

    @abc.abstractmethod
    async def start(self, setup: Mapping[str, str]) -> EngineInfo:
        """Load the model and become ready to generate. All ranks start together; ``setup`` is rank 0's setup.

        A follower raises FIELD_INVALID with the field :data:`SETUP` for a setup that is not of a rank 0. Nothing has
        then started, and a further call can start the engine.
        """

    @abc.abstractmethod
    async def stop(self) -> None:
        """End all tasks and processes of the engine; active requests end with an error."""

    async def order(self, command_id: str) -> int:  # noqa: ARG002
        """Put a registered command into the step stream, at rank 0; return its step (0: not bound to a step)."""
        return 0

    async def withdraw(self, command_id: str) -> None:  # noqa: B027
        """Drop a registered command that was not ordered; its method raises CANCELLED without effect."""

    async def interrupt(self, update_id: str) -> None:  # noqa: B027
        """Break blocking work of this update from outside, for example a receive whose sender is gone."""

    def lost(self, error: RlctlError) -> None:  # noqa: B027
        """Record, at rank 0 of a server engine, that the part on another host has ended. The engine cannot go on."""

    def can_restart(self) -> bool:
        """Return True if a new object may restart the failed engine in this process, as a new incarnation."""
        return False

    def log_lines(self) -> Sequence[str]:
        """Return the last log lines of the engine's own server, without secrets; from any thread."""
        return ()

    def set_version(self, version: common_pb2.WeightVersion) -> None:  # noqa: B027
        """Set the version of the weights, stamped on responses from now on. From any thread."""

    @abc.abstractmethod
    def generate(self, request: rollout_pb2.GenerateRequest) -> AsyncGenerator[rollout_pb2.GenerateResponse, None]:
        """Generate, at rank 0; yield new output (see GenerateStream). Closing the iterator aborts the request.

        The request has a ``rid``: the caller's, or an id made by the stage. Raises RlctlError: RID_IN_USE (a request
        with this ``rid`` is running), PROMPT_TOO_LONG, FIELD_INVALID and so on, before the first yield.
        """

    @abc.abstractmethod
    async def abort(self, request: rollout_pb2.AbortRequest) -> rollout_pb2.AbortResponse:
        """End requests early, at rank 0, on the generation loop."""

    async def exchange(self, request: HttpRequest) -> HttpExchange:  # noqa: ARG002
        """Read a request for a route of ``http_routes``, at rank 0, on the generation loop.

        Raises FIELD_INVALID and so on for a body that would harm the engine.
        """
        raise Reason.UNSUPPORTED.error(f"{self.name} has no HTTP interface")

    @classmethod
    def verbs(cls) -> list[str]:
        """Return the names of the verbs for which the engine has a method."""
        return [verb.name for verb in VERBS.values() if hasattr(cls, verb.method)]


@dataclass(frozen=True)
class KnownOptions:
    """Settings of an engine.

    Attributes:
        names: all accepted names.
        taken: names that rlctl sets itself, each with the setting to use instead.
        origin: owner of the settings, for messages, for example "SGLang 0.5".
        frozen: present settings with which the engine takes no weights, each with the reason.
    """

    names: frozenset[str]
    taken: Mapping[str, str] = field(default_factory=dict)
    origin: str = "the engine"
    frozen: Mapping[str, str] = field(default_factory=dict)


def known_options(name: str, settings: Mapping[str, str]) -> KnownOptions | None:
    """Return the settings of the plug-in, from the entry point group ``rlctl.engines.options``.

    The entry is a function of the present settings ("python" may name the installation). Returns None without an entry,
    or if the engine is not installed here: its settings are then unknown. The engine itself is not loaded.
    """
    for point in entry_points(group="rlctl.engines.options"):
        if point.name == name:
            options: KnownOptions | None = point.load()(settings)
            return options
    return None


async def recognise(url: str, options: Mapping[str, str]) -> tuple[str, str]:
    """Return the kind of the engine server at a URL, and its loaded checkpoint.

    Each plug-in of the entry point group ``rlctl.engines.attached`` names a coroutine function of ``url`` and
    ``options``. The function returns the checkpoint, or "" for a server of a different kind. Raises UNREACHABLE;
    FIELD_INVALID if the kind is unknown or the server rejects the key.
    """
    points = sorted(entry_points(group="rlctl.engines.attached"), key=lambda point: point.name)
    for point in points:
        checkpoint: str = await point.load()(url, options)
        if checkpoint:
            return point.name, checkpoint
    kinds = " or ".join(point.name for point in points)
    raise Reason.FIELD_INVALID.error(f"the server at {url} is no server of {kinds}", field="url")


def installed_engines() -> list[str]:
    """Return the names of the installed plug-ins."""
    return sorted({point.name for point in entry_points(group="rlctl.engines")})


@functools.cache
def brings_ranks(name: str) -> bool:
    """Return True if the plug-in of this name is a server engine, without loading the plug-in.

    Called for each engine at every inspection, so the metadata of all installed packages are read once.
    """
    return any(point.name == name for point in entry_points(group="rlctl.engines.own_ranks"))


@functools.cache
def spans_nodes(name: str) -> bool:
    """Return True if a server engine of this name can be started over several hosts."""
    return any(point.name == name for point in entry_points(group="rlctl.engines.nodes"))


def follower_class(name: str) -> type[Engine]:
    """Return the engine class of a follower. Raises as :func:`engine_class`; UNSUPPORTED: no such class."""
    if not brings_ranks(name):
        return engine_class(name)
    for point in entry_points(group="rlctl.engines.nodes"):
        if point.name == name:
            engine_type: type[Engine] = point.load()
            return engine_type
    raise Reason.UNSUPPORTED.error(f"engine {name} starts no server over several nodes", field="engine")


def engine_class(name: str) -> type[Engine]:
    """Return the plug-in of this name. Raises FIELD_INVALID, with the installed names, if no plug-in has the name."""
    installed = {point.name: point for point in entry_points(group="rlctl.engines")}
    if name not in installed:
        raise Reason.FIELD_INVALID.error(
            f"no engine plug-in {name!r} is installed; there are: {', '.join(sorted(installed))}",
            field="engine",
        )
    cls: type[Engine] = installed[name].load()
    return cls

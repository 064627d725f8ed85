"""What an engine plug-in implements.

One :class:`Engine` object stands for one rank. Rank 0's lives in the stage server's process, the others' in worker
processes. An engine has one coroutine method for each admin verb that it can do, named after the verb
(``pause_generation`` for PauseGeneration)::

    async def pause_generation(self, request: PauseGenerationRequest, call: Call) -> None

The method returns the verb's data message (``Verb.data`` in :mod:`rlctl.contract.verbs`; None where there is none), or
a list of ``RankResult`` when the engine answers for several ranks. It raises :class:`rlctl.contract.errors.RlctlError`;
its ``outcome`` says what the failure left behind: REJECTED (nothing happened), DIRTY (part of it did), UNKNOWN. A verb
without a method is answered SKIPPED. Plug-ins are found through the entry point group ``rlctl.engines``.

Ordered verbs. An engine of several ranks steps in lock-step, and the ranks must carry out a command at the same step.
The worker of every rank calls the method as soon as the command arrives; the method checks what it can, registers the
command under ``call.command_id``, calls ``call.accept()`` and waits. Once every rank has accepted, the stage calls
:meth:`Engine.order` on rank 0, which puts the command into its step stream; each rank carries it out when the stream
reaches it. If a rank refused or never got it, the stage calls :meth:`Engine.withdraw` on all ranks and nobody carries
it out. An engine of one rank may ignore both and act at once.

Ranks of its own. An engine that is a server with rank processes of its own is listed in the entry point group
``rlctl.engines.own_ranks`` too. No followers are started for it: one object speaks for all of its ranks, and what it
answers once is filed for each of them with evidence ENGINE. It says by itself which ranks answered for themselves. An
adapter is loaded, for all that it says, when every rank has said so to it: nothing else proves that. Where such a
server can be larger than a host, the entry point group ``rlctl.engines.nodes`` names what runs on every further one:
an engine whose rank is the number of its host, which starts the server's part there and is told of no verbs. Servers
that run already are recognised by what ``rlctl.engines.attached`` names: see :func:`recognise`.

Weights. An engine whose weights cannot simply be written into (packed, quantised or captured) overrides the hooks of
:class:`rlctl.weights.shards.load_hooks.LoadHooks`: ``prepare_load`` before the first tensor of an update,
``finalize_load`` after the last; :class:`rlctl.weights.shards.load_hooks.Loading` calls each once.
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


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is started.

    Attributes:
        model_path: directory of the checkpoint.
        rank: this rank, 0-based.
        tp_size: tensor-parallel size; also the number of ranks for engines without further parallelism.
        nodes: hosts that a server with ranks of its own is started over; ``rank`` is then the number of this one.
        node: name of the host, as others know it.
        device: "cpu", or "cuda:0" and so on.
        dtype: dtype to hold the weights in, "float32" say; "auto" takes the checkpoint's.
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
    """One command at one rank.

    Attributes:
        command_id: id under which the step stream names it.
        deadline: when the time is up, on ``asyncio``'s loop clock, seconds.
        update_id: open update that the command belongs to, or "".
        accept: to be called by the method of an ordered verb once the command is registered: from then on the engine
            will carry it out when it is ordered. Harmless to call again.
        together: it came over the command stream, from whoever sends it to all ranks.
        step: set by the method of an ordered verb: the step at which this rank carried it out.
    """

    command_id: str
    deadline: float
    update_id: str = ""
    accept: Callable[[], None] = lambda: None
    step: int = 0
    together: bool = False


@dataclass(frozen=True)
class EngineInfo:
    """What an engine knows about itself once it has started.

    Attributes:
        layout: every rank's coordinates, rank 0 first.
        capabilities: what it can do; ``verbs`` is filled in from its methods, less those in ``unsupported``.
        checkpoint: what it loaded.
        model_digest: hex digest of the full tensors that it loaded, or "".
        fenced: nobody but this object can reach the engine.
        bootstrap: of a prefill engine: host and port at which decode engines ask for KV entries.
        http_routes: routes of its own HTTP interface for the data port of the stage; empty: there is no data port.
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
    """A route of an engine's own HTTP interface that the data port of its stage passes on.

    Attributes:
        method: "POST", say.
        path: as aiohttp's router takes it, "/v1/models/{id}" say.
        gated: the answer is computed with the weights, so the gate of the stage decides.
    """

    method: str
    path: str
    gated: bool = True


@dataclass(frozen=True)
class HttpRequest:
    """A request at the data port.

    Attributes:
        target: path and query as they came.
        headers: without those of the connection and without credentials.
        body: as it came.
        document: the body as JSON; None where it has none.
        gated: as its route.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""
    document: object = None
    gated: bool = True

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]


@dataclass(frozen=True)
class HttpHead:
    """The beginning of an engine's answer; its headers are without those of the connection."""

    status: int
    headers: Sequence[tuple[str, str]]


class HttpExchange(abc.ABC):
    """A request that the engine has read and not begun.

    Attributes:
        adapter: name of the adapter that it is computed with, or "".
        model: name of the base model where the body gives one that an engine checks, or "".
    """

    adapter: str = ""
    model: str = ""

    @abc.abstractmethod
    def answer(self) -> AsyncGenerator[HttpHead | bytes, None]:
        """The head, then the body in pieces. Closing it ends the request at the engine.

        Raises RlctlError: before the head RID_IN_USE, STAGE_NOT_SERVING, UNREACHABLE and so on; after it what broke it
        off.
        """


class Engine(abc.ABC):
    """One rank of an inference engine. Admin methods run on the admin event loop, generation on another one."""

    name: ClassVar[str]
    """Name of the plug-in, "torch" say."""

    @abc.abstractmethod
    def __init__(self, config: EngineConfig, on_failure: Callable[[RlctlError], None]) -> None:
        """Prepare; nothing heavy. ``on_failure`` is called from any thread when the engine can no longer work."""

    @abc.abstractmethod
    def setup(self) -> dict[str, str]:
        """Rank 0, before the start: what the followers' engines need to join (rendezvous address, say)."""

    @abc.abstractmethod
    async def start(self, setup: Mapping[str, str]) -> EngineInfo:
        """Load and be ready to generate. All ranks start at the same time; ``setup`` is what rank 0's returned."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """End everything that was started; active requests end with an error."""

    async def order(self, command_id: str) -> int:  # noqa: ARG002
        """Rank 0: put a registered command into the step stream; returns its step number (0: not bound to one)."""
        return 0

    async def withdraw(self, command_id: str) -> None:  # noqa: B027
        """Forget a registered command that was not ordered; its method raises CANCELLED without effect."""

    async def interrupt(self, update_id: str) -> None:  # noqa: B027
        """Break whatever blocks inside this update (a receive whose sender is gone, say), from outside."""

    def lost(self, error: RlctlError) -> None:  # noqa: B027
        """Rank 0 of a server with ranks of its own: its part on another host has ended. It cannot go on."""

    def can_restart(self) -> bool:
        """After a failure: whether a new object may start the engine again in this process, as a new incarnation."""
        return False

    def log_lines(self) -> Sequence[str]:
        """The last lines that a server of the engine's own has logged, without secrets; from any thread."""
        return ()

    def set_version(self, version: common_pb2.WeightVersion) -> None:  # noqa: B027
        """The weights are at this version from now on: what responses are stamped with. From any thread."""

    @abc.abstractmethod
    def generate(self, request: rollout_pb2.GenerateRequest) -> AsyncGenerator[rollout_pb2.GenerateResponse, None]:
        """Rank 0: generate; yields what is new (see GenerateStream). Closing the iterator aborts the request.

        Raises RlctlError: PROMPT_TOO_LONG, FIELD_INVALID and so on, before the first yield.
        """

    @abc.abstractmethod
    async def abort(self, request: rollout_pb2.AbortRequest) -> rollout_pb2.AbortResponse:
        """Rank 0: end requests early. On the generation loop."""

    async def exchange(self, request: HttpRequest) -> HttpExchange:  # noqa: ARG002
        """Rank 0: read a request for one of its ``http_routes``. On the generation loop.

        Raises FIELD_INVALID and so on for a body that would harm the engine.
        """
        raise Reason.UNSUPPORTED.error(f"{self.name} has no HTTP interface")

    @classmethod
    def verbs(cls) -> list[str]:
        """Names of the verbs that the engine has a method for."""
        return [verb.name for verb in VERBS.values() if hasattr(cls, verb.method)]


@dataclass(frozen=True)
class KnownOptions:
    """Settings that an engine takes.

    Attributes:
        names: all that may be given.
        taken: those that rlctl sets itself, and what to write instead.
        origin: whose they are, for messages: "SGLang 0.5".
        frozen: of the settings given, those with which an engine takes no weights, and why.
    """

    names: frozenset[str]
    taken: Mapping[str, str] = field(default_factory=dict)
    origin: str = "the engine"
    frozen: Mapping[str, str] = field(default_factory=dict)


def known_options(name: str, given: Mapping[str, str]) -> KnownOptions | None:
    """The settings that the plug-in takes, from the entry point group ``rlctl.engines.options``.

    The entry is a function of the settings given ("python" may say which installation is asked). None when there is
    none, or the engine is not installed here: then nothing is known about them. The engine itself is not loaded.
    """
    for point in entry_points(group="rlctl.engines.options"):
        if point.name == name:
            known: KnownOptions | None = point.load()(given)
            return known
    return None


async def recognise(url: str, options: Mapping[str, str]) -> tuple[str, str]:
    """What kind of engine server answers at a URL, and the checkpoint that it says it has loaded.

    Each plug-in of the entry point group ``rlctl.engines.attached`` names a coroutine function of ``url`` and
    ``options``: it returns the checkpoint, "" where what answers there is not of its kind. Raises UNREACHABLE;
    FIELD_INVALID when it is of no known kind, or does not take the key.
    """
    points = sorted(entry_points(group="rlctl.engines.attached"), key=lambda point: point.name)
    for point in points:
        checkpoint: str = await point.load()(url, options)
        if checkpoint:
            return point.name, checkpoint
    kinds = " or ".join(point.name for point in points)
    raise Reason.FIELD_INVALID.error(f"what answers at {url} is no server of {kinds}", field="url")


def installed_engines() -> list[str]:
    """Names of the plug-ins."""
    return sorted({point.name for point in entry_points(group="rlctl.engines")})


@functools.cache
def brings_ranks(name: str) -> bool:
    """Whether the plug-in of this name has rank processes of its own; it is not loaded to find out.

    Asked for each engine at every look at it: the metadata of all that is installed are read once.
    """
    return any(point.name == name for point in entry_points(group="rlctl.engines.own_ranks"))


@functools.cache
def spans_nodes(name: str) -> bool:
    """Whether a server of the plug-in of this name, with ranks of its own, can be started over several hosts."""
    return any(point.name == name for point in entry_points(group="rlctl.engines.nodes"))


def follower_class(name: str) -> type[Engine]:
    """What a follower of the plug-in of this name runs. Raises as :func:`engine_class`; UNSUPPORTED: it has none."""
    if not brings_ranks(name):
        return engine_class(name)
    for point in entry_points(group="rlctl.engines.nodes"):
        if point.name == name:
            found: type[Engine] = point.load()
            return found
    raise Reason.UNSUPPORTED.error(f"engine {name} starts no server over several nodes", field="engine")


def engine_class(name: str) -> type[Engine]:
    """The plug-in of this name. Raises FIELD_INVALID when none is installed, naming those that are."""
    installed = {point.name: point for point in entry_points(group="rlctl.engines")}
    if name not in installed:
        raise Reason.FIELD_INVALID.error(
            f"no engine plug-in {name!r} is installed; there are: {', '.join(sorted(installed))}",
            field="engine",
        )
    cls: type[Engine] = installed[name].load()
    return cls

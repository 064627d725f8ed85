"""A server group: sizes, pipeline stages, external servers."""

from __future__ import annotations

from collections import Counter

from rlctl.topology.context import LAST_PORT, Context, is_address, whole
from rlctl.topology.resolved import Group
from rlctl.topology.schema import Section
from rlctl.topology.settings import Settings

BOOTSTRAP = "disaggregation_bootstrap_port"
"""SGLang's argument for prefill servers."""


class Groups:
    """The server groups of a file."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._complain = context.complain
        self._per_node = context.per_node
        self.settings = Settings(context)
        self._attached: dict[str, int] = {}
        """Lines of external servers, by URL."""

    def group(self, group: Section, model: Section, engine: str) -> Group:
        """Return the group, with ``key`` as written in the file."""
        kind = group.get("worker_type", "")
        external = self._external(group, engine)
        self._context.a_name(group, "name", group.get("name", ""))
        per_engine = (
            group.get("num_gpus_per_engine")
            or model.get("num_gpus_per_engine")
            or self._context.flags.num_gpus_per_engine
            or self._context.fleet.get("num_gpus_per_engine", 1)
        )
        num_gpus = group.get("num_gpus", 0)
        if "num_gpus" not in group.lines and not external:
            self._complain(group, "num_gpus", "it is required: a whole number, 1 or more")
        elif external and num_gpus and num_gpus != per_engine * len(external):
            self._complain(
                group, "num_gpus", f"{len(external)} servers of {per_engine} GPUs have {per_engine * len(external)}"
            )
        if kind == "placeholder":
            for key in group.lines.keys() & {"overrides", "external", "environment", "stages", "cpus_per_rank"}:
                self._complain(group, key, "a placeholder starts nothing")
        elif num_gpus and not external:
            self._shape(group, num_gpus, per_engine)
        overrides = {} if kind == "placeholder" else self.settings.overrides(group, model, engine, external)
        if kind == "prefill" and engine == "sglang":
            self._bootstrap(group, num_gpus // per_engine, overrides)
        return Group(
            key=group.get("name", ""),
            worker_type=kind,
            num_gpus=0 if external else num_gpus,
            num_gpus_per_engine=per_engine,
            pp_size=self._pipeline(group, per_engine, overrides),
            overrides=overrides,
            device=group.get("device")
            or model.get("device")
            or self._context.flags.device
            or self._context.fleet.get("device", "auto"),
            environment=self.settings.environment(model) | self.settings.environment(group),
            cpus_per_rank=group.get("cpus_per_rank", 0),
            external=external,
            stages=self._stages(group, per_engine),
            line=group.line,
            path=group.path,
        )

    def _shape(self, group: Section, num_gpus: int, per_engine: int) -> None:
        if num_gpus % per_engine:
            whole = num_gpus // per_engine
            remainder = f"{whole} engine{'s leave' if whole != 1 else ' leaves'} {num_gpus % per_engine} over"
            self._complain(
                group, "num_gpus", f"{num_gpus} is not divisible by num_gpus_per_engine {per_engine}: {remainder}"
            )
        if per_engine > self._per_node and per_engine % self._per_node:
            self._complain(
                group, "num_gpus_per_engine",
                f"an engine of {per_engine} GPUs is larger than a node of {self._per_node} and must fill whole ones",
            )  # fmt: skip

    def _external(self, group: Section, engine: str) -> tuple[str, ...]:
        urls = []
        for address in group.get("external", ()):
            url = (address if "://" in address else f"http://{address}").rstrip("/")
            host_port = url.partition("://")[2]
            if not url.startswith(("http://", "https://")) or not is_address(host_port) or host_port.endswith(":0"):
                self._complain(group, "external", f"{address!r} is not HOST:PORT")
            elif url in urls:
                self._complain(group, "external", f"{address!r} is there twice")
            elif url in self._attached:
                self._complain(group, "external", f"{url} is attached to already (line {self._attached[url]})")
            urls.append(url)
        self._attached |= dict.fromkeys(urls, group.at("external")[0])
        if group.get("external") == ():
            self._complain(group, "external", "it must have one address or more")
        if urls and engine in ("torch", "fake"):
            self._complain(
                group, "external", f"{engine} engines cannot be attached to; they run inside rlctl's processes"
            )
        if urls and group.get("worker_type") not in ("regular", "placeholder", None):
            self._complain(group, "external", "only regular engines can be attached to")
        return tuple(urls)

    def _stages(self, group: Section, per_engine: int) -> tuple[tuple[str, int], ...]:
        stages = [(stage.get("name", ""), stage.get("num_gpus", 0)) for stage in group.get("stages", ())]
        names = Counter(name for name, _ in stages)
        for name, count in names.items():
            if count > 1:
                self._complain(group, "stages", f"a stage {name!r} was there already")
        if stages and all(count for _, count in stages) and sum(count for _, count in stages) != per_engine:
            self._complain(
                group, "stages",
                f"they have {sum(count for _, count in stages)} GPUs, and num_gpus_per_engine is {per_engine}",
            )  # fmt: skip
        return tuple(stages)

    def _pipeline(self, group: Section, per_engine: int, overrides: dict[str, str]) -> int:
        """Return pp_size of the overrides; the tensor-parallel size is the rest of the engine's GPUs."""
        text = overrides.get("pp_size") or overrides.get("pipeline_parallel_size") or "1"
        size = whole(text)
        if size < 1 or per_engine % size:
            self._complain(group, "overrides", f"pp_size {text!r} does not divide num_gpus_per_engine {per_engine}")
            return 1
        return size

    def _bootstrap(self, group: Section, servers: int, overrides: dict[str, str]) -> None:
        """Check the ports of SGLang's prefill servers: the first port, and a further port for each further server."""
        text = overrides.get(BOOTSTRAP, "")
        first = whole(text)
        if text and not 0 < first <= LAST_PORT:
            self._complain(group, "overrides", f"{BOOTSTRAP} {text!r} is no port")
        elif first + servers - 1 > LAST_PORT:
            self._complain(
                group, "overrides",
                f"{BOOTSTRAP}: {servers} servers take ports from {first} on, and the last there is is {LAST_PORT}",
            )  # fmt: skip

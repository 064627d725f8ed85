"""The cascade: group → model → fleet → flags, as slime resolves its file, and everything that must hold afterwards.

Where slime goes on in silence, this has a problem: duplicate names, regular engines beside prefill and decode ones,
prefill without decode, GPUs that do not divide, arguments that the engine does not have. A second model that receives
weights is no problem here: every model has a version and a lease of its own.
"""

from __future__ import annotations

import ipaddress
import json
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlctl.engine import KnownOptions
from rlctl.launch.engine_run import LOAD_S
from rlctl.topology.document import Node
from rlctl.topology.flags import COMMAND_LINE, Flags, exclusions
from rlctl.topology.problems import Problems, did_you_mean
from rlctl.topology.resolved import Group, Model, Topology
from rlctl.topology.schema import FILE, Section, read

GPUS_PER_NODE = 8

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_SERVING = ("regular", "prefill", "decode", "encoder")


@dataclass(frozen=True)
class Engines:
    """What is known of the engines here.

    Attributes:
        installed: names of the plug-ins.
        known_options: (plug-in, settings) → what it takes; None: not known.
    """

    installed: Sequence[str]
    known_options: Callable[[str, Mapping[str, str]], KnownOptions | None]


def resolve(document: Node, flags: Flags, engines: Engines, problems: Problems, *, file: bool) -> Topology:
    """The topology of a document, of which only that counts which is right; the rest is in ``problems``."""
    exclusions(flags, problems, file=file)
    return _Resolver(document, flags, engines, problems).topology()


class _Resolver:
    def __init__(self, document: Node, flags: Flags, engines: Engines, problems: Problems) -> None:
        self._flags = flags
        self._engines = engines
        self._problems = problems
        self._root = read(FILE, document, "", problems)
        self._fleet: Section = self._root.get("fleet") or Section("fleet", self._root.line)
        self._slime = "sglang" in self._root.lines
        self._checkpoint: str = flags.hf_checkpoint or self._fleet.get("hf_checkpoint", "")
        self._per_node: int = flags.num_gpus_per_node or self._fleet.get("num_gpus_per_node", GPUS_PER_NODE)

    def topology(self) -> Topology:
        fleet, flags = self._fleet, self._flags
        auth: Section = fleet.get("auth") or Section("", 0)
        network: Section = fleet.get("network") or Section("", 0)
        restart: Section = fleet.get("restart") or Section("", 0)
        ray: Section = fleet.get("ray") or Section("", 0)
        launcher = flags.launcher or fleet.get("launcher", "local")
        if flags.address and launcher != "ray":
            self._problems.add(0, "--address", "it is a Ray cluster's, and needs --launcher ray", source=COMMAND_LINE)
        if launcher == "ray" and "advertise" in network.lines:
            self._complain(network, "advertise", "launcher ray has several nodes, and each has its own address")
        self._an_address(fleet, "listen")
        self._an_address(ray, "address")
        models = self._models()
        name = flags.name or fleet.get("name", "default")
        if not _NAME.fullmatch(name):
            self._complain(fleet, "name", f"{name!r} must be letters, digits, '.', '_' and '-'")
        return Topology(
            source=self._problems.source,
            name=name,
            launcher=launcher,
            cluster=flags.address or ray.get("address", ""),
            listen=flags.listen or fleet.get("listen", ""),
            num_gpus=self._total(models),
            num_gpus_per_node=self._per_node,
            token_file=auth.get("token_file", ""),
            insecure=True if flags.insecure else auth.get("insecure"),
            interface=self._interface(network),
            advertise=network.get("advertise", ""),
            restart=restart.get("policy", "on-failure") == "on-failure",
            backoff_s=restart.get("backoff_s", 1.0),
            heal_timeout_s=fleet.get("heal_timeout_s", 300.0),
            load_timeout_s=fleet.get("load_timeout_s", LOAD_S),
            drain_timeout_s=fleet.get("drain_timeout_s", 60.0),
            models=tuple(models),
        )

    # Models.

    def _models(self) -> list[Model]:
        both = [key for key in ("models", "sglang") if key in self._root.lines]
        if not both:
            self._problems.add(self._root.line, "models", "it is required: a list of models (`models:` or `sglang:`)")
        elif len(both) > 1:
            self._complain(self._root, "sglang", "`models:` and `sglang:` exclude each other; they take the same keys")
        models: list[Model] = []
        for key in both:
            sections = self._root.get(key)
            if sections == []:
                self._complain(self._root, key, "it must have one model or more")
            for section in sections or ():
                model = self._model(section)
                for other in models:
                    if model.name and other.name == model.name:
                        self._complain(
                            section, "name", f"a model {model.name!r} was there already, in line {other.line}"
                        )
                models.append(model)
        self._distinct_slots(models)
        return models

    def _model(self, model: Section) -> Model:
        name = model.get("name", "")
        if name and not _NAME.fullmatch(name):
            self._complain(model, "name", f"{name!r} must be letters, digits, '.', '_' and '-', 63 at most")
        engine = model.get("engine") or self._default_engine()
        if engine not in self._engines.installed:
            where = model if "engine" in model.lines else self._fleet
            known = ", ".join(self._engines.installed)
            self._complain(where, "engine", f"no plug-in {engine!r} is installed; there are: {known}"
                           f"{did_you_mean(engine, self._engines.installed)}")  # fmt: skip
        self._an_address(model, "gateway")
        groups = [self._group(group, model, engine) for group in model.get("server_groups", ())]
        groups = self._keys(groups)
        if model.get("server_groups") == []:
            self._complain(model, "server_groups", "it must have one group or more")
        self._types(model, groups)
        path = self._path(model)
        update_weights = model.get("update_weights")
        if update_weights is None:
            update_weights = not self._checkpoint or posixpath.normpath(path) == posixpath.normpath(self._checkpoint)
            if not update_weights:
                self._complain(
                    model, "update_weights",
                    f"not given, and {path!r} is not hf_checkpoint {self._checkpoint!r}: the model is frozen",
                    warning=True,
                )  # fmt: skip
        return Model(
            name=name,
            model_path=path,
            update_weights=update_weights,
            engine=engine,
            dtype=model.get("dtype", "auto"),
            weight_version=model.get("weight_version", ""),
            router_policy=self._flags.router_policy
            or model.get("router_policy")
            or self._fleet.get("router_policy", ""),
            gateway=model.get("gateway") or self._default_gateway(),
            groups=tuple(groups),
            line=model.line,
            path=model.path,
        )

    def _default_gateway(self) -> str:
        host: str = self._flags.gateways or self._fleet.get("gateways", "")
        return f"[{host}]:0" if ":" in host else f"{host}:0" if host else ""

    def _default_engine(self) -> str:
        default = "sglang" if self._slime else "torch"
        return self._flags.engine or str(self._fleet.get("engine", default))

    def _path(self, model: Section) -> str:
        """Group's overrides.model_path → the model's → hf_checkpoint; one for all groups."""
        own: str = model.get("model_path", "") or self._checkpoint
        named: dict[str, tuple[int, str]] = {}
        for group in model.get("server_groups", ()):
            node = group.get("overrides", {}).get("model_path") or group.get("overrides", {}).get("model-path")
            path = node.value if node is not None and isinstance(node.value, str) else own
            if node is not None and not isinstance(node.value, str):
                self._problems.add(node.line, f"{group.path}.overrides.model_path", "it must be a text")
            if group.get("worker_type") != "placeholder" or node is not None:
                named.setdefault(path, (node.line if node else group.line, f"{group.path}.overrides.model_path"))
        if len(named) > 1:
            first, second = list(named)[:2]
            line, key = named[second] if second != own else named[first]
            self._problems.add(
                line, key,
                f"all groups of a model have one model_path, and these have {first or 'none'!r} and "
                f"{second or 'none'!r}; make it a model of its own",
            )  # fmt: skip
        path = next(iter(named), own)
        if not path and any(group.get("worker_type") in _SERVING for group in model.get("server_groups", ())):
            self._complain(model, "model_path", "it is required where there is no --hf-checkpoint or hf_checkpoint")
        return path

    def _types(self, model: Section, groups: Sequence[Group]) -> None:
        """Regular, or prefill with decode."""
        lines = {group.worker_type: group for group in reversed(groups)}
        disaggregated = [lines[kind] for kind in ("prefill", "decode") if kind in lines]
        if "regular" in lines and disaggregated:
            other = disaggregated[0]
            self._problems.add(
                max(lines["regular"].line, other.line), f"{model.path}.server_groups",
                f"regular engines (line {lines['regular'].line}) and {other.worker_type} ones (line {other.line}) "
                "cannot serve one model together: all regular, or prefill with decode",
            )  # fmt: skip
        elif len(disaggregated) == 1:
            have = disaggregated[0].worker_type
            missing = "decode" if have == "prefill" else "prefill"
            self._problems.add(
                disaggregated[0].line, f"{disaggregated[0].path}.worker_type",
                f"{have} engines need {missing} ones, and the model has none",
            )  # fmt: skip
        elif "encoder" in lines and "regular" not in lines and not disaggregated:
            self._problems.add(
                lines["encoder"].line, f"{lines['encoder'].path}.worker_type",
                "encoders need regular engines, or prefill with decode, and the model has none",
            )  # fmt: skip

    def _keys(self, groups: list[Group]) -> list[Group]:
        """Groups with what names their slots: given, or the worker type with a number from the second on."""
        seen: Counter[str] = Counter()
        named: list[Group] = []
        for group in groups:
            seen[group.worker_type] += 1
            number = seen[group.worker_type]
            key = group.key or f"{group.worker_type}{number if number > 1 else ''}"
            if not group.key and group.worker_type == "regular" and number == 1:
                key = ""
            if group.worker_type and any(other.worker_type and other.key == key for other in named):
                self._problems.add(group.line, f"{group.path}.name", f"another group of the model is called {key!r}")
            named.append(Group(**{**vars(group), "key": key}))
        return named

    def _distinct_slots(self, models: Sequence[Model]) -> None:
        """Model "a" with a group "b" has the slots of a model "a-b"."""
        taken: dict[str, Model] = {}
        for model in models:
            for group in model.groups:
                stem = slot_stem(model, group)
                other = taken.setdefault(stem, model)
                if other is not model and other.name != model.name:
                    self._problems.add(
                        group.line, group.path, f"its slots {stem}-0, ... are those of model {other.name!r}"
                    )

    # Groups.

    def _group(self, group: Section, model: Section, engine: str) -> Group:
        kind = group.get("worker_type", "")
        external = self._external(group, engine)
        per_engine = (
            group.get("num_gpus_per_engine")
            or model.get("num_gpus_per_engine")
            or self._flags.num_gpus_per_engine
            or self._fleet.get("num_gpus_per_engine", 1)
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
        overrides = {} if kind == "placeholder" else self._overrides(group, model, engine, external)
        return Group(
            key=group.get("name", ""),
            worker_type=kind,
            num_gpus=0 if external else num_gpus,
            num_gpus_per_engine=per_engine,
            pp_size=self._pipeline(group, per_engine, overrides),
            overrides=overrides,
            device=group.get("device")
            or model.get("device")
            or self._flags.device
            or self._fleet.get("device", "auto"),
            environment=self._environment(model) | self._environment(group),
            cpus_per_rank=group.get("cpus_per_rank", 0),
            external=external,
            stages=self._stages(group, per_engine),
            line=group.line,
            path=group.path,
        )

    def _shape(self, group: Section, num_gpus: int, per_engine: int) -> None:
        if num_gpus % per_engine:
            whole = num_gpus // per_engine
            left = f"{whole} engine{'s leave' if whole != 1 else ' leaves'} {num_gpus % per_engine} over"
            self._complain(
                group, "num_gpus", f"{num_gpus} is not divisible by num_gpus_per_engine {per_engine}: {left}"
            )
        if per_engine > self._per_node and per_engine % self._per_node:
            self._complain(
                group, "num_gpus_per_engine",
                f"an engine of {per_engine} GPUs is larger than a node of {self._per_node} and must fill whole ones",
            )  # fmt: skip

    def _external(self, group: Section, engine: str) -> tuple[str, ...]:
        urls = []
        for address in group.get("external", ()):
            url = address if "://" in address else f"http://{address}"
            host, colon, port = url.partition("://")[2].rstrip("/").rpartition(":")
            if not url.startswith(("http://", "https://")) or not (host and colon and _is_port(port)):
                self._complain(group, "external", f"{address!r} is not HOST:PORT")
            elif url in urls:
                self._complain(group, "external", f"{address!r} is there twice")
            urls.append(url.rstrip("/"))
        if "external" in group.lines and not urls and group.get("external") is not None:
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
        """pp_size of the overrides; the tensor-parallel size is what is left of the engine's GPUs."""
        text = overrides.get("pp_size") or overrides.get("pipeline_parallel_size") or "1"
        if not text.isdigit() or int(text) < 1 or per_engine % int(text):
            self._complain(group, "overrides", f"pp_size {text} does not divide num_gpus_per_engine {per_engine}")
            return 1
        return int(text)

    # Settings.

    def _overrides(self, group: Section, model: Section, engine: str, external: Sequence[str]) -> dict[str, str]:
        """--sglang-* and --option → the model's → the group's. None takes a lower one away, as false does a switch."""
        found: dict[str, str | None] = {}
        base = {**(self._flags.sglang if engine == "sglang" else {}), **self._flags.options}
        places: dict[str, tuple[int, str, str]] = {}
        for name, value in base.items():
            plain = name.replace("-", "_")
            found[plain] = value
            flag = f"--option {name}" if name in self._flags.options else f"--sglang-{name.replace('_', '-')}"
            places[plain] = (0, flag, COMMAND_LINE)
        for section in (model, group):
            for name, (written, node) in self._named(section, "overrides").items():
                if name == "model_path":
                    continue  # of the cascade of paths
                found[name] = None if node.value is None or node.value is False else _text(node)
                places[name] = (node.line, f"{section.path}.overrides.{written}", "")
        overrides = {name: value for name, value in found.items() if value is not None}
        if not external:
            self._known(engine, overrides, {name: places[name] for name in found})
        return overrides

    def _known(self, engine: str, overrides: Mapping[str, str], places: Mapping[str, tuple[int, str, str]]) -> None:
        if not places or engine not in self._engines.installed:
            return
        known = self._engines.known_options(engine, overrides)
        if known is None:
            line, key, source = next(iter(places.values()))
            self._problems.add(
                line, key, f"not checked: {engine} is not installed here, or does not tell its arguments",
                warning=True, source=source,
            )  # fmt: skip
            return
        for name, (line, key, source) in places.items():
            if name in known.taken:
                self._problems.add(line, key, f"rlctl sets {name} itself: {known.taken[name]}", source=source)
            elif name not in known.names:
                near = did_you_mean(name, known.names)
                self._problems.add(line, key, f"{known.origin} has no argument {name!r}{near}", source=source)

    def _environment(self, section: Section) -> dict[str, str]:
        found = {}
        for name, node in section.get("environment", {}).items():
            if isinstance(node.value, dict | list) or node.value is None or not name or "=" in name:
                self._problems.add(node.line, f"{section.path}.environment.{name}", "it must be NAME: TEXT")
            elif name.startswith("RLCTL_TOKEN"):
                self._problems.add(
                    node.line, f"{section.path}.environment.{name}", "tokens belong in fleet.auth.token_file"
                )
            else:
                found[name] = _text(node)
        return found

    def _named(self, section: Section, key: str) -> dict[str, tuple[str, Node]]:
        """(as it is written, value) by name with underscores for dashes. One in both spellings is a problem."""
        found: dict[str, tuple[str, Node]] = {}
        for name, node in section.get(key, {}).items():
            plain = name.removeprefix("--").replace("-", "_")
            if plain in found:
                self._problems.add(
                    node.line, f"{section.path}.{key}.{name}", f"it is {plain} of line {found[plain][1].line} again"
                )
            found[plain] = (name, node)
        return found

    # The whole.

    def _total(self, models: Sequence[Model]) -> int:
        total = sum(group.num_gpus for model in models for group in model.groups)
        given = self._flags.num_gpus
        wanted = given if given is not None else self._fleet.get("num_gpus")
        if wanted is not None and wanted != total and not self._flags.external_addresses:
            parts = ", ".join(
                f"{model.name} {sum(group.num_gpus for group in model.groups)}" for model in models if model.groups
            )
            message = f"the groups have {total} GPUs ({parts}), not {wanted}"
            if given is not None:
                self._problems.add(0, "--rollout-num-gpus", message, source=COMMAND_LINE)
            else:
                self._complain(self._fleet, "num_gpus", message)
        return total

    def _interface(self, network: Section) -> str:
        interface: str = network.get("interface", "")
        if "/" in interface:
            try:
                ipaddress.ip_network(interface)
            except ValueError as error:
                self._complain(network, "interface", f"{interface!r} is no network: {error}")
        return interface

    def _an_address(self, section: Section, key: str) -> None:
        address = section.get(key, "")
        host, colon, port = address.rpartition(":")
        if address and not address.startswith("unix:") and not (host and colon and _is_port(port)):
            self._complain(section, key, f"{address!r} is not HOST:PORT")

    def _complain(self, section: Section, key: str, message: str, *, warning: bool = False) -> None:
        line, path = section.at(key)
        self._problems.add(line, path, message, warning=warning)


def slot_stem(model: Model, group: Group) -> str:
    """What the slots of a group begin with, before "-0"."""
    return f"{model.name}-{group.key}" if group.key else model.name


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 <= int(text[:6]) <= 65535


def _text(node: Node) -> str:
    """A setting as engines take it: true, 0.85, a text; lists and mappings as JSON."""
    match node.value:
        case bool():
            return "true" if node.value else "false"
        case str():
            return node.value
        case list() | dict():
            return json.dumps(_plain(node))
    return str(node.value)


def _plain(node: Node) -> object:
    match node.value:
        case list():
            return [_plain(item) for item in node.value]
        case dict():
            return {key: _plain(value) for key, value in node.value.items()}
    return node.value

"""The cascade: group → model → fleet → flags, as slime resolves its file, and all checks of the result.

Cases that slime accepts in silence are problems here: duplicate names, regular engines beside prefill and decode
engines, prefill without decode, GPUs that do not divide, unknown arguments of the engine. A second model that receives
weights is valid: every model has a version and an update lease.
"""

from __future__ import annotations

import ipaddress
import posixpath
from collections import Counter
from collections.abc import Sequence

from rlctl.contract import min_healthy
from rlctl.contract.errors import RlctlError
from rlctl.launch.interface.spec import LOAD_S, EngineSpec
from rlctl.topology.context import Context, Engines, is_host
from rlctl.topology.document import Node
from rlctl.topology.flags import Flags, exclusions
from rlctl.topology.groups import Groups
from rlctl.topology.problems import COMMAND_LINE, Problems, did_you_mean
from rlctl.topology.resolved import Group, Model, Topology
from rlctl.topology.schema import FILE, MOST, Section, read

GPUS_PER_NODE = 8

_SERVING = ("regular", "prefill", "decode", "encoder")


def resolve(document: Node, flags: Flags, engines: Engines, problems: Problems, *, file: bool) -> Topology:
    """Return the topology of a document. Invalid parts are left out and reported in ``problems``."""
    exclusions(flags, problems, file=file)
    return _Resolver(document, flags, engines, problems).topology()


class _Resolver:
    def __init__(self, document: Node, flags: Flags, engines: Engines, problems: Problems) -> None:
        self._root = read(FILE, document, "", problems)
        fleet: Section = self._root.get("fleet") or Section("fleet", self._root.line)
        self._slime = "sglang" in self._root.lines
        self._checkpoint: str = flags.hf_checkpoint or fleet.get("hf_checkpoint", "")
        per_node: int = flags.num_gpus_per_node or fleet.get("num_gpus_per_node", GPUS_PER_NODE)
        self._context = Context(flags, fleet, engines, problems, per_node)
        self._groups = Groups(self._context)
        self._listening: dict[str, tuple[str, int]] = {}
        """(key, line) of the listener at each address."""
        self._problems = problems
        self._complain = self._context.complain

    def topology(self) -> Topology:
        fleet, flags = self._context.fleet, self._context.flags
        auth: Section = fleet.get("auth") or Section("", 0)
        network: Section = fleet.get("network") or Section("", 0)
        restart: Section = fleet.get("restart") or Section("", 0)
        ray: Section = fleet.get("ray") or Section("", 0)
        launcher = flags.launcher or fleet.get("launcher", "local")
        if flags.address and launcher != "ray":
            self._problems.add(0, "--address", "it is a Ray cluster's, and needs --launcher ray", source=COMMAND_LINE)
        self._given_group(ray, launcher)
        if launcher == "ray" and "advertise" in network.lines:
            self._complain(network, "advertise", "launcher ray has several nodes, and each has its own address")
        self._addresses(fleet, ray)
        models = self._models()
        name = flags.name or fleet.get("name", "default")
        self._context.a_name(fleet, "name", name, flag="--name" if flags.name else "")
        return Topology(
            source=self._problems.source,
            name=name,
            launcher=launcher,
            cluster=flags.address or ray.get("address", ""),
            placement_group=flags.placement_group or ray.get("placement_group", ""),
            bundles=tuple(flags.bundles) or ray.get("bundles", ()),
            bundle_share=ray.get("bundle_share", 1.0) if flags.bundle_share is None else flags.bundle_share,
            listen=flags.listen or fleet.get("listen", ""),
            num_gpus=self._total(models),
            num_gpus_per_node=self._context.per_node,
            token_file=auth.get("token_file", ""),
            insecure=True if flags.insecure else auth.get("insecure"),
            tls=flags.tls or auth.get("tls", ""),
            interface=self._interface(network),
            advertise=network.get("advertise", ""),
            metrics=fleet.get("metrics", False),
            web=flags.web or fleet.get("web", ""),
            restart=restart.get("policy", "on-failure") == "on-failure",
            backoff_s=restart.get("backoff_s", 1.0),
            restarts=restart.get("limit", EngineSpec.restarts),
            restarts_within_s=restart.get("within_s", EngineSpec.restarts_within_s),
            heal_timeout_s=fleet.get("heal_timeout_s", 300.0),
            load_timeout_s=fleet.get("load_timeout_s", LOAD_S),
            owner_grace_s=fleet.get("owner_grace_s", 5.0),
            heal_grace_s=fleet.get("heal_grace_s", 60.0),
            drain_timeout_s=fleet.get("drain_timeout_s", 60.0),
            models=tuple(models),
        )

    def _addresses(self, fleet: Section, ray: Section) -> None:
        flags = self._context.flags
        listen, flag = flags.listen or fleet.get("listen", ""), "--listen" if flags.listen else ""
        if not listen.removeprefix("unix:") or not listen.startswith("unix:"):
            self._context.an_address(fleet, "listen", listen, flag=flag)
        self._listens(fleet, "listen", listen, flag=flag)
        cluster, flag = flags.address or ray.get("address", ""), "--address" if flags.address else ""
        self._context.an_address(ray, "address", cluster, flag=flag)
        web, flag = flags.web or fleet.get("web", ""), "--web" if flags.web else ""
        self._context.an_address(fleet, "web", web, flag=flag)
        self._listens(fleet, "web", web, flag=flag)
        host, flag = flags.gateways or fleet.get("gateways", ""), "--gateways" if flags.gateways else ""
        if host and not is_host(host):
            self._complain(fleet, "gateways", f"{host!r} is no host", flag=flag)

    def _listens(self, section: Section, key: str, address: str, *, flag: str = "") -> None:
        """Report an address of a different listener of the fleet."""
        if not address or address.endswith(":0"):
            return
        line, path = section.at(key)
        first_key, first_line = self._listening.setdefault(address, (flag or path, 0 if flag else line))
        if first_key != (flag or path):
            at = f" (line {first_line})" if first_line else ""
            self._complain(section, key, f"{address} is where {first_key}{at} listens already")

    def _given_group(self, ray: Section, launcher: str) -> None:
        """Check the settings of an existing placement group."""
        flags = self._context.flags
        options = {
            "--placement-group": flags.placement_group,
            "--bundles": flags.bundles,
            "--bundle-share": flags.bundle_share,
        }
        for flag, value in options.items():
            if value and launcher != "ray":
                self._problems.add(0, flag, "it is of a Ray cluster, and needs --launcher ray", source=COMMAND_LINE)
            elif value and not (flags.placement_group or ray.get("placement_group")):
                self._problems.add(0, flag, "it needs --placement-group, whose they are", source=COMMAND_LINE)
        for key in ("bundles", "bundle_share"):
            if key in ray.lines and not (flags.placement_group or ray.get("placement_group")):
                self._complain(ray, key, "it needs placement_group, whose they are")
        if ray.get("bundle_share", 1.0) > 1:
            self._complain(ray, "bundle_share", f"it must be 1 at most, not {ray.get('bundle_share'):g}")
        bundles = flags.bundles or ray.get("bundles", ())
        duplicates = sorted(bundle for bundle, count in Counter(bundles).items() if count > 1)
        message = f"bundle {', '.join(map(str, duplicates))} is there twice"
        if duplicates and flags.bundles:
            self._problems.add(0, "--bundles", message, source=COMMAND_LINE)
        elif duplicates:
            self._complain(ray, "bundles", message)
        elif not bundles and "bundles" in ray.lines and ray.get("bundles") is not None:
            self._complain(ray, "bundles", "it must have one bundle or more")

    # Models.

    def _models(self) -> list[Model]:
        section_keys = [key for key in ("models", "sglang") if key in self._root.lines]
        if not section_keys:
            self._problems.add(self._root.line, "models", "it is required: a list of models (`models:` or `sglang:`)")
        elif len(section_keys) > 1:
            self._complain(self._root, "sglang", "`models:` and `sglang:` exclude each other; they take the same keys")
        models: list[Model] = []
        first: dict[str, int] = {}
        for key in section_keys:
            sections = self._root.get(key)
            if sections == []:
                self._complain(self._root, key, "it must have one model or more")
            for section in sections or ():
                model = self._model(section)
                if model.name in first:
                    line = first[model.name]
                    self._complain(section, "name", f"a model {model.name!r} was there already, in line {line}")
                elif model.name:
                    first[model.name] = model.line
                models.append(model)
        self._distinct_slots(models)
        return models

    def _model(self, model: Section) -> Model:
        name = model.get("name", "")
        self._context.a_name(model, "name", name)
        engine = model.get("engine") or self._default_engine()
        if engine not in self._context.engines.installed:
            where = model if "engine" in model.lines else self._context.fleet
            flag = "--engine" if where is not model and self._context.flags.engine else ""
            installed = ", ".join(self._context.engines.installed)
            self._complain(where, "engine", f"no plug-in {engine!r} is installed; there are: {installed}"
                           f"{did_you_mean(engine, self._context.engines.installed)}", flag=flag)  # fmt: skip
        self._context.an_address(model, "gateway", model.get("gateway", ""))
        self._listens(model, "gateway", model.get("gateway", ""))
        groups = [self._groups.group(group, model, engine) for group in model.get("server_groups", ())]
        groups = self._keys(groups)
        if model.get("server_groups") == []:
            self._complain(model, "server_groups", "it must have one group or more")
        self._types(model, groups)
        path = self._path(model)
        gateway = model.get("gateway") or self._default_gateway()
        router = self._router(model, gateway)
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
            heals_itself=model.get("healing", "automatic") == "automatic",
            min_healthy=self._min_healthy(model, sum(group.engines for group in groups)),
            router_policy=self._context.flags.router_policy
            or model.get("router_policy")
            or self._context.fleet.get("router_policy", ""),
            gateway=gateway,
            groups=tuple(groups),
            router=router.get("backend", ""),
            router_listen=self._router_listen(router, gateway),
            line=model.line,
            path=model.path,
        )

    def _min_healthy(self, model: Section, engine_count: int) -> str:
        """Return the limit of the model, which its engines must be able to keep; "": no limit."""
        text: str = model.get("min_healthy", "")
        try:
            minimum = min_healthy.parse(text or "0")
        except RlctlError as error:
            self._complain(model, "min_healthy", error.message)
            return ""
        if min_healthy.limit(minimum, engine_count) > engine_count:
            self._complain(model, "min_healthy", f"it is {text}, and the model has {engine_count} engines")
        return min_healthy.words(minimum)

    def _default_gateway(self) -> str:
        host: str = self._context.flags.gateways or self._context.fleet.get("gateways", "")
        return f"[{host}]:0" if ":" in host else f"{host}:0" if host else ""

    def _router(self, model: Section, gateway: str) -> Section:
        """Return the model's router, or the fleet's router if the model has a gateway."""
        model_router: Section | None = model.get("router")
        if model_router is not None and not gateway:
            self._complain(model, "router", "it stands in front of a gateway, and the model has none")
        if model_router is not None:
            self._context.an_address(model_router, "listen", model_router.get("listen", ""))
            self._listens(model_router, "listen", model_router.get("listen", ""))
        fleet_router: Section | None = self._context.fleet.get("router") if gateway else None
        return model_router or fleet_router or Section("", 0)

    @staticmethod
    def _router_listen(router: Section, gateway: str) -> str:
        listen: str = router.get("listen", "")
        return listen or (f"{gateway.rpartition(':')[0]}:0" if router.get("backend") else "")

    def _default_engine(self) -> str:
        default = "sglang" if self._slime else "torch"
        return self._context.flags.engine or str(self._context.fleet.get("engine", default))

    def _path(self, model: Section) -> str:
        """Return the checkpoint of all groups: overrides.model_path, else the model's, else hf_checkpoint."""
        default: str = model.get("model_path", "") or self._checkpoint
        lines_by_path: dict[str, tuple[int, str]] = {}
        for group in model.get("server_groups", ()):
            _, node = self._groups.settings.named(group).get("model_path", ("", None))
            path = node.value if node is not None and isinstance(node.value, str) else default
            if node is not None and (not isinstance(node.value, str) or not node.value):
                self._problems.add(node.line, f"{group.path}.overrides.model_path", "it must be a text")
            if group.get("worker_type") != "placeholder" or node is not None:
                lines_by_path.setdefault(
                    path, (node.line if node else group.line, f"{group.path}.overrides.model_path")
                )
        if len(lines_by_path) > 1:
            first, second = list(lines_by_path)[:2]
            line, key = lines_by_path[second] if second != default else lines_by_path[first]
            self._problems.add(
                line, key,
                f"all groups of a model have one model_path, and these have {first or 'none'!r} and "
                f"{second or 'none'!r}; make it a model of its own",
            )  # fmt: skip
        path = next(iter(lines_by_path), default)
        if not path and any(group.get("worker_type") in _SERVING for group in model.get("server_groups", ())):
            self._complain(model, "model_path", "it is required where there is no --hf-checkpoint or hf_checkpoint")
        return path

    def _types(self, model: Section, groups: Sequence[Group]) -> None:
        """Check the worker types: regular, or prefill with decode."""
        lines = {group.worker_type: group for group in reversed(groups)}
        disaggregated = [lines[kind] for kind in ("prefill", "decode") if kind in lines]
        if "regular" in lines and disaggregated:
            paired = disaggregated[0]
            self._problems.add(
                max(lines["regular"].line, paired.line), f"{model.path}.server_groups",
                f"regular engines (line {lines['regular'].line}) and {paired.worker_type} ones (line {paired.line}) "
                "cannot serve one model together: all regular, or prefill with decode",
            )  # fmt: skip
        elif len(disaggregated) == 1:
            present_type = disaggregated[0].worker_type
            missing = "decode" if present_type == "prefill" else "prefill"
            self._problems.add(
                disaggregated[0].line, f"{disaggregated[0].path}.worker_type",
                f"{present_type} engines need {missing} ones, and the model has none",
            )  # fmt: skip
        elif "encoder" in lines and "regular" not in lines and not disaggregated:
            self._problems.add(
                lines["encoder"].line, f"{lines['encoder'].path}.worker_type",
                "encoders need regular engines, or prefill with decode, and the model has none",
            )  # fmt: skip

    def _keys(self, groups: list[Group]) -> list[Group]:
        """Return the groups with names in slots: the given name, or the worker type, numbered from the second."""
        counts: Counter[str] = Counter()
        keyed_groups: list[Group] = []
        used_keys: set[str] = set()
        for group in groups:
            counts[group.worker_type] += 1
            number = counts[group.worker_type]
            key = group.key or f"{group.worker_type}{number if number > 1 else ''}"
            if not group.key and group.worker_type == "regular" and number == 1:
                key = ""
            if group.worker_type and key in used_keys:
                self._problems.add(group.line, f"{group.path}.name", f"another group of the model is called {key!r}")
            if group.worker_type:
                used_keys.add(key)
            keyed_groups.append(Group(**{**vars(group), "key": key}))
        return keyed_groups

    def _distinct_slots(self, models: Sequence[Model]) -> None:
        """Report models with equal slots: model "a" with group "b" has the slots of a model "a-b"."""
        model_of_stem: dict[str, Model] = {}
        for model in models:
            for group in model.groups:
                stem = slot_stem(model, group)
                first_model = model_of_stem.setdefault(stem, model)
                if first_model is not model and first_model.name != model.name:
                    self._problems.add(
                        group.line, group.path, f"its slots {stem}-0, ... are those of model {first_model.name!r}"
                    )

    # The fleet.

    def _total(self, models: Sequence[Model]) -> int:
        total = sum(group.num_gpus for model in models for group in model.groups)
        flag_total = self._context.flags.num_gpus
        expected_total = flag_total if flag_total is not None else self._context.fleet.get("num_gpus")
        if expected_total is not None and expected_total != total and not self._context.flags.external_addresses:
            parts = ", ".join(
                f"{model.name} {sum(group.num_gpus for group in model.groups)}" for model in models if model.groups
            )
            message = f"the groups have {total} GPUs ({parts}), not {expected_total}"
            if flag_total is not None:
                self._problems.add(0, "--rollout-num-gpus", message, source=COMMAND_LINE)
            else:
                self._complain(self._context.fleet, "num_gpus", message)
        elif total > MOST:
            self._complain(self._context.fleet, "num_gpus", f"the groups have {total} GPUs, and {MOST} are the most")
        return total

    def _interface(self, network: Section) -> str:
        interface: str = network.get("interface", "")
        if "/" in interface:
            try:
                ipaddress.ip_network(interface)
            except ValueError as error:
                self._complain(network, "interface", f"{interface!r} is no network: {error}")
        return interface


def slot_stem(model: Model, group: Group) -> str:
    """Return the start of the slots of a group, before "-0"."""
    return f"{model.name}-{group.key}" if group.key else model.name

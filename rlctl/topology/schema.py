"""The keys of a topology file, as a table: the source of the reader, the JSON Schema and the reference page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlctl.topology.problems import Problems, did_you_mean

if TYPE_CHECKING:
    from rlctl.topology.document import Node

WORKER_TYPES = ("regular", "prefill", "decode", "encoder", "placeholder")
POLICIES = ("round_robin", "consistent_hashing", "cache_aware", "random", "power_of_two", "bucket", "manual")
DEVICES = ("auto", "cpu", "cuda")
LAUNCHERS = ("local", "ray")
HEALING = ("automatic", "by_hand")
ROUTERS = ("sglang-router",)

MOST = 16384
"""Largest whole number: a larger fleet is a typing error."""

_WORDS = {
    "string": "a text",
    "share": "a whole number or a text such as 50%",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "strings": "a list of texts",
    "integers": "a list of whole numbers",
    "settings": "settings (NAME: VALUE)",
    "section": "keys and values",
    "list": "a list",
}


@dataclass(frozen=True)
class Key:
    """A key of a section.

    Attributes:
        kind: "string", "integer", "number", "share" (a whole number or a percentage, read as text), "boolean",
            "strings", "integers", "settings" (free names), "section" or "list".
        meaning: meaning, in a sentence.
        default: default in words; "" for no default.
        choices: values that a string may have.
        least: smallest number.
        of: keys of the section, or of each item of the list.
        alias: older name of the key.
    """

    name: str
    kind: str
    meaning: str
    default: str = ""
    required: bool = False
    choices: tuple[str, ...] = ()
    least: float | None = None
    of: tuple[Key, ...] = ()
    alias: str = ""

    @property
    def expected(self) -> str:
        """The valid values, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        words = _WORDS[self.kind]
        most = f" and {MOST} at most" if self.kind in ("integer", "integers") else ""
        return words if self.least is None else f"{words}, {self.least:g} or more{most}"


ROUTER = (
    Key("backend", "string", "The program.", required=True, choices=ROUTERS),
    Key("listen", "string", "HOST:PORT where it answers; port 0 takes any.", "a free port of the gateway's host"),
)
GROUP = (
    Key("name", "string", "Name of the group in its slots.", "the worker type; the first regular group goes unnamed"),
    Key("worker_type", "string", "What its engines are for.", required=True, choices=WORKER_TYPES),
    Key("num_gpus", "integer", "GPUs of the group, all its engines together (ranks, on a CPU).", least=1),
    Key("num_gpus_per_engine", "integer", "GPUs of each engine.", "the model's", least=1),
    Key("external", "strings", "Servers that run already, HOST:PORT each; they are attached to and never ended."),
    Key("overrides", "settings", "Arguments of the engine; they override all others. Dashes or underscores.", "{}"),
    Key("device", "string", "What the ranks compute on.", "the model's", choices=DEVICES),
    Key("environment", "settings", "Environment variables of its processes; they override the model's.", "{}"),
    Key("cpus_per_rank", "integer", "Cores that each rank is bound to.", "not bound", least=1),
    Key("stages", "list", "Pipeline stages of each engine, in order.", "one, main", of=(
        Key("name", "string", "Logical name that admin calls may address.", required=True),
        Key("num_gpus", "integer", "GPUs of the stage; all stages together have those of the engine.", required=True,
            least=1),
    )),
)  # fmt: skip
MODEL = (
    Key("name", "string", "Name of the model; it is unique.", required=True),
    Key("model_path", "string", "Directory of its checkpoint.", "hf_checkpoint"),
    Key("update_weights", "boolean", "Whether it receives weights; false freezes it.",
        "true if model_path is hf_checkpoint, else false"),
    Key("num_gpus_per_engine", "integer", "GPUs of each engine of all its groups.", "the fleet's", least=1),
    Key("server_groups", "list", "Groups of engines.", required=True, of=GROUP, alias="engine_groups"),
    Key("engine", "string", "Engine plug-in.", "the fleet's; sglang under `sglang:`"),
    Key("dtype", "string", "Dtype to hold the weights in.", "the checkpoint's"),
    Key("device", "string", "What the ranks compute on.", "the fleet's", choices=DEVICES),
    Key("overrides", "settings",
        "Arguments of the engine; they override --option and --sglang-*, and the group's override them.", "{}"),
    Key("environment", "settings", "Environment variables of its processes.", "{}"),
    Key("weight_version", "string", "Label of its first version, the checkpoint.", "initial"),
    Key("healing", "string",
        "Who heals late, restarted and DIRTY engines: the coordinator, or only `rlctl heal`.",
        "automatic", choices=HEALING),
    Key("min_healthy", "share",
        "Engines that drains, restarts, replacements and rolling updates leave routable: a number, or a share such as"
        " 50%, rounded up.", "no limit"),
    Key("router_policy", "string", "How its gateway picks an engine.", "the fleet's", choices=POLICIES),
    Key("gateway", "string", "HOST:PORT of its HTTP gateway; port 0 takes any.",
        "none, or one on the host of `fleet.gateways`"),
    Key("router", "section", "Router in front of its gateway, for its policies.", "the fleet's", of=ROUTER),
)  # fmt: skip
FLEET = (
    Key("name", "string", "Name of the fleet on this machine.", "default"),
    Key("hf_checkpoint", "string", "Checkpoint of models that name none."),
    Key("num_gpus", "integer", "GPUs of all groups together; checked.", "their sum", least=0),
    Key("num_gpus_per_engine", "integer", "GPUs of each engine.", "1", least=1),
    Key("num_gpus_per_node", "integer", "GPUs of a node.", "8", least=1),
    Key("engine", "string", "Engine plug-in of models that name none.", "torch; sglang under `sglang:`"),
    Key("device", "string", "What the ranks compute on; auto: cuda where there are GPUs.", "auto", choices=DEVICES),
    Key("launcher", "string", "What starts the processes.", "local", choices=LAUNCHERS),
    Key("ray", "section", "Settings of the launcher ray.", of=(
        Key("address", "string", "Address of the cluster, HOST:PORT.", "RAY_ADDRESS, or the cluster that runs here"),
        Key("placement_group", "string", "Name or id of an existing placement group, for the engines.",
            "a new one for each engine"),
        Key("bundles", "integers", "Bundles of the group for engines, in the order of the plan's GPUs.", "all, by node",
            least=0),
        Key("bundle_share", "number", "Share of its bundle that a rank takes, 1 at most; slime's engines take 0.2.",
            "1", least=0.01),
    )),
    Key("listen", "string", "Where the coordinator listens, HOST:PORT.", "127.0.0.1:5080"),
    Key("router_policy", "string", "How gateways pick an engine.", "the gateway's own", choices=POLICIES),
    Key("gateways", "string", "Host of the gateways of models without the key `gateway`, each on a free port.", "none"),
    Key("router", "section", "Router in front of each gateway, unless the model has a router of its own.", "none",
        of=ROUTER[:1]),
    Key("auth", "section", "Who may call.", of=(
        Key("token_file", "string", "File with the bearer token.", "RLCTL_TOKEN_FILE, RLCTL_TOKEN"),
        Key("insecure", "boolean", "Bind an address that other hosts can reach, without a token or certificates.",
            "false"),
        Key("tls", "string", "Directory of the certificates of all processes, made by `rlctl certs init`.",
            "plain text"),
    )),
    Key("network", "section", "Where the engines' servers bind.", "loopback", of=(
        Key("interface", "string", "Interface (eth0) or network (10.0.0.0/8, fd00::/8) of this host to bind to."),
        Key("advertise", "string", "Host under which others reach this one.", "the address that is bound"),
    )),
    Key("metrics", "boolean",
        "Coordinator, stages and gateways serve metrics, each on a free port of the host that it binds.", "false"),
    Key("web", "string", "HOST:PORT of the coordinator's page; port 0 takes any.", "none"),
    Key("restart", "section", "Restarts of engines that end by themselves.", of=(
        Key("policy", "string", "Whether such an engine is started again.", "on-failure",
            choices=("on-failure", "never")),
        Key("backoff_s", "number", "Seconds before the first restart; doubles up to a minute.", "1", least=0.1),
        Key("limit", "integer",
            "Number of restarts within `within_s`. Then the engine is FAILED until `rlctl restart`. 0: no limit.", "20",
            least=0),
        Key("within_s", "number", "Seconds in which restarts count.", "1800", least=1),
    )),
    Key("heal_timeout_s", "number", "Seconds that a new engine may take to be brought to the published version.",
        "300", least=1),
    Key("load_timeout_s", "number", "Seconds that an engine may take to load, from the start of its rank 0.", "1860",
        least=1),
    Key("owner_grace_s", "number", "Seconds that the owner of an update may be silent after a write has failed.", "5",
        least=0.1),
    Key("heal_grace_s", "number", "Seconds that a DIRTY engine is left to the next update before it is healed.", "60",
        least=0.1),
    Key("drain_timeout_s", "number", "Seconds that requests have to end before their engine is removed.", "60",
        least=0),
)  # fmt: skip
FILE = (
    Key("fleet", "section", "Settings of the whole fleet.", of=FLEET),
    Key("models", "list", "The models.", of=MODEL),
    Key("sglang", "list", "The models, as slime's --sglang-config has them: the same keys, engine sglang.", of=MODEL),
)


@dataclass(frozen=True)
class Section:
    """A section as read: valid values only, but lines and paths of all keys.

    Attributes:
        values: values by the names of the table.
        lines: line of each present key.
        written: name of each key as written in the file.
    """

    path: str
    line: int
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value."""
        return self.values.get(name, default)

    def at(self, name: str) -> tuple[int, str]:
        """Return (line, path) of a key for a problem."""
        written = self.written.get(name, name)
        return self.lines.get(name, self.line), f"{self.path}.{written}".removeprefix(".")


def read(keys: tuple[Key, ...], node: Node, path: str, problems: Problems) -> Section:
    """Read a section by the table. An invalid key is reported to ``problems`` and left out."""
    section = Section(path, node.line)
    if not isinstance(node.value, dict):
        problems.add(node.line, path, f"it must be {_WORDS['section']}, not {_shown(node)}")
        return section
    table = {name: key for key in keys for name in (key.name, key.alias) if name}
    for name, value in node.value.items():
        below = f"{path}.{name}".removeprefix(".")
        key = table.get(name)
        if key is None:
            hint = did_you_mean(name, table) or f"; there are: {', '.join(key.name for key in keys)}"
            problems.add(value.line, below, f"there is no such key{hint}")
            continue
        if key.name in section.lines:
            problems.add(value.line, below, f"it is the same key as {section.written[key.name]!r}")
            continue
        if value.value is None and not key.required:
            continue  # `key:` without a value is as if absent
        section.lines[key.name] = value.line
        section.written[key.name] = name
        content = _value(key, value, below, problems)
        if content is not None:
            section.values[key.name] = content
    for key in keys:
        if key.required and key.name not in section.lines:
            problems.add(node.line, f"{path}.{key.name}".removeprefix("."), f"it is required: {key.expected}")
    return section


def _value(key: Key, node: Node, path: str, problems: Problems) -> Any:
    """Return a value of the key's kind, or None after a problem."""
    value = node.value
    match key.kind:
        case "section":
            return read(key.of, node, path, problems)
        case "list" if isinstance(value, list):
            return [read(key.of, item, f"{path}[{index}]", problems) for index, item in enumerate(value)]
        case "settings" if isinstance(value, dict):
            return dict(value)  # scalars, lists or mappings: the owner of the names checks the values
        case "strings" if isinstance(value, list):
            if all(isinstance(item.value, str) for item in value):
                return tuple(str(item.value) for item in value)
        case "integers" if isinstance(value, list):
            if all(_whole(key, item.value) for item in value):
                return tuple(item.value for item in value)
        case "boolean" if isinstance(value, bool):
            return value
        case "integer" if _whole(key, value):
            return value
        case "share" if _whole(key, value) or isinstance(value, str):
            return str(value)
        case "number" if isinstance(value, int | float) and not isinstance(value, bool):
            if key.least is not None and key.least <= value < float("inf"):
                return float(value)
        case "string" if isinstance(value, str) and value:
            if not key.choices or value in key.choices:
                return value
            problems.add(node.line, path, f"{value!r} is not {key.expected}{did_you_mean(value, key.choices)}")
            return None
    problems.add(node.line, path, f"it must be {key.expected}, not {_shown(node)}")
    return None


def _whole(key: Key, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (key.least or 0) <= value <= MOST


def _shown(node: Node) -> str:
    match node.value:
        case None:
            return "empty"
        case bool():
            return "true" if node.value else "false"
        case dict():
            return "keys and values"
        case list():
            return "a list"
        case str():
            return repr(node.value[:60])
    return str(node.value)[:60]

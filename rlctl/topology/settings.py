"""Arguments and environment variables of engines: the cascade of each, checked against the engine's options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rlctl.topology.context import Context
from rlctl.topology.document import Node
from rlctl.topology.problems import COMMAND_LINE, did_you_mean
from rlctl.topology.schema import Section


class Settings:
    """The engine settings of a file."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._problems = context.problems

    def overrides(self, group: Section, model: Section, engine: str, external: Sequence[str]) -> dict[str, str]:
        """Return the arguments of an engine: of --sglang-* and --option, then of the model, then of the group.

        A later argument replaces an earlier argument of the same name. null and false remove the earlier argument: a
        switch is then off.
        """
        arguments: dict[str, str | None] = {}
        base = {**(self._context.flags.sglang if engine == "sglang" else {}), **self._context.flags.options}
        places: dict[str, tuple[int, str, str]] = {}
        for name, value in base.items():
            plain = name.replace("-", "_")
            arguments[plain] = value
            flag = f"--option {name}" if name in self._context.flags.options else f"--sglang-{name.replace('_', '-')}"
            places[plain] = (0, flag, COMMAND_LINE)
        for section in (model, group):
            for name, (written, node) in self.named(section).items():
                if name == "model_path":  # resolved with the checkpoint paths
                    if section is model:
                        key = f"{section.path}.overrides.{written}"
                        self._problems.add(node.line, key, "write model_path in the model")
                    continue
                arguments[name] = None if node.value is None or node.value is False else _text(node)
                places[name] = (node.line, f"{section.path}.overrides.{written}", "")
        overrides = {name: value for name, value in arguments.items() if value is not None}
        if not external:
            self._known(engine, overrides, {name: places[name] for name in arguments})
        return overrides

    def _known(self, engine: str, overrides: Mapping[str, str], places: Mapping[str, tuple[int, str, str]]) -> None:
        if not places or engine not in self._context.engines.installed:
            return
        options = self._context.engines.known_options(engine, overrides)
        if options is None:
            line, key, source = next(iter(places.values()))
            self._problems.add(
                line, key, f"not checked: {engine} is not installed here, or does not tell its arguments",
                warning=True, source=source,
            )  # fmt: skip
            return
        for name, (line, key, source) in places.items():
            if name in options.taken:
                self._problems.add(line, key, f"rlctl sets {name} itself: {options.taken[name]}", source=source)
            elif name not in options.names:
                hint = did_you_mean(name, options.names)
                self._problems.add(line, key, f"{options.origin} has no argument {name!r}{hint}", source=source)

    def environment(self, section: Section) -> dict[str, str]:
        """Return the environment variables of a model or a group."""
        variables = {}
        for name, node in section.get("environment", {}).items():
            if isinstance(node.value, dict | list) or node.value is None or not name or "=" in name:
                self._problems.add(node.line, f"{section.path}.environment.{name}", "it must be NAME: TEXT")
            elif name.startswith("RLCTL_TOKEN"):
                self._problems.add(
                    node.line, f"{section.path}.environment.{name}", "tokens belong in fleet.auth.token_file"
                )
            elif name.startswith("RLCTL_TLS"):
                self._problems.add(
                    node.line, f"{section.path}.environment.{name}", "certificates belong in fleet.auth.tls"
                )
            else:
                variables[name] = _text(node)
        return variables

    def named(self, section: Section) -> dict[str, tuple[str, Node]]:
        """Return (name as written, value) of overrides, by name with underscores.

        Two spellings of a name are a problem.
        """
        overrides: dict[str, tuple[str, Node]] = {}
        for name, node in section.get("overrides", {}).items():
            plain = name.removeprefix("--").replace("-", "_")
            if plain in overrides:
                self._problems.add(
                    node.line,
                    f"{section.path}.overrides.{name}",
                    f"it is {plain} of line {overrides[plain][1].line} again",
                )
            overrides[plain] = (name, node)
        return overrides


def _text(node: Node) -> str:
    """Return a setting as text for the engine: true, 0.85, a text; lists and mappings as JSON."""
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

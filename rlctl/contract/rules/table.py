"""The table of rules: one rule for each type of request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message

from rlctl.contract.rules import fields

M = TypeVar("M", bound=Message)


class Rules(dict[type[Message], Callable[..., None]]):
    """Rules by type of request. A rule raises the refusal of an invalid request."""

    def of(self, kind: type[M]) -> Callable[[Callable[[M], None]], Callable[[M], None]]:
        """Decorate the rule for a type of request."""

        def register(rule: Callable[[M], None]) -> Callable[[M], None]:
            self[kind] = rule
            return rule

        return register

    def require(self, kind: type[Message], *names: str) -> None:
        """Add the rule that these fields are set."""

        def rule(request: Message) -> None:
            for name in names:
                fields.required(getattr(request, name), name)

        self[kind] = rule

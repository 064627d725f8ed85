"""A reader of pickles that executes nothing: a stack machine with few opcodes and with names as data.

The reader imports no module, calls no object and sets no attribute. Reading ends at a name outside the table of
constructors, an opcode outside :data:`_OPCODES`, or a size above a limit. Every opcode does a bounded amount of work,
and no code walks the result. Neither circular nor repeated references cost more than their opcodes.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlctl.contract.errors import Reason, RlctlError

MOST_BYTES = 64 << 20
"""Size of the largest pickle. A pickle has handles and names, about 200 bytes for each tensor."""

MOST_OPCODES = 2_000_000
"""Most opcodes of all pickles of a request."""

_MOST_MARKS = 64
_MOST_LONG_BYTES = 16
_PROTOCOLS = range(2, 6)


@dataclass(frozen=True)
class Name:
    """An accepted name of a module, as data."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Instance:
    """An object without a constructor's arguments: its class and its attributes, as data."""

    cls: Name
    state: Mapping[str, Any] = field(default_factory=dict)


Constructor = Callable[[tuple[Any, ...]], Any]


@dataclass(frozen=True)
class Names:
    """The accepted names.

    Attributes:
        values: names that stand for a value.
        constructors: callable names, and the pure function that reads the arguments. The function raises ValueError.
        classes: names of classes with instances that have attributes.
        unsupported: names that are known but not supported, with the cause and the next step.
    """

    values: Mapping[Name, Any]
    constructors: Mapping[Name, Constructor]
    classes: frozenset[Name]
    unsupported: Mapping[Name, tuple[str, str]]


@dataclass
class Budget:
    """Remaining opcodes and bytes for the pickles of a request, including nested pickles."""

    opcodes: int = MOST_OPCODES
    bytes: int = 4 * MOST_BYTES


class PickleReader:
    """Reads one pickle."""

    def __init__(self, names: Names, budget: Budget, where: str) -> None:
        """``where``: path of the request's field, for errors."""
        self._names = names
        self._budget = budget
        self._where = where
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._stopped = False
        self._version = -1
        self._size = 0

    def read(self, data: bytes) -> Any:
        """Return the pickle's value: lists, tuples, dicts, texts, bytes, integers, names, results of constructors.

        Raises FIELD_INVALID for malformed and refused content, UNSUPPORTED for known handles that are not readable.
        """
        if len(data) > MOST_BYTES:
            raise self.invalid(f"the pickle has {len(data)} bytes; the limit is {MOST_BYTES}")
        self._budget.bytes -= len(data)
        if self._budget.bytes < 0:
            raise self.invalid(f"the pickles of the request have more than {4 * MOST_BYTES} bytes")
        self._size = len(data)
        stream = io.BytesIO(data)
        for opcode, argument in self._opcodes(stream):
            self._budget.opcodes -= 1
            if self._budget.opcodes < 0:
                raise self.invalid(f"the pickles of the request have more than {MOST_OPCODES} opcodes")
            step = _OPCODES.get(opcode)
            if step is None:
                raise self.invalid(f"the pickle has the opcode {opcode}, which is not read")
            if self._version < 0 and opcode != "PROTO":
                raise self.invalid("the pickle does not begin with its protocol")
            step(self, argument)
        if not self._stopped or len(self._stack) != 1 or self._marks or stream.read(1):
            raise self.invalid("the pickle is not one whole value")
        return self._stack[0]

    def invalid(self, cause: str) -> RlctlError:
        return Reason.FIELD_INVALID.error(
            cause,
            field=self._where,
            next_step="Serialise pairs of names and tensors, or a flattened bucket, with SGLang's "
            "MultiprocessingSerializer.",
        )

    def _opcodes(self, stream: io.BytesIO) -> Iterator[tuple[str, Any]]:
        steps = pickletools.genops(stream)
        while True:
            try:
                opcode, argument, _ = next(steps)
            except StopIteration:
                return
            except Exception as error:  # noqa: BLE001 - errors of the decoder have no common class
                raise self.invalid(f"the pickle is malformed: {type(error).__name__}") from None
            yield opcode.name, argument

    # Opcodes; ``_OPCODES`` has the method of each.

    def proto(self, version: int) -> None:
        if self._version >= 0 or version not in _PROTOCOLS:
            raise self.invalid(f"the pickle has protocol {version} at a wrong place, or an unknown one")
        self._version = version

    def stop(self, _: None) -> None:
        self._stopped = True

    def frame(self, size: int) -> None:
        if size > self._size:
            raise self.invalid("the pickle has a frame that is longer than itself")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def push_long(self, value: int) -> None:
        if value.bit_length() > 8 * _MOST_LONG_BYTES:
            raise self.invalid("the pickle has a number of more than 16 bytes")
        self._stack.append(value)

    def mark(self, _: None) -> None:
        if len(self._marks) >= _MOST_MARKS:
            raise self.invalid(f"the pickle nests deeper than {_MOST_MARKS} levels")
        self._marks.append(len(self._stack))

    def make_tuple(self, _: None) -> None:
        self._stack.append(tuple(self._since_mark()))

    def append(self, _: None) -> None:
        self._extend([self._pop()])

    def appends(self, _: None) -> None:
        self._extend(self._since_mark())

    def set_item(self, _: None) -> None:
        value, key = self._pop(), self._pop()
        self._update([key, value])

    def set_items(self, _: None) -> None:
        self._update(self._since_mark())

    def memoize(self, _: None) -> None:
        self._memo.append(self._top())

    def put(self, number: int) -> None:
        """BINPUT, LONG_BINPUT: the numbers count up, as in every pickler's output."""
        if number != len(self._memo):
            raise self.invalid(f"the pickle stores value {number} out of order")
        self._memo.append(self._top())

    def get(self, number: int) -> None:
        if number >= len(self._memo):
            raise self.invalid(f"the pickle reads value {number} before it is stored")
        self._stack.append(self._memo[number])

    def named(self, text: str) -> None:
        module, _, name = text.partition(" ")
        self._name(module, name)

    def stack_named(self, _: None) -> None:
        name, module = self._pop(), self._pop()
        if type(module) is not str or type(name) is not str:
            raise self.invalid("the pickle has a name that is no text")
        self._name(module, name)

    def reduce(self, _: None) -> None:
        """REDUCE: read a constructor's arguments as data."""
        arguments, name = self._pop(), self._pop()
        constructor = self._names.constructors.get(name) if isinstance(name, Name) else None
        if constructor is None or type(arguments) is not tuple:
            raise self.invalid("the pickle calls a function other than the constructors of tensors")
        try:
            self._stack.append(constructor(arguments))
        except ValueError as error:
            raise self.invalid(f"{name}: {error}") from None

    def new_object(self, _: None) -> None:
        arguments, name = self._pop(), self._pop()
        if not isinstance(name, Name) or name not in self._names.classes or arguments != ():
            raise self.invalid("the pickle makes an object of a class that is not read")
        self._stack.append(Instance(name))

    def build(self, _: None) -> None:
        """BUILD: set the attributes of an instance, once."""
        state, instance = self._pop(), self._top()
        if type(instance) is not Instance or instance.state or type(state) is not dict:
            raise self.invalid("the pickle sets attributes of what has none")
        instance.state = state

    # Parts.

    def fixed_tuple(self, size: int) -> None:
        values = [self._pop() for _ in range(size)]
        self._stack.append(tuple(reversed(values)))

    def _name(self, module: str, text: str) -> None:
        name = Name(module, text)
        unsupported = self._names.unsupported.get(name)
        if unsupported is not None:
            cause, next_step = unsupported
            raise Reason.UNSUPPORTED.error(cause, field=self._where, next_step=next_step)
        if name in self._names.values:
            self._stack.append(self._names.values[name])
        elif name in self._names.constructors or name in self._names.classes:
            self._stack.append(name)
        else:
            raise self.invalid(f"the pickle names {str(name)[:100]!r}, which is not read")

    def _floor(self) -> int:
        return self._marks[-1] if self._marks else 0

    def _pop(self) -> Any:
        if len(self._stack) <= self._floor():
            raise self.invalid("the pickle takes a value from an empty stack")
        return self._stack.pop()

    def _top(self) -> Any:
        if len(self._stack) <= self._floor():
            raise self.invalid("the pickle takes a value from an empty stack")
        return self._stack[-1]

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise self.invalid("the pickle ends a list that it has not begun")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            raise self.invalid("the pickle appends to a value that is no list")
        target.extend(values)

    def _update(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not dict or len(values) % 2 or any(type(key) is not str for key in values[::2]):
            raise self.invalid("the pickle sets entries of a value that is no dict with text keys")
        target.update(zip(values[::2], values[1::2], strict=True))


Step = Callable[[PickleReader, Any], None]

_OPCODES: dict[str, Step] = {
    "PROTO": PickleReader.proto,
    "FRAME": PickleReader.frame,
    "STOP": PickleReader.stop,
    "NONE": lambda reader, _: reader.push(None),
    "NEWTRUE": lambda reader, _: reader.push(True),
    "NEWFALSE": lambda reader, _: reader.push(False),
    "BININT": PickleReader.push,
    "BININT1": PickleReader.push,
    "BININT2": PickleReader.push,
    "LONG1": PickleReader.push_long,
    "SHORT_BINUNICODE": PickleReader.push,
    "BINUNICODE": PickleReader.push,
    "BINUNICODE8": PickleReader.push,
    "SHORT_BINBYTES": PickleReader.push,
    "BINBYTES": PickleReader.push,
    "BINBYTES8": PickleReader.push,
    "EMPTY_TUPLE": lambda reader, _: reader.push(()),
    "EMPTY_LIST": lambda reader, _: reader.push([]),
    "EMPTY_DICT": lambda reader, _: reader.push({}),
    "MARK": PickleReader.mark,
    "TUPLE": PickleReader.make_tuple,
    "TUPLE1": lambda reader, _: reader.fixed_tuple(1),
    "TUPLE2": lambda reader, _: reader.fixed_tuple(2),
    "TUPLE3": lambda reader, _: reader.fixed_tuple(3),
    "APPEND": PickleReader.append,
    "APPENDS": PickleReader.appends,
    "SETITEM": PickleReader.set_item,
    "SETITEMS": PickleReader.set_items,
    "MEMOIZE": PickleReader.memoize,
    "BINPUT": PickleReader.put,
    "LONG_BINPUT": PickleReader.put,
    "BINGET": PickleReader.get,
    "LONG_BINGET": PickleReader.get,
    "GLOBAL": PickleReader.named,
    "STACK_GLOBAL": PickleReader.stack_named,
    "REDUCE": PickleReader.reduce,
    "NEWOBJ": PickleReader.new_object,
    "BUILD": PickleReader.build,
}
"""Every accepted opcode, by its name in the standard library."""

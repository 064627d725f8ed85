"""Attacks by pickle, and mutations of payloads. No content of a payload may reach :func:`witness`."""

from __future__ import annotations

import random

from pickle_assembler import TENSOR, Call, Global, New, assemble


class Witness:
    """Counts calls."""

    calls = 0

    def __call__(self, *arguments: object) -> None:
        type(self).calls += 1


def witness(*_: object) -> None:
    """Count a call."""
    Witness.calls += 1


ATTACKS = [
    Call(Global("os", "system"), ("true",)),
    Call(Global("builtins", "eval"), ("1",)),
    Call(Global("builtins", "getattr"), (TENSOR, "x")),
    Call(Global(__name__, "witness"), ()),
    Call(Global("sglang.srt.utils.common", "dynamic_import"), ("os.system",)),
    Call(Global("functools", "partial"), (TENSOR,)),
    Call(Global("torch.storage", "_load_from_bytes"), (b"x",)),
    Call(Global("torch", "load"), ("/etc/passwd",)),
    New(Global("torch", "Tensor"), {"__class__": 1}),
    New(Global(__name__, "Witness"), {"calls": 7}),
    Call(Global("torch", "float32"), ()),
    Call(TENSOR, ((4,),)),
    Call(Global("torch.Size", "__class__"), ()),
    Call(Global("torch", "Size.__class__"), ()),
]

INJECTIONS = [assemble(attack)[2:-1] for attack in ATTACKS] + [b"cos\nsystem\n(X\x04\x00\x00\x00truetR"]


def mutated(random_: random.Random, data: bytes) -> bytes:
    """Return a payload with changed bits, opcodes or lengths, with added code, or truncated."""
    changed = bytearray(data)
    for _ in range(random_.choice((1, 1, 2, 5, 20))):
        place = random_.randrange(len(changed))
        match random_.randrange(7):
            case 0:
                changed[place] ^= 1 << random_.randrange(8)
            case 1:
                changed[place] = random_.randrange(256)
            case 2:
                del changed[place : place + random_.randrange(1, 20)]
            case 3:
                changed[place:place] = random_.choice(INJECTIONS)
            case 4:
                changed[place:place] = random_.choice(
                    (b"R", b"b", b"\x81", b"(", b"h\x00", b"e", b"u", b"t", b"0", b"2")
                )
            case 5:
                changed[place:place] = b"\x8e" + random_.randbytes(8)
            case 6:
                other = random_.randrange(len(changed))
                changed[place:place] = changed[other : other + random_.randrange(1, 60)]
        if not changed:
            return b""
    return bytes(changed[: random_.randrange(len(changed))] if random_.random() < 0.1 else changed)

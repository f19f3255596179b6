"""Valid messages of any type, made from the types themselves: a new message or field is covered without a line here."""

import random
from typing import Any

import msgspec
from msgspec import inspect

HEX = "0123456789abcdef"
TEXTS = (
    "",
    "a",
    "layers.0.attn",
    "../../etc/passwd",
    "\x1b[2J\x1b]0;x\x07",
    "\u202egnp",
    "\U0001f600",
    "0.0.0.0",
    "x" * 300,
)
PATTERNS = {
    r"^[0-9a-f]{32}\Z": (32,),
    r"^[0-9a-f]{8}\Z": (8,),
    r"^[0-9a-f]{8}-[0-9a-f]{8}\Z": (8, 8),
}
"""Runs of hex digits with a dash between them. An unknown pattern is an error: teach it here."""


def sample(kind: Any, rng: random.Random) -> Any:
    """A value that fits ``kind``, a type or what :func:`msgspec.inspect.type_info` says of one. Bounds are favoured."""
    return _sample(inspect.type_info(kind), rng, 0)


def _sample(info: inspect.Type, rng: random.Random, depth: int) -> Any:
    match info:
        case inspect.StructType(cls=cls, fields=fields):
            chosen = {
                field.name: _sample(field.type, rng, depth + 1)
                for field in fields
                if field.required or rng.random() < 0.7
            }
            return cls(**chosen)
        case inspect.UnionType(types=types):
            return _sample(types[rng.randrange(len(types))], rng, depth)
        case inspect.IntType():
            return _integer(info, rng)
        case inspect.FloatType():
            return _float(info, rng)
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.NoneType():
            return None
        case inspect.LiteralType(values=values):
            return values[rng.randrange(len(values))]
        case inspect.StrType():
            return _text(info, rng)
        case inspect.BytesType(min_length=least, max_length=most):
            length = _length(least, most, rng, 64)
            return rng.randbytes(length)
        case inspect.ListType() | inspect.VarTupleType():
            length = _length(info.min_length, info.max_length, rng, 3 if depth < 4 else 1)
            items = [_sample(info.item_type, rng, depth + 1) for _ in range(length)]
            return items if isinstance(info, inspect.ListType) else tuple(items)
        case inspect.DictType(key_type=key, value_type=value):
            return {_sample(key, rng, depth + 1): _sample(value, rng, depth + 1) for _ in range(rng.randrange(3))}
        case _:
            raise NotImplementedError(f"no sample for {info}")


def _integer(info: inspect.IntType, rng: random.Random) -> int:
    low = info.ge if info.ge is not None else info.gt + 1 if info.gt is not None else -(1 << 63)
    high = info.le if info.le is not None else info.lt - 1 if info.lt is not None else (1 << 64) - 1
    choice = rng.randrange(6)
    if choice < 2:
        return (low, high)[choice]
    return min(
        high, max(low, rng.choice((0, 1, 2, 8, 64, 4096, 1 << 21, 1 << 31, 1 << 32, 1 << 62, rng.getrandbits(40))))
    )


def _float(info: inspect.FloatType, rng: random.Random) -> float:
    low = info.ge if info.ge is not None else info.gt + 5e-324 if info.gt is not None else -1e308
    high = info.le if info.le is not None else 1e308
    return min(high, max(low, rng.choice((low, high, 0.0, 0.5, 59.96, 3600.0, 1e10, rng.random() * 100))))


def _text(info: inspect.StrType, rng: random.Random) -> str:
    if info.pattern is not None:
        return "-".join("".join(rng.choice(HEX) for _ in range(run)) for run in PATTERNS[info.pattern])
    text = rng.choice(TEXTS)[: info.max_length]
    return text.ljust(info.min_length or 0, "m")


def _length(least: int | None, most: int | None, rng: random.Random, many: int) -> int:
    least = least or 0
    return rng.randint(least, max(least, min(most if most is not None else many, many)))


def encoded(kind: Any, seed: int) -> bytes:
    """A valid message as MessagePack; the same for the same seed."""
    return msgspec.msgpack.encode(sample(kind, random.Random(seed)))

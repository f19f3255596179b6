"""Changes to a message as a tree: what a byte flipper alone would break long before it gets past the first length."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

MAX_NODES = 400
NUMBERS = (
    -1, 0, 1, 2, 255, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
    -(2**31), -(2**63),
)  # fmt: skip
FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 0.5, 1e308, 5e-324, -1.0)
TEXTS = (
    "",
    "a",
    "\0",
    "/",
    "/dev/zero",
    "../../x",
    "0.0.0.0",
    "::1",
    "\x1b[2J",
    "é",
    "0" * 32,
    "f" * 32,
    "ffffffff",
    "m" * 300,
)
BLOBS = (b"", b"\0", b"\xff" * 8, b"\0" * 16, b"x" * 28, b"\xff" * 32, bytes(128))


class Format(NamedTuple):
    """How trees travel."""

    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    has_bytes: bool


MSGPACK = Format(msgspec.msgpack.Decoder().decode, msgspec.msgpack.Encoder().encode, has_bytes=True)
# Not msgspec's JSON: Python's own lets NaN, lone surrogates and integers of any size through, as web frameworks do.
JSON = Format(json.loads, lambda tree: json.dumps(tree).encode(), has_bytes=False)


class TreeMutator:
    """One of these per target; called by libFuzzer for every input that it wants changed."""

    def __init__(self, form: Format, seeds: Sequence[bytes], change_bytes: Callable[[bytes, int], bytes]) -> None:
        """``change_bytes``: libFuzzer's own mutation, of ``(data, largest size)``."""
        self._form = form
        self._change_bytes = change_bytes
        self._trees = [form.decode(seed) for seed in seeds]
        self._rng = random.Random()

    def __call__(self, data: bytes, max_size: int, seed: int) -> bytes:
        """Another input. The same for the same arguments."""
        rng = self._rng
        rng.seed(seed)
        if rng.random() < 0.2:
            return self._change_bytes(data, max_size)
        try:
            tree = self._form.decode(data)
        except (ValueError, RecursionError):  # it is not a tree
            tree = None
        try:
            if tree is None or rng.random() < 0.02:
                tree = self._copy(rng.choice(self._trees))
            for _ in range(1 + (rng.random() < 0.3) + 2 * (rng.random() < 0.1)):
                tree = self._change(tree)
            changed = self._form.encode(tree)
        except (ValueError, OverflowError, TypeError, RecursionError):  # what this format cannot say
            return self._change_bytes(data, max_size)
        return changed if len(changed) <= max_size else self._change_bytes(data, max_size)

    def _copy(self, tree: Any) -> Any:
        return self._form.decode(self._form.encode(tree))

    def _change(self, tree: Any) -> Any:
        places = list(_places(tree))
        if not places:
            return self._value(tree)
        rng = self._rng
        container, key = places[int(len(places) * rng.random())]
        action = int(10 * rng.random())
        if action < 5:
            container[key] = self._value(container[key])
        elif action == 5:
            del container[key]
        elif action == 6:
            _insert(container, key, container[key], rng)
        elif action == 7:
            other, there = places[int(len(places) * rng.random())]
            container[key] = self._copy_of(other[there])
        elif action == 8:
            others = list(_places(self._trees[int(len(self._trees) * rng.random())]))
            if others:
                other, there = others[int(len(others) * rng.random())]
                container[key] = self._copy_of(other[there])
        elif isinstance(container, dict):
            name = rng.choice(TEXTS)
            container[name] = self._value(None)
        else:
            container.reverse()
        return tree

    def _copy_of(self, value: Any) -> Any:
        return self._copy(value) if isinstance(value, (dict, list)) else value

    def _value(self, old: Any) -> Any:
        rng = self._rng
        if rng.random() < 0.6:
            if isinstance(old, bool):
                return not old
            if isinstance(old, int):
                return rng.choice(
                    (rng.choice(NUMBERS), old + 1, old - 1, old * 2, old ^ (1 << rng.randrange(63)), -old)
                )
            if isinstance(old, float):
                return rng.choice(FLOATS)
            if isinstance(old, str):
                return self._text(old)
            if isinstance(old, bytes):
                cut = rng.randrange(len(old) + 1)
                return rng.choice((rng.choice(BLOBS), old[:cut], old + old[:cut], old[:cut] + rng.randbytes(4)))
            if isinstance(old, list) and old:
                return rng.choice((old[:-1], old * rng.choice((2, 3, 40)), [old], old[0]))
        kind = int(9 * rng.random())
        if kind < 2:
            return rng.choice(NUMBERS)
        if kind == 2:
            return rng.choice(FLOATS)
        if kind == 3:
            return rng.choice(TEXTS)
        if kind == 4 and self._form.has_bytes:
            return rng.choice(BLOBS)
        if kind == 5:
            return rng.choice((None, True, False))
        if kind == 6:
            nested: Any = old
            for _ in range(rng.choice((1, 3, 30, 600))):
                nested = [nested]
            return nested
        if kind == 7:
            return [0] * rng.choice((0, 1, 9, 300))
        return {}

    def _text(self, old: str) -> str:
        rng = self._rng
        cut = rng.randrange(len(old) + 1)
        lone = "" if self._form.has_bytes else "\ud800"  # MessagePack's encoder refuses it; JSON's escapes it
        strange = rng.choice(("\0", "\n", "é", "\uff10", "G", lone, "a"))
        return rng.choice(
            (rng.choice(TEXTS), old[:cut], old[:cut] + strange + old[cut + 1 :], old + strange, old.upper(), old * 2)
        )


def _insert(container: Any, key: Any, value: Any, rng: random.Random) -> None:
    if isinstance(container, list):
        container[key:key] = [value] * rng.choice((1, 2, 70))
    else:
        container[f"{key}x"] = value


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """``(container, key)`` of the first nodes below the root, breadth first."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    for node in waiting:
        if isinstance(node, dict):
            found += [(node, key) for key in node]
            waiting += node.values()
        elif isinstance(node, list):
            found += [(node, index) for index in range(len(node))]
            waiting += node
        if len(found) > MAX_NODES:
            break
    return found

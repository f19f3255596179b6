"""What happens in a round, derived from ``(seed, round number)`` alone, so that a round can be repeated by itself.

Timing between processes is real and not repeatable; everything else is.
"""

import random
from typing import Any, Literal

import msgspec

from tests.chaos import points

PREFILLS, DECODES, BOTH = ("P0", "P1"), ("D0", "D1"), ("B0", "B1")
BLOCK = 16
ROLES = {"P": "kv_producer", "D": "kv_consumer", "B": "kv_both"}
SendKind = Literal["same", "longer", "other", "damaged", "plain", "gone"]


class MemberSpec(msgspec.Struct, frozen=True):
    """How an engine is started, if the round has to start it."""

    num_blocks: int
    policy: str
    max_num_batched_tokens: int
    handshake_timeout_seconds: float
    window_pool_factor: float | None
    prefault: bool
    mode: str


class Send(msgspec.Struct, frozen=True):
    """A request to a decode, after the prefill leg has answered."""

    decode: str
    delay_ms: int
    kind: SendKind
    max_tokens: int


class Job(msgspec.Struct, frozen=True):
    """One prompt: its prefill leg and what the proxy does with the ticket."""

    prefill: str
    start_ms: int
    family: int
    length: int
    suffix_length: int
    sends: tuple[Send, ...]


class Strike(msgspec.Struct, frozen=True):
    """What is done to an engine."""

    action: Literal["kill", "stop", "pause", "abort", "reset", "restart", "churn"]
    target: str
    ms: int = 0
    """How long it stays stopped, paused or dead; dead for the rest of the round when 0."""
    running: bool = False
    sleeper: bool = False
    start_fault: points.Armed | None = None
    """Strikes while the engine is being started again."""


class Fault(msgspec.Struct, frozen=True):
    """A strike at a moment, or at a named point of ``member``; then perhaps another one."""

    id: int
    strike: Strike
    at_ms: int = 0
    point: str = ""
    nth: int = 0
    before: bool = False
    then: Strike | None = None

    def describe(self) -> str:
        """One line of a round's log."""
        s = self.strike
        where = (
            f"{'before' if self.before else 'after'} {self.point} #{self.nth}" if self.point else f"at {self.at_ms} ms"
        )
        then = f", then {self.then.action} {self.then.target}" if self.then else ""
        return f"{s.action} {s.target} {where} ({s.ms} ms{', sleeper' if s.sleeper else ''}){then}"


class Plan(msgspec.Struct, frozen=True):
    """A whole round."""

    round: int
    members: dict[str, MemberSpec]
    jobs: tuple[Job, ...]
    pokes: tuple[tuple[str, int], ...]
    """``(prefill, moment)``: other traffic, in whose steps prefill notices that leases have ended and uses the blocks again."""
    faults: tuple[Fault, ...]
    offer_seconds: float
    churns: bool
    fresh: tuple[str, ...]
    """Survivors of earlier rounds that are closed first."""
    quiet: bool
    """Whether memory of dead prefills must be given back before anybody sends a request to the survivors."""


def make_plan(seed: int, number: int) -> Plan:
    """The plan of round ``number``."""
    rng = random.Random(f"{seed}:{number}")
    prefills = rng.sample(PREFILLS, rng.choice((1, 1, 2)))
    decodes = rng.sample(DECODES, rng.choice((1, 2, 2)))
    if rng.random() < 0.3:
        chosen = rng.sample(BOTH, rng.choice((1, 2)))
        prefills += chosen
        decodes += chosen
    names = sorted({*prefills, *decodes})
    members = {name: _member(rng, name) for name in names}
    jobs = tuple(_job(rng, number, index, prefills, decodes) for index in range(rng.randint(2, 6)))
    faults = tuple(_fault(rng, number, index, prefills, decodes) for index in range(rng.choice((0, 1, 1, 2, 2, 3, 4))))
    return Plan(
        round=number,
        members=members,
        jobs=jobs,
        pokes=tuple((rng.choice(prefills), rng.randint(0, 250)) for _ in range(rng.choice((0, 5, 15)))),
        faults=faults,
        offer_seconds=rng.choice((0.03, 0.1, 0.3, 0.3, 0.6)),
        churns=rng.random() < 0.7,
        fresh=tuple(name for name in names if rng.random() < 0.03),
        quiet=rng.random() < 0.3,
    )


def _member(rng: random.Random, name: str) -> MemberSpec:
    is_prefill = name[0] != "D"
    return MemberSpec(
        num_blocks=rng.choice((48, 64)) if is_prefill else rng.choice((20, 24, 40, 64)),
        policy="fail" if rng.random() < 0.15 else "recompute",
        max_num_batched_tokens=rng.choice((512, 512, 64)),
        handshake_timeout_seconds=rng.choice((0.2, 1.5, 1.5, 5.0)),
        # 256 blocks is what one peer takes of a window in this rig: room for one, for several, for any number.
        window_pool_factor=rng.choice((4.0, 16.0, None, None)),
        prefault=rng.random() < 0.8,
        mode=rng.choice(("auto", "auto", "pull")),
    )


def _job(rng: random.Random, number: int, index: int, prefills: list[str], decodes: list[str]) -> Job:
    family = rng.randrange(8) if rng.random() < 0.2 else 1000 + number * 10 + rng.randrange(2)
    length = rng.choice((1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 7, 4 * BLOCK, rng.randint(2, 150)))
    suffix = rng.choice((0, 0, 3, BLOCK, rng.randint(1, 60)))
    sends = [_send(rng, decodes) for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 3)))]
    if rng.random() < 0.25:
        # A guest: finds the blocks of a request with a ticket in decode's prefix cache, and reads them longer than that.
        length, suffix, decode = rng.randint(2 * BLOCK, 6 * BLOCK), 0, rng.choice(decodes)
        sends = [Send(decode, 0, "same", rng.choice((1, 3, 10))), Send(decode, rng.choice((0, 2)), "plain", 120)]
    return Job(rng.choice(prefills), rng.choice((0, 0, rng.randint(0, 80))), family, length, suffix, tuple(sends))


def _send(rng: random.Random, decodes: list[str]) -> Send:
    kind: SendKind = rng.choices(
        ("same", "longer", "other", "damaged", "plain", "gone"), weights=(12, 2, 1, 1, 3, 1), k=1
    )[0]
    delay = rng.choice((0, 0, 0, rng.randint(1, 60), rng.randint(60, 300)))
    return Send(rng.choice(decodes), delay, kind, rng.choice((1, 3, 10, 30, 60)))


# --- faults ---


def _fault(rng: random.Random, number: int, index: int, prefills: list[str], decodes: list[str]) -> Fault:
    identifier = number * 10 + index
    member = rng.choice([*prefills, *decodes])
    if rng.random() < 0.4:
        return Fault(identifier, _timed_strike(rng, member, prefills), at_ms=rng.randint(0, 150))
    table = dict(points.COMMON_POINTS)
    if member in prefills:
        table |= points.PREFILL_POINTS
    if member in decodes:
        table |= points.DECODE_POINTS
    point = rng.choice(sorted(table))
    action: Any = rng.choices(("kill", "stop", "pause"), weights=(4, 3, 3), k=1)[0]
    strike = Strike(action, member, ms=_duration(rng, action), sleeper=action == "kill" and rng.random() < 0.25)
    then = None
    if action == "pause" and rng.random() < 0.8:
        others = [name for name in (*prefills, *decodes) if name != member] or [member]
        then = _timed_strike(rng, rng.choice(others), prefills)
    return Fault(
        identifier, strike, point=point, nth=rng.randint(1, table[point]), before=rng.random() < 0.5, then=then
    )


def _timed_strike(rng: random.Random, member: str, prefills: list[str]) -> Strike:
    action: Any = rng.choices(("kill", "stop", "abort", "reset", "restart", "churn"), weights=(4, 3, 3, 2, 2, 1), k=1)[
        0
    ]
    start_fault = None
    if member in prefills and action in ("kill", "restart") and rng.random() < 0.3:
        point = rng.choice(sorted(points.START_POINTS))
        nth = rng.randint(1, points.START_POINTS[point])
        start_fault = points.Armed(number_of_start_fault(rng), point, nth, rng.random() < 0.5, "kill", 0)
    return Strike(
        action,
        member,
        ms=_duration(rng, action),
        running=rng.random() < 0.5,
        sleeper=action == "kill" and rng.random() < 0.3,
        start_fault=start_fault,
    )


def number_of_start_fault(rng: random.Random) -> int:
    """Ids of faults that are not in the plan's list."""
    return -rng.randint(1, 1 << 30)


def _duration(rng: random.Random, action: str) -> int:
    if action == "kill":
        return rng.choice((0, rng.randint(1, 150)))
    if action == "pause":
        return rng.choice((2, 10, 30, 60))
    return rng.choice((5, 30, 80, 150, 400))

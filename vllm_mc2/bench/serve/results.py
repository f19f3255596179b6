"""What was measured. `Results` is the object that ``--json`` writes; all times are seconds, all sizes bytes."""

from __future__ import annotations

import msgspec

from vllm_mc2.bench.serve.settings import Settings
from vllm_mc2.bench.stats import Spread

COLD, HIT, FLOOR = "single", "single-hit", "single-floor"
"""The three ways to ask the plain server: nothing cached, whole blocks cached, all but one token cached."""
TAIL = "mc2-tail"
"""Our pair, with a prompt whose last block is as full as it can be without being handed over in place."""

LABELS = {
    COLD: "single, nothing cached",
    HIT: "single, own prefix hit",
    FLOOR: "floor: all but one token cached",
    "none": "two servers, no hand-off",
    "mc2": "vllm-mc2",
    TAIL: "vllm-mc2, last block copied",
    "nixl": "NixlConnector",
    "mooncake": "MooncakeConnector (TCP)",
    "example": "ExampleConnector",
}


class SystemInfo(msgspec.Struct, frozen=True):
    """One system, and how it was set up."""

    name: str
    label: str
    how: str


class TtftRow(msgspec.Struct, frozen=True, kw_only=True):
    """One system at one prompt length. A field is None where the system has no such thing."""

    model: str
    group: int
    system: str
    prompt_tokens: int
    prefill: Spread | None = None
    """Prefill leg: from the request to its whole answer."""
    decode_ttft: Spread | None = None
    """From prefill's answer to decode's first token; for a single server its time to first token."""
    ttft: Spread | None = None
    """From the first request to the first token: both legs."""
    itl: Spread | None = None
    """Time between two tokens after the first; each sample is the median of one answer, of four gaps at a time."""
    prefill_over_none: Spread | None = None
    itl_over_none: Spread | None = None
    """Ours over a pair without hand-off, which has its turn right before or after with the same prompt: of ratios, since the
    machine's speed changes more from round to round than the two systems differ."""
    tokens_equal: bool | None = None
    """Whether every answer was that of the single server; None without one."""


class ThroughputRow(msgspec.Struct, frozen=True, kw_only=True):
    """One system with several requests at once."""

    model: str
    group: int
    system: str
    concurrency: int
    prompt_tokens: int
    num_requests: int
    output_tokens_per_second: float
    requests_per_second: float
    mean_ttft: float
    mean_decode_ttft: float


class IdleRow(msgspec.Struct, frozen=True, kw_only=True):
    """CPU that both servers use while nobody asks them anything."""

    model: str
    group: int
    system: str
    cores: float
    """Seconds of CPU per second, over all processes of both servers."""
    seconds: float


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of both servers, after a first small request and while decode holds some long ones."""

    model: str
    group: int
    system: str
    prompt_tokens: int
    num_requests: int
    kv_bytes: int
    """KV of these prompts, once."""
    before_bytes: int
    holding_bytes: int
    """Memory of all processes of both servers; what they share counts once."""
    prefill_kv_bytes: int
    """Blocks that prefill cannot use for others meanwhile, by its own metric."""
    decode_kv_bytes: int
    """Blocks of decode's own cache that these requests occupy, by its own metric."""


class HandoffRow(msgspec.Struct, frozen=True, kw_only=True):
    """What our decode server counted over all time-to-first-token rounds of one group."""

    model: str
    group: int
    attached: int
    not_attached: int
    kv_bytes_not_copied: int
    seconds_per_handoff: float
    """Time of decode's scheduler on claiming and attaching."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One promise: ``measured`` must not be above ``limit``."""

    name: str
    model: str
    limit: float
    measured: float
    unit: str

    @property
    def ok(self) -> bool:
        """Whether it was kept."""
        return self.measured <= self.limit


class CheckRow(msgspec.Struct, frozen=True, kw_only=True):
    """A `Check` as it is written out."""

    name: str
    model: str
    limit: float
    measured: float
    unit: str
    ok: bool

    @classmethod
    def of(cls, check: Check) -> CheckRow:
        """Judge it."""
        fields = {name: getattr(check, name) for name in check.__struct_fields__}
        return cls(ok=check.ok, **fields)


class LeftOut(msgspec.Struct, frozen=True):
    """A system that could not be measured, or not to the end."""

    model: str
    system: str
    reason: str


class Results(msgspec.Struct, kw_only=True):
    """Everything of one run; grows while it goes on."""

    machine: dict[str, str | int | float]
    settings: Settings
    notes: list[str] = []
    systems: list[SystemInfo] = []
    ttft: list[TtftRow] = []
    throughput: list[ThroughputRow] = []
    idle_cpu: list[IdleRow] = []
    memory: list[MemoryRow] = []
    handoffs: list[HandoffRow] = []
    checks: list[CheckRow] = []
    left_out: list[LeftOut] = []
    seconds: float = 0.0

    def row(self, model: str, group: int, system: str, prompt_tokens: int) -> TtftRow | None:
        """The row of one system at one length, measured beside the others of ``group``."""
        wanted = (model, group, system, prompt_tokens)
        rows = (row for row in self.ttft if (row.model, row.group, row.system, row.prompt_tokens) == wanted)
        return next(rows, None)

"""Counters of hand-offs, through vLLM's connector statistics to ``/metrics`` and the periodic log line.

Only the scheduler side counts, so that nothing is counted once per rank. Labels are bounded: ``way`` and ``reason`` come from
fixed sets in the code, never from a request.
"""

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "blocks_attached": "Blocks of prefill's memory used in place by decode.",
    "kv_bytes_not_copied": "KV bytes that decode read from prefill's memory instead of copying them.",
    "kv_bytes_copied": "KV bytes that decode copied out of prefill's memory.",
    "pull_seconds": "Time from the order to copy until all workers had copied, all hand-offs together.",
    "handoff_seconds": "Time that decode's scheduler spent on claiming and attaching, all hand-offs together.",
    "leases_published": "Leases that prefill published.",
    "leases_refused": "Finished prefills that got no ticket.",
}
LABELLED = {"handoffs": ("way", "reason"), "leases_ended": ("reason",)}


@dataclass
class MC2Stats(KVConnectorStats):
    """Counts of one interval: ``{name: number}`` and, for labelled ones, ``{"name|label|label": number}``."""

    data: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """Count ``amount`` under ``name``, with the labels that :data:`LABELLED` declares for it."""
        key = "|".join((name, *labels))
        self.data[key] = self.data.get(key, 0) + amount

    def reset(self) -> None:
        """Forget the interval."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "MC2Stats":
        """Sum of both."""
        for key, amount in other.data.items():
            self.data[key] = self.data.get(key, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the periodic log line."""
        return {key.replace("|", "_"): round(value, 6) for key, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class MC2PromMetrics(KVConnectorPromMetrics):
    """``vllm:mc2_*`` counters, one child per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter_cls: Any = metric_types[Counter]
        self._counters = {
            name: counter_cls(name=f"vllm:mc2_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._counters["handoffs"] = counter_cls(
            name="vllm:mc2_handoffs",
            documentation="Requests that came with a ticket, by what became of them.",
            labelnames=[*labelnames, *LABELLED["handoffs"]],
        )
        self._counters["leases_ended"] = counter_cls(
            name="vllm:mc2_leases_ended",
            documentation="Leases that ended, by how.",
            labelnames=[*labelnames, *LABELLED["leases_ended"]],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        base = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, *labels = key.split("|")
            self._counters[name].labels(*base, *labels).inc(amount)

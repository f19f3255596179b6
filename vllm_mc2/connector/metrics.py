"""What is counted, on its way through vLLM's connector statistics to ``/metrics`` and the periodic log line.

Counters and histograms: only the scheduler side counts, so that nothing is counted once per rank. Labels come from the sets
below, never from a request or a peer. What an interval brings is a flat dict of numbers whose size does not depend on how much
happened in it, and which is added to another interval's number by number.

Gauges do not travel this way, since vLLM takes statistics from an engine that steps only: see :mod:`.gauges`.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_mc2.connector.gauges import EngineGauges

COUNTERS = {
    "blocks_attached": "Blocks of prefill's memory used in place by decode.",
    "kv_bytes_not_copied": "KV bytes that decode read from prefill's memory instead of copying them.",
    "kv_bytes_copied": "KV bytes that decode copied out of prefill's memory.",
    "leases_published": "Leases that prefill published.",
    "leases_refused": "Finished prefills that got no ticket.",
    "connections_rejected": "Connections that the scheduler's listeners turned away: malformed, silent, not ours, too many.",
}
HISTOGRAMS = {
    "handoff_seconds": "Time that decode's scheduler spent on claiming and attaching, per hand-off.",
    "map_seconds": "Time from the first ticket of an unknown prefill until its memory was mapped by all ranks.",
    "pull_seconds": "Time from the order to copy until all workers had copied, per hand-off.",
}
LABELLED = {"handoffs": ("way", "reason"), "leases_ended": ("reason",)}
LABELLED_TEXTS = {
    "handoffs": "Requests that came with a ticket, by what became of them.",
    "leases_ended": "Leases that ended, by how.",
}
BUCKETS = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
)  # fmt: skip
"""Seconds. From a claim in shared memory to a pull from another host that almost ran out of time."""

PULL_REASONS = ("mode", "other_host", "attach_off", "tensor_parallel", "window_full", "prefill_asks")
"""Why blocks were copied."""
REJECT_REASONS = (
    "another_connector", "attach_off", "bad_lease", "bad_ticket", "block_conflict", "handshake_timeout", "lookup_failed",
    "map_failed", "other_host", "peer_gone", "peer_refused", "peer_unreachable", "prompt_mismatch", "pull_failed",
    "skips_prefix_cache", "tensor_parallel", "ticket_dead", "transfer_failed", "window_full", "window_passed",
)  # fmt: skip
"""Why nothing was handed over."""
UNFINISHED_REASONS = ("waiting", "attached", "claimed", "pulling", "rejected")
"""How far a hand-off was when its request ended."""
END_REASONS = ("released", "expired", "peer_gone")
_REASONS_BY_WAY = {
    "attach": ("",),
    "pull": PULL_REASONS,
    "recompute": REJECT_REASONS,
    "failed": REJECT_REASONS,
    "unfinished": UNFINISHED_REASONS,
}
_WORDS = {
    "attach": "in place",
    "pull": "copied",
    "recompute": "computed here",
    "failed": "failed",
    "unfinished": "aborted",
}
_ENGINE = "engine"


@dataclass
class MC2Stats(KVConnectorStats):
    """Counts of one interval: ``{"name|label|label": number}``, and ``{"name|bucket": count, "name_sum|bucket": seconds}`` for
    histograms. One thread at a time.
    """

    data: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """Count ``amount`` under ``name``, with the labels that :data:`LABELLED` declares for it."""
        key = "|".join((name, *labels))
        self.data[key] = self.data.get(key, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        """One value of a histogram."""
        bucket = str(bisect_left(BUCKETS, seconds))
        self.add(name, 1, bucket)
        self.add(f"{name}_sum", seconds, bucket)

    def name_engine(self, socket_id: str) -> None:
        """Say which engine these are of, for those who want to ask it something."""
        self.data[f"{_ENGINE}|{socket_id}"] = 1

    def reset(self) -> None:
        """Forget the interval."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "MC2Stats":
        """Sum of both."""
        for key, amount in other.data.items():
            self.data[key] = self.data.get(key, 0) + amount
        return self

    def total(self, name: str) -> float:
        """Over all labels or buckets."""
        return sum(amount for key, amount in self.data.items() if key.split("|")[0] == name)

    def reduce(self) -> dict[str, int | float]:
        """For the periodic log line: what an operator wants to see at a glance, and nothing that is 0."""
        line: dict[str, int | float] = {}
        for key, amount in sorted(self.data.items()):
            name, *labels = key.split("|")
            if name == "handoffs":
                what = f"{_WORDS.get(labels[0], labels[0])} ({labels[1]})" if labels[1] else _WORDS[labels[0]]
                line[f"hand-offs {what}"] = int(amount)
        for name, words in (("kv_bytes_not_copied", "KV not copied MiB"), ("kv_bytes_copied", "KV copied MiB")):
            line[words] = round(self.total(name) / (1 << 20), 1)
        for name, words in (("handoff_seconds", "hand-off"), ("pull_seconds", "pull"), ("map_seconds", "map")):
            count = self.total(name)
            line[f"mean {words} ms"] = round(1e3 * self.total(f"{name}_sum") / count, 2) if count else 0
        line["leases published"] = int(self.total("leases_published"))
        for reason in END_REASONS:
            line[f"leases {reason}"] = int(self.data.get(f"leases_ended|{reason}", 0))
        line["no ticket"] = int(self.total("leases_refused"))
        line["connections rejected"] = int(self.total("connections_rejected"))
        return {words: value for words, value in line.items() if value}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


def _bounded(name: str, labels: list[str]) -> list[str]:
    """The labels, or ``other`` where they are not of the fixed sets."""
    if name == "handoffs":
        way, reason = labels
        known = _REASONS_BY_WAY.get(way)
        if known is None:
            return ["other", "other"]
        return [way, reason if reason in known else "other"]
    if name == "leases_ended":
        return labels if labels[0] in END_REASONS else ["other"]
    return labels


class MC2PromMetrics(KVConnectorPromMetrics):
    """``vllm:mc2_*``, one child per engine; lives in vLLM's front end. Counters that an alert may want to see grow start at 0,
    as Prometheus cannot see the step to the first value of a series.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        directory: Path,
    ) -> None:
        """Registers all metrics. ``directory``: where the engines listen."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter_cls: Any = metric_types[Counter]
        histogram_cls: Any = metric_types[Histogram]
        self._counters = {
            name: counter_cls(
                name=f"vllm:mc2_{name}", documentation=text, labelnames=[*labelnames, *LABELLED.get(name, ())]
            )
            for name, text in (COUNTERS | LABELLED_TEXTS).items()
        }
        self._histograms = {
            name: histogram_cls(
                name=f"vllm:mc2_{name}", documentation=text, labelnames=labelnames, buckets=list(BUCKETS)
            )
            for name, text in HISTOGRAMS.items()
        }
        for base in per_engine_labelvalues.values():
            self._begin_at_zero(base)
        self._gauges = EngineGauges(directory, metric_types, labelnames, per_engine_labelvalues)

    def _begin_at_zero(self, base: list[object]) -> None:
        transfer = self._kv_transfer_config
        assert transfer is not None
        for name in COUNTERS:
            self._counters[name].labels(*base)
        for histogram in self._histograms.values():
            histogram.labels(*base)
        if transfer.is_kv_producer:
            for reason in END_REASONS:
                self._counters["leases_ended"].labels(*base, reason)
        if transfer.is_kv_consumer:
            rejected = "failed" if transfer.kv_load_failure_policy == "fail" else "recompute"
            for way in ("attach", "pull", rejected, "unfinished"):
                for reason in _REASONS_BY_WAY[way]:
                    self._counters["handoffs"].labels(*base, way, reason)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        base = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, *labels = key.split("|")
            if name in self._counters:
                self._counters[name].labels(*base, *_bounded(name, labels)).inc(amount)
            elif name in self._histograms:
                seconds = transfer_stats_data[f"{name}_sum|{labels[0]}"]
                self._fill(self._histograms[name].labels(*base), int(labels[0]), int(amount), seconds)
            elif name == _ENGINE:
                self._gauges.meet(engine_idx, labels[0])

    def _fill(self, histogram: Any, bucket: int, count: int, seconds: float) -> None:
        """A histogram takes single values only: the bucket's mean, as often as there were any, leaves its sum as it was."""
        above = math.nextafter(BUCKETS[bucket - 1], math.inf) if bucket else 0.0
        up_to = BUCKETS[bucket] if bucket < len(BUCKETS) else math.inf
        mean = min(max(seconds / count, above), up_to)
        for _ in range(count):
            histogram.observe(mean)

"""Counters and durations of transfers, for vLLM's log line and its ``/metrics``.

Workers and the scheduler count into a ``TransferStats``; vLLM merges the snapshots of all ranks and
hands them to ``LlmddPromMetrics`` in the API server.
"""

import threading
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS = {
    "recv_requests": "Requests whose KV arrived, times ranks",
    "recv_bytes": "KV bytes received",
    "recv_blocks": "KV blocks received, summed over KV cache groups and ranks",
    "recv_transfers": "pull_blocks calls that succeeded",
    "recv_not_needed": "Requests that needed nothing of a finished remote prefill",
    "leases_opened": "Finished prompts whose blocks were held for a decode server",
    "leases_released": "Leases that ended because everything was fetched or nothing is needed",
    "leases_expired": "Leases that ended by their deadline",
    "leases_voided": "Leases that P gave up because it preempted or aborted their request",
    "sent_requests": "Requests whose KV was pushed, times ranks",
    "sent_bytes": "KV bytes pushed",
    "sent_transfers": "Transfers of one cache to one decode rank that succeeded",
    "leases_over_cap": "Finished prompts not handed over because leases hold too many blocks",
    "not_handed_over": "Prompts not handed over for another reason than the cap, as embeddings",
    "local_prefills": "Requests without remote KV on an engine that is only a consumer",
    "integrity_checked_blocks": "Received blocks whose checksums were compared with the prefill "
    "server's, summed over KV cache groups and ranks",
    "integrity_failed_blocks": "Those of them that differed",
    "junk_messages": "Control messages dropped as malformed or too many, and connections refused",
}
DURATIONS = {
    "pull_seconds": "One rank's copy of one request's blocks",
    "push_seconds": "From a rank's Reserve to the last block of a push",
    "link_seconds": "Making one link",
    "release_seconds": "From a rank's Release to P's confirmation",
    "recv_seconds": "From the worker's order to the report of one request on one rank",
}
STAGES = (
    "params",
    "metaserver",
    "connection",
    "handshake",
    "claim",
    "announce",
    "reserve",
    "block map",
    "queue",
    "link",
    "transfer",
    "push",
    "integrity",
    "release",
)
"""Where a transfer can fail; the ``stage`` label of ``vllm:llmdd_failures_total``."""

_BUCKETS_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
)
_MAX_SAMPLES = 10_000


class TransferStats:
    """Counts of one process since the last snapshot; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._durations: dict[str, list[float]] = {}

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of ``COUNTERS``."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def count_failure(self, stage: str) -> None:
        """Add a failure in one of ``STAGES``."""
        with self._lock:
            self._failures[stage] = self._failures.get(stage, 0) + 1

    def observe(self, name: str, seconds: float) -> None:
        """Add a sample to one of ``DURATIONS``; beyond a bound samples are left out, not memory."""
        with self._lock:
            samples = self._durations.setdefault(name, [])
            if len(samples) < _MAX_SAMPLES:
                samples.append(seconds)

    def take(self) -> "LlmddStats | None":
        """What was counted since the last call, or None."""
        if not (self._counts or self._failures or self._durations):
            return None
        with self._lock:
            data = {
                "counts": self._counts,
                "failures": self._failures,
                "durations": self._durations,
            }
            self._counts, self._failures, self._durations = {}, {}, {}
        return LlmddStats(data=data)


class LlmddStats(KVConnectorStats):
    """A snapshot: ``data`` has ``counts``, ``failures`` by stage, and lists of ``durations`` in
    seconds."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data or {}
        for part in ("counts", "failures", "durations"):
            self.data.setdefault(part, {})

    def reset(self) -> None:
        self.data = {"counts": {}, "failures": {}, "durations": {}}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for part in ("counts", "failures"):
            ours = self.data[part]
            for name, amount in other.data.get(part, {}).items():
                ours[name] = ours.get(name, 0) + amount
        for name, samples in other.data.get("durations", {}).items():
            self.data["durations"].setdefault(name, []).extend(samples)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Sums, and mean and largest of each duration in milliseconds."""
        reduced: dict[str, int | float] = dict(self.data["counts"])
        for stage, amount in self.data["failures"].items():
            reduced[f"failed at {stage}"] = amount
        for name, samples in self.data["durations"].items():
            label = name.removesuffix("_seconds")
            reduced[f"{label} mean ms"] = round(1000 * sum(samples) / len(samples), 3)
            reduced[f"{label} max ms"] = round(1000 * max(samples), 3)
        return reduced


class LlmddPromMetrics(KVConnectorPromMetrics):
    """The same figures as Prometheus metrics named ``vllm:llmdd_*``, per engine."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._per_engine(self._counter_cls, name, text) for name, text in COUNTERS.items()
        }
        self._histograms = {
            name: self._per_engine(self._histogram_cls, name, text, buckets=_BUCKETS_S)
            for name, text in DURATIONS.items()
        }
        self._failures = self._failure_counters()

    def _per_engine(
        self, metric_class: Any, name: str, text: str, **options: Any
    ) -> dict[int, Any]:
        metric = metric_class(
            name=f"vllm:llmdd_{name}", documentation=text, labelnames=self._labelnames, **options
        )
        return {
            engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
        }

    def _failure_counters(self) -> dict[tuple[int, str], Any]:
        metric = self._counter_cls(
            name="vllm:llmdd_failures",
            documentation="Transfers that failed, by the stage that failed",
            labelnames=[*self._labelnames, "stage"],
        )
        return {
            (engine, stage): metric.labels(*values, stage)
            for engine, values in self.per_engine_labelvalues.items()
            for stage in STAGES
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.get("counts", {}).items():
            self._counters[name][engine_idx].inc(amount)
        for stage, amount in transfer_stats_data.get("failures", {}).items():
            self._failures[engine_idx, stage].inc(amount)
        for name, samples in transfer_stats_data.get("durations", {}).items():
            histogram = self._histograms[name][engine_idx]
            for seconds in samples:
                histogram.observe(seconds)

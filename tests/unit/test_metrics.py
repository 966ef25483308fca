"""Statistics: merging over ranks, vLLM's log line and real Prometheus metrics."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

import vllm_llmdd_connector
from vllm_llmdd_connector.metrics import (
    COUNTERS,
    DURATIONS,
    STAGES,
    LlmddPromMetrics,
    LlmddStats,
    TransferStats,
)
from vllm_llmdd_connector.scheduler.lease import LeaseEnd

PACKAGE = Path(vllm_llmdd_connector.__file__).parent
LABELS = ["model_name", "engine"]


def some_stats() -> LlmddStats:
    stats = TransferStats()
    stats.count("recv_requests")
    stats.count("recv_bytes", 1000)
    stats.count_failure("link")
    stats.observe("pull_seconds", 0.25)
    taken = stats.take()
    assert taken is not None
    return taken


class TestTransferStats:
    def test_nothing_counted_is_nothing_to_take(self) -> None:
        assert TransferStats().take() is None

    def test_taking_starts_from_zero(self) -> None:
        stats = TransferStats()
        stats.count("recv_requests")
        assert stats.take() is not None
        assert stats.take() is None

    def test_samples_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vllm_llmdd_connector.metrics._MAX_SAMPLES", 3)
        stats = TransferStats()
        for _ in range(10):
            stats.observe("pull_seconds", 1.0)
        taken = stats.take()
        assert taken is not None
        assert len(taken.data["durations"]["pull_seconds"]) == 3


class TestStats:
    def test_ranks_add_up(self) -> None:
        stats = some_stats().aggregate(some_stats())
        assert stats.data["counts"] == {"recv_requests": 2, "recv_bytes": 2000}
        assert stats.data["failures"] == {"link": 2}
        assert stats.data["durations"] == {"pull_seconds": [0.25, 0.25]}

    def test_empty_and_partial_data_can_be_merged(self) -> None:
        stats = LlmddStats()
        assert stats.is_empty()
        assert not stats.aggregate(some_stats()).is_empty()
        stats.aggregate(LlmddStats(data={"counts": {"recv_requests": 1}}))
        assert stats.data["counts"]["recv_requests"] == 2

    def test_log_line_has_sums_failures_and_milliseconds(self) -> None:
        stats = some_stats()
        stats.data["durations"]["pull_seconds"].append(0.75)
        assert stats.reduce() == {
            "recv_requests": 1,
            "recv_bytes": 1000,
            "failed at link": 1,
            "pull mean ms": 500.0,
            "pull max ms": 750.0,
        }

    def test_reset_empties(self) -> None:
        stats = some_stats()
        stats.reset()
        assert stats.is_empty()
        assert stats.reduce() == {}

    def test_snapshot_crosses_processes(self) -> None:
        stats = some_stats()
        assert pickle.loads(pickle.dumps(stats)).data == stats.data
        assert LlmddStats(data=stats.to_dict()).data == stats.data


@pytest.fixture
def prom() -> Iterator[LlmddPromMetrics]:
    """Metrics of two engines on prometheus_client's own registry."""
    before = set(REGISTRY._collector_to_names)
    yield LlmddPromMetrics(
        SimpleNamespace(kv_transfer_config=SimpleNamespace()),
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        LABELS,
        {0: ["tiny", "0"], 1: ["tiny", "1"]},
    )
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def sample(name: str, engine: str, **labels: str) -> float | None:
    all_labels = {"model_name": "tiny", "engine": engine, **labels}
    value: float | None = REGISTRY.get_sample_value(f"vllm:llmdd_{name}", all_labels)
    return value


class TestPrometheus:
    def test_snapshot_lands_at_its_engine(self, prom: LlmddPromMetrics) -> None:
        prom.observe(some_stats().data, 1)
        prom.observe(some_stats().data, 1)
        assert sample("recv_bytes_total", "1") == 2000
        assert sample("recv_bytes_total", "0") == 0
        assert sample("failures_total", "1", stage="link") == 2
        assert sample("pull_seconds_count", "1") == 2
        assert sample("pull_seconds_sum", "1") == 0.5

    def test_everything_that_can_be_counted_has_a_metric(self, prom: LlmddPromMetrics) -> None:
        data = {
            "counts": dict.fromkeys(COUNTERS, 1),
            "failures": dict.fromkeys(STAGES, 1),
            "durations": {name: [0.1] for name in DURATIONS},
        }
        prom.observe(data)
        assert all(sample(f"{name}_total", "0") == 1 for name in COUNTERS)
        assert all(sample("failures_total", "0", stage=stage) == 1 for stage in STAGES)
        assert all(sample(f"{name}_count", "0") == 1 for name in DURATIONS)

    def test_partial_snapshot_is_enough(self, prom: LlmddPromMetrics) -> None:
        prom.observe({})
        prom.observe({"counts": {"recv_requests": 3}})
        assert sample("recv_requests_total", "0") == 3


@cache
def all_calls() -> list[ast.Call]:
    """Every call in the package's source."""
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]


class TestNames:
    """An unknown name would be a KeyError in vLLM's API server, long after the mistake."""

    def literals(self, method: str, index: int = 0) -> set[str]:
        """The texts that calls of this method anywhere in the package have as this argument."""
        arguments = [argument for call in self.calls(method) for argument in call.args[index:][:1]]
        return {
            argument.value
            for argument in arguments
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        }

    def calls(self, method: str) -> list[ast.Call]:
        return [
            call
            for call in all_calls()
            if isinstance(call.func, ast.Attribute) and call.func.attr == method and call.args
        ]

    def test_counters_in_use_exist(self) -> None:
        used = self.literals("count")
        assert used <= set(COUNTERS)
        assert set(COUNTERS) - used == {f"leases_{end.value}" for end in LeaseEnd}

    def test_counters_made_of_a_lease_s_end_exist(self) -> None:
        assert {f"leases_{end.value}" for end in LeaseEnd} <= set(COUNTERS)

    def test_durations_in_use_are_all_and_exist(self) -> None:
        used = self.literals("observe")
        assert used == set(DURATIONS)

    def test_stages_in_use_exist(self) -> None:
        """Stages also travel as the second argument of ``_fail``, ``_fall_back`` and the like."""
        used = self.literals("count_failure")
        for method in ("_fail", "failed", "_fall_back", "_refuse", "_end"):
            used |= self.literals(method, 1)
        assert used <= set(STAGES)
        assert {"params", "claim", "handshake", "link", "transfer", "release"} <= used

    def test_names_are_fit_for_prometheus(self) -> None:
        for name in (*COUNTERS, *DURATIONS):
            assert re.fullmatch(r"[a-z_]+", name)

"""``WorkerConnector``: P with its scheduler and a D rank, real channels and a fake engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.clock import PATIENCE_S
from fakes.fake_datadist import FakeDataDist, LLMStatusCode
from fakes.rank import Prefill, Rank, run

from vllm_llmdd_connector.errors import ConfigError
from vllm_llmdd_connector.metadata import SentPrompt


@pytest.fixture
def make_rank(datadist: FakeDataDist) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def make(kv_role: str, fill: int, **options: Any) -> Rank:
        ranks.append(Rank(kv_role, fill, **options))
        return ranks[-1]

    yield make
    for rank in reversed(ranks):
        rank.worker.shutdown()
        rank.worker.shutdown()


@pytest.fixture
def make_p(make_rank: Callable[..., Rank]) -> Iterator[Callable[[int], Prefill]]:
    started: list[Prefill] = []

    def make(fill: int) -> Prefill:
        started.append(Prefill(make_rank("kv_producer", fill)))
        return started[-1]

    yield make
    for p in started:
        p.server.close()


@pytest.fixture
def p(make_p: Callable[[int], Prefill]) -> Prefill:
    return make_p(100)


@pytest.fixture
def d(make_rank: Callable[..., Rank]) -> Rank:
    return make_rank("kv_consumer", 0)


class TestPull:
    def test_blocks_arrive_and_p_gets_its_own_back(self, p: Prefill, d: Rank) -> None:
        d.step(jobs=[p.hold(1)])
        run(d, "d1")
        assert d.received == {"d1"}
        assert d.blocks() == [[0, 1, 2, 3, 102, 101, 6, 7]] * 2
        assert p.pool.in_use == [1, 2]
        p.producer.free_ended()
        assert p.pool.in_use == []
        assert p.producer.num_leases == 0

    def test_lease_that_ended_before_the_release_fails_the_request(
        self, p: Prefill, d: Rank
    ) -> None:
        job = p.hold(1)
        p.expire_leases()
        d.step(jobs=[job])
        run(d, "d1")
        assert d.failed == {"d1"}
        assert d.worker.take_failed_blocks() == {4, 5}
        assert d.worker.take_failed_blocks() == set()
        assert d.report.failed["d1"].startswith("release: ")

    def test_lease_that_ends_during_the_copy_fails_the_request(
        self, p: Prefill, d: Rank, datadist: FakeDataDist
    ) -> None:
        faults = datadist.faults(p.rank.endpoint.cluster_id)
        faults.pull_gate = threading.Event()
        d.step(jobs=[p.hold(1)])
        assert faults.pull_started.wait(PATIENCE_S)
        p.expire_leases()
        faults.pull_gate.set()
        run(d, "d1")
        assert d.report.failed["d1"].startswith("release: P had given the blocks up")

    def test_failed_pull_is_reported_and_the_next_one_works(
        self, p: Prefill, d: Rank, datadist: FakeDataDist
    ) -> None:
        faults = datadist.faults(p.rank.endpoint.cluster_id)
        faults.pull_status, faults.num_pull_failures = LLMStatusCode.LLM_TIMEOUT, 1
        d.step(jobs=[p.hold(1)])
        run(d, "d1")
        d.step(jobs=[p.hold(2)])
        run(d, "d2")
        assert (d.failed, d.received) == ({"d1"}, {"d2"})
        assert "LLM_TIMEOUT" in d.report.failed["d1"]

    def test_dead_peer_s_successor_is_another_cluster_and_served(
        self, p: Prefill, d: Rank, make_p: Callable[[int], Prefill]
    ) -> None:
        job = p.hold(1)
        p.close()
        d.step(jobs=[job])
        run(d, "d1")
        assert d.failed == {"d1"}
        successor = make_p(200)
        assert successor.rank.endpoint.cluster_id != job.workers[0].cluster_id
        d.step(jobs=[successor.hold(2)])
        run(d, "d2")
        assert d.blocks()[0][4:6] == [202, 201]

    def test_release_that_reaches_another_scheduler_fails_the_request(
        self, p: Prefill, d: Rank, make_p: Callable[[int], Prefill]
    ) -> None:
        """P's scheduler was restarted at its port, and numbers its leases from 1 again."""
        job = p.hold(1)
        successor = make_p(200)
        successor.hold(1)
        job.control_address = ("127.0.0.1", successor.server.port)
        d.step(jobs=[job])
        run(d, "d1")
        assert d.report.failed["d1"].startswith("release: P was restarted")
        assert successor.producer.num_leases == 1

    def test_one_stopped_peer_does_not_delay_another(
        self, p: Prefill, d: Rank, make_p: Callable[[int], Prefill], datadist: FakeDataDist
    ) -> None:
        other = make_p(200)
        gate = datadist.faults(p.rank.endpoint.cluster_id).pull_gate = threading.Event()
        d.step(jobs=[p.hold(1), other.hold(2)])
        run(d, "d2")
        assert d.reported == {"d2"}
        gate.set()
        run(d, "d1")

    def test_aborted_request_is_reported_when_its_copy_has_ended_not_before(
        self, p: Prefill, d: Rank, datadist: FakeDataDist
    ) -> None:
        faults = datadist.faults(p.rank.endpoint.cluster_id)
        faults.pull_gate = threading.Event()
        d.step(jobs=[p.hold(1)])
        assert faults.pull_started.wait(PATIENCE_S)
        d.step(cancels={"d1": ""})
        for _ in range(5):
            d.step()
        assert not d.reported
        faults.pull_gate.set()
        run(d, "d1")
        assert d.received == {"d1"}

    def test_one_fence_per_step_with_pulls_goes_to_every_job(
        self, p: Prefill, d: Rank, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fences: list[threading.Event] = []

        def record() -> threading.Event:
            fences.append(threading.Event())
            return fences[-1]

        assert d.worker._engine is not None
        monkeypatch.setattr(d.worker._engine, "record_fence", record)
        d.step()
        d.step(jobs=[p.hold(1), p.hold(2)])
        assert len(fences) == 1
        before = d.blocks()
        for _ in range(5):
            d.step()
        assert d.blocks() == before
        fences[0].set()
        run(d, "d1", "d2")
        assert d.received == {"d1", "d2"}


class TestPrefillRank:
    @pytest.mark.parametrize("push", [False, True])
    def test_p_rank_has_at_most_a_thread_that_takes_reservations(
        self, make_rank: Callable[..., Rank], d: Rank, push: bool
    ) -> None:
        """Its engine answers pulls by itself, and its scheduler the releases."""
        p = Prefill(make_rank("kv_producer", 100, push=push))
        d.step(jobs=[p.hold(1)])
        run(d, "d1")
        names = {thread.name for thread in threading.enumerate()}
        p.server.close()
        expected = {f"llmdd-peer-{p.rank.endpoint.cluster_id:x}"}
        expected |= {"llmdd-worker-control"} if push else set()
        assert {name for name in names if name.startswith("llmdd-")} == expected

    def test_sent_prompts_are_digested_as_p_s_side(
        self, make_rank: Callable[..., Rank], tmp_path: Path
    ) -> None:
        rank = make_rank("kv_producer", 100, kv_digest=str(tmp_path))
        rank.step(sent_prompts=[SentPrompt("p1", "t1", ((1, 2),))])
        rank.worker.shutdown()
        (written,) = tmp_path.rglob("*.jsonl")
        lines = [json.loads(line) for line in written.read_text().splitlines()]
        assert [(line["side"], line["transfer_id"], line["layer"]) for line in lines] == [
            ("send", "t1", "a"),
            ("send", "t1", "b"),
        ]
        assert rank.worker.take_report() is None


class TestRegistration:
    def test_only_a_producer_has_an_endpoint(self, p: Prefill, d: Rank) -> None:
        assert p.rank.endpoint.engine_port
        assert d.worker.handshake is not None
        assert d.worker.handshake.endpoint is None
        assert p.rank.worker.handshake is not None
        assert p.rank.worker.handshake.groups == d.worker.handshake.groups

    def test_tensor_on_a_device_is_refused_in_one_sentence(self, datadist: FakeDataDist) -> None:
        rank = Rank("kv_consumer", 0)
        on_device = {name: torch.empty(8, 64, device="meta") for name in "ab"}
        with pytest.raises(ConfigError, match="layer a is on device meta"):
            rank.worker.register_kv_caches(on_device)
        rank.worker.shutdown()

    def test_empty_step_touches_nothing(self, d: Rank) -> None:
        d.step()
        assert d.worker.take_report() is None
        assert d.worker.take_stats() is None

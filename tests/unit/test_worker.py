"""``WorkerConnector``: a P rank and a D rank in one process, real channels and a fake engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zmq
from fakes.clock import PATIENCE_S, wait_for
from fakes.fake_datadist import FakeDataDist, LLMStatusCode
from fakes.rank import SECRET, Rank, hold, pull, run

from vllm_llmdd_connector.control.messages import Release, ReleaseAck, decode, encode
from vllm_llmdd_connector.errors import ConfigError


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
def p(make_rank: Callable[..., Rank]) -> Rank:
    return make_rank("kv_producer", 100)


@pytest.fixture
def d(make_rank: Callable[..., Rank]) -> Rank:
    return make_rank("kv_consumer", 0)


class TestPull:
    def test_blocks_arrive_and_p_learns_of_the_release(self, p: Rank, d: Rank) -> None:
        p.step(holds=[hold()])
        d.step(pulls=[pull(p.endpoint)])
        run(d, "d1")
        assert d.received == {"d1"}
        assert d.blocks() == [[0, 1, 2, 3, 102, 101, 6, 7]] * 2
        p.step()
        assert p.report.released == {1: 1}
        p.step(ended=[1])
        assert p.sent == {"p1"}

    def test_lease_that_ended_before_the_release_fails_the_request(self, p: Rank, d: Rank) -> None:
        p.step(holds=[hold()])
        p.step(ended=[1])
        d.step(pulls=[pull(p.endpoint)])
        run(d, "d1")
        assert d.failed == {"d1"}
        assert d.worker.take_failed_blocks() == {4, 5}
        assert d.worker.take_failed_blocks() == set()
        assert d.report.failed["d1"].startswith("release: ")

    def test_hold_that_comes_after_the_release_still_confirms_it(self, p: Rank, d: Rank) -> None:
        """P's step may be long: D can be done before P's worker hears of the lease."""
        d.step(pulls=[pull(p.endpoint)])
        wait_for(lambda: d.blocks()[1][4] == 102, "the copy")
        d.step()
        assert not d.reported
        p.step(holds=[hold()])
        run(d, "d1")
        assert d.received == {"d1"}

    def test_failed_pull_is_reported_and_the_next_one_works(
        self, p: Rank, d: Rank, datadist: FakeDataDist
    ) -> None:
        faults = datadist.faults(p.endpoint.cluster_id)
        faults.pull_status, faults.num_pull_failures = LLMStatusCode.LLM_TIMEOUT, 1
        p.step(holds=[hold(1), hold(2)])
        d.step(pulls=[pull(p.endpoint, 1, 1)])
        run(d, "d1")
        d.step(pulls=[pull(p.endpoint, 2, 2)])
        run(d, "d2")
        assert (d.failed, d.received) == ({"d1"}, {"d2"})
        assert "LLM_TIMEOUT" in d.report.failed["d1"]

    def test_dead_peer_s_successor_is_another_cluster_and_served(
        self, p: Rank, d: Rank, make_rank: Callable[..., Rank]
    ) -> None:
        p.step(holds=[hold()])
        job = pull(p.endpoint, 1)
        p.worker.shutdown()
        d.step(pulls=[job])
        run(d, "d1")
        assert d.failed == {"d1"}
        successor = make_rank("kv_producer", 200)
        assert successor.endpoint.cluster_id != job.workers[0].cluster_id
        successor.step(holds=[hold()])
        d.step(pulls=[pull(successor.endpoint, 2)])
        run(d, "d2")
        assert d.blocks()[0][4:6] == [202, 201]

    def test_one_stopped_peer_does_not_delay_another(
        self, p: Rank, d: Rank, make_rank: Callable[..., Rank], datadist: FakeDataDist
    ) -> None:
        other = make_rank("kv_producer", 200)
        gate = datadist.faults(p.endpoint.cluster_id).pull_gate = threading.Event()
        for producer in (p, other):
            producer.step(holds=[hold()])
        d.step(pulls=[pull(p.endpoint, 1), pull(other.endpoint, 2)])
        run(d, "d2")
        assert d.reported == {"d2"}
        gate.set()
        run(d, "d1")

    def test_aborted_request_is_reported_when_its_copy_has_ended_not_before(
        self, p: Rank, d: Rank, datadist: FakeDataDist
    ) -> None:
        faults = datadist.faults(p.endpoint.cluster_id)
        faults.pull_gate = threading.Event()
        p.step(holds=[hold()])
        d.step(pulls=[pull(p.endpoint)])
        assert faults.pull_started.wait(PATIENCE_S)
        d.step(cancels=["d1"])
        for _ in range(5):
            d.step()
        assert not d.reported
        faults.pull_gate.set()
        run(d, "d1")
        assert d.received == {"d1"}

    def test_one_fence_per_step_with_pulls_goes_to_every_job(
        self, p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fences: list[threading.Event] = []

        def record() -> threading.Event:
            fences.append(threading.Event())
            return fences[-1]

        assert d.worker._engine is not None
        monkeypatch.setattr(d.worker._engine, "record_fence", record)
        p.step(holds=[hold(1), hold(2)])
        d.step()
        d.step(pulls=[pull(p.endpoint, 1, 1), pull(p.endpoint, 2, 2)])
        assert len(fences) == 1
        before = d.blocks()
        for _ in range(5):
            d.step()
        assert d.blocks() == before
        fences[0].set()
        run(d, "d1", "d2")
        assert d.received == {"d1", "d2"}


class TestReleaseServer:
    @pytest.mark.parametrize(
        ("change", "is_junk"),
        [({"cluster_id": 5}, True), ({"secret": "guess"}, False), ({"production": 1}, False)],
        ids=["another cluster", "wrong secret", "good"],
    )
    def test_release_is_answered_by_what_it_proves(
        self, p: Rank, change: dict[str, Any], is_junk: bool
    ) -> None:
        p.step(holds=[hold()])
        fields = {"cluster_id": p.endpoint.cluster_id, "claim_id": 1, "production": 1}
        good: dict[str, Any] = {**fields, "secret": SECRET}
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{p.endpoint.control_port}")
        dealer.send(encode(Release(**{**good, **change})))
        dealer.send(encode(Release(**{**good, "claim_id": 2})))
        answers = []
        for _ in range(1 if is_junk else 2):
            assert dealer.poll(int(PATIENCE_S * 1000))
            answer = decode(dealer.recv())
            assert isinstance(answer, ReleaseAck)
            answers.append((answer.claim_id, answer.valid))
        is_good = change == {"production": 1}
        assert answers == ([] if is_junk else [(1, is_good)]) + [(2, True)]
        dealer.close(linger=0)
        context.term()


class TestRegistration:
    def test_only_a_producer_has_an_endpoint(self, p: Rank, d: Rank) -> None:
        assert p.endpoint.engine_port
        assert d.worker.handshake is not None
        assert d.worker.handshake.endpoint is None
        assert p.worker.handshake is not None
        assert p.worker.handshake.groups == d.worker.handshake.groups

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

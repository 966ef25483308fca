"""``WorkerConnector``: P with its scheduler and a D rank, real channels and a fake engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.block_pool import FakeBlockPool
from fakes.builders import make_fingerprint
from fakes.clock import PATIENCE_S, FakeClock, wait_for
from fakes.fake_datadist import FakeDataDist, LLMStatusCode
from fakes.requests import make_request

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.channel import Server
from vllm_llmdd_connector.control.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Claim,
    Grant,
    Hello,
    Message,
    Welcome,
    WorkerEndpoint,
    raw_fingerprint,
)
from vllm_llmdd_connector.errors import ConfigError
from vllm_llmdd_connector.metadata import PullJob, SentPrompt, StepMessage, WorkerReport
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.params import read_ticket
from vllm_llmdd_connector.scheduler.block_map import GroupBlocks
from vllm_llmdd_connector.scheduler.producer import Producer
from vllm_llmdd_connector.worker.worker import WorkerConnector

NUM_BLOCKS = 8
PROMPT = list(range(32))


class FullAttentionSpec:
    """Its name is what counts."""

    block_size = 16


class Rank:
    """One worker with two layers; every byte of block ``b`` is ``fill + b``."""

    def __init__(self, kv_role: str, fill: int, **options: Any) -> None:
        transfer = SimpleNamespace(
            engine_id=kv_role,
            kv_role=kv_role,
            is_kv_producer=kv_role == "kv_producer",
            is_kv_consumer=kv_role == "kv_consumer",
        )
        group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["a", "b"])
        config: Any = SimpleNamespace(kv_transfer_config=transfer)
        kv_cache_config: Any = SimpleNamespace(kv_cache_groups=[group], num_blocks=NUM_BLOCKS)
        self.worker = WorkerConnector(config, kv_cache_config, ConnectorConfig(**options), 0)
        self.caches = {name: torch.empty(NUM_BLOCKS, 64, dtype=torch.uint8) for name in "ab"}
        for cache in self.caches.values():
            cache[:] = torch.arange(fill, fill + NUM_BLOCKS, dtype=torch.uint8)[:, None]
        self.worker.register_kv_caches(self.caches)
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.report = WorkerReport()

    def step(self, **orders: Any) -> None:
        """One engine step with these orders."""
        self.worker.bind(StepMessage(**orders))
        drained = self.worker.poll()
        assert not self.reported & drained.received, "a request was reported twice"
        self.received |= drained.received
        self.failed |= drained.failed.keys()
        report = self.worker.take_report()
        if report is not None:
            self.report.aggregate(report)

    @property
    def reported(self) -> set[str]:
        return self.received | self.failed

    @property
    def endpoint(self) -> WorkerEndpoint:
        handshake = self.worker.handshake
        assert handshake is not None
        assert handshake.endpoint is not None
        return handshake.endpoint

    def blocks(self) -> list[list[int]]:
        """First byte of each block by layer."""
        return [cache[:, 0].tolist() for cache in self.caches.values()]


class Prefill:
    """P: one rank, and the scheduler that holds blocks 1 and 2 for each prompt."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.clock = FakeClock()
        self.pool: Any = FakeBlockPool(NUM_BLOCKS)
        self.server = Server("p-scheduler", "127.0.0.1", 0, lambda: None)
        self.producer = Producer(
            ConnectorConfig(),
            "engine-p",
            "instance-p",
            self.server.port,
            [16],
            NUM_BLOCKS,
            1,
            self.clock,
            TransferStats(),
        )
        self.producer.bind_block_pool(self.pool)
        self.producer.set_identity(make_fingerprint(), (rank.endpoint,))
        self.server.start(self.producer.handle)

    def ask(self, message: AnyMessage) -> Message:
        """What D's scheduler asks, straight to the handler."""
        answers: list[Message] = []
        self.producer.handle(message, answers.append)
        (answer,) = answers
        return answer

    def hold(self, claim_id: int) -> PullJob:
        """Finish a prompt and claim it; returns the order to fetch it into blocks 5 and 4."""
        request_id = f"p{claim_id}"
        params = {"do_remote_decode": True}
        request = make_request(request_id, PROMPT, params, status="FINISHED_STOPPED")
        self.pool.allocate((1, 2))
        _, params = self.producer.request_finished(request, [[1, 2]])
        self.pool.end_request((1, 2))
        assert params is not None
        ticket = read_ticket(params)
        hello = Hello(version=PROTOCOL_VERSION, fingerprint=raw_fingerprint(make_fingerprint()))
        welcome = self.ask(hello)
        assert isinstance(welcome, Welcome)
        claim = Claim(
            session=welcome.session,
            claim_id=claim_id,
            production=ticket.production,
            secret=ticket.secret,
            prompt_hash=ticket.prompt_hash,
        )
        assert self.ask(claim) == Grant(claim_id=claim_id, block_ids=((1, 2),))
        return PullJob(
            request_id=f"d{claim_id}",
            transfer_id=request_id,
            claim_id=claim_id,
            production=ticket.production,
            secret=ticket.secret,
            control_address=ticket.address,
            session=welcome.session,
            workers=welcome.workers,
            groups=[GroupBlocks([1, 2], [5, 4], 0)],
            loaded_blocks=[5, 4],
            timeout_s=60.0,
        )

    def expire_leases(self) -> None:
        self.clock.advance(ConnectorConfig().max_lease_s)
        self.producer.free_ended()

    def close(self) -> None:
        """Idempotent."""
        self.server.close()
        self.rank.worker.shutdown()


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


def run(d: Rank, *request_ids: str) -> None:
    """Empty steps until these requests are reported."""

    def all_reported() -> bool:
        d.step()
        return set(request_ids) <= d.reported

    wait_for(all_reported, f"reports of {request_ids}")


class TestPull:
    def test_blocks_arrive_and_p_gets_its_own_back(self, p: Prefill, d: Rank) -> None:
        d.step(pulls=[p.hold(1)])
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
        d.step(pulls=[job])
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
        d.step(pulls=[p.hold(1)])
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
        d.step(pulls=[p.hold(1)])
        run(d, "d1")
        d.step(pulls=[p.hold(2)])
        run(d, "d2")
        assert (d.failed, d.received) == ({"d1"}, {"d2"})
        assert "LLM_TIMEOUT" in d.report.failed["d1"]

    def test_dead_peer_s_successor_is_another_cluster_and_served(
        self, p: Prefill, d: Rank, make_p: Callable[[int], Prefill]
    ) -> None:
        job = p.hold(1)
        p.close()
        d.step(pulls=[job])
        run(d, "d1")
        assert d.failed == {"d1"}
        successor = make_p(200)
        assert successor.rank.endpoint.cluster_id != job.workers[0].cluster_id
        d.step(pulls=[successor.hold(2)])
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
        d.step(pulls=[job])
        run(d, "d1")
        assert d.report.failed["d1"].startswith("release: P was restarted")
        assert successor.producer.num_leases == 1

    def test_one_stopped_peer_does_not_delay_another(
        self, p: Prefill, d: Rank, make_p: Callable[[int], Prefill], datadist: FakeDataDist
    ) -> None:
        other = make_p(200)
        gate = datadist.faults(p.rank.endpoint.cluster_id).pull_gate = threading.Event()
        d.step(pulls=[p.hold(1), other.hold(2)])
        run(d, "d2")
        assert d.reported == {"d2"}
        gate.set()
        run(d, "d1")

    def test_aborted_request_is_reported_when_its_copy_has_ended_not_before(
        self, p: Prefill, d: Rank, datadist: FakeDataDist
    ) -> None:
        faults = datadist.faults(p.rank.endpoint.cluster_id)
        faults.pull_gate = threading.Event()
        d.step(pulls=[p.hold(1)])
        assert faults.pull_started.wait(PATIENCE_S)
        d.step(cancels=["d1"])
        for _ in range(5):
            d.step()
        assert not d.reported
        faults.pull_gate.set()
        run(d, "d1")
        assert d.received == {"d1"}


class TestPrefillRank:
    def test_p_rank_has_no_thread_of_the_connector(self, p: Prefill, d: Rank) -> None:
        """Its engine answers pulls by itself, and its scheduler the releases."""
        d.step(pulls=[p.hold(1)])
        run(d, "d1")
        names = [thread.name for thread in threading.enumerate()]
        peer = f"llmdd-peer-{p.rank.endpoint.cluster_id:x}"
        assert [name for name in names if name.startswith("llmdd-")] == [peer]

    def test_sent_prompts_are_digested_as_p_s_side(
        self, make_rank: Callable[..., Rank], tmp_path: Path
    ) -> None:
        rank = make_rank("kv_producer", 100, kv_digest=str(tmp_path))
        rank.step(sent_prompts=[SentPrompt("p1", ((1, 2),))])
        rank.worker.shutdown()
        (written,) = tmp_path.rglob("*.jsonl")
        lines = [json.loads(line) for line in written.read_text().splitlines()]
        assert [(line["side"], line["transfer_id"], line["layer"]) for line in lines] == [
            ("send", "p1", "a"),
            ("send", "p1", "b"),
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

"""``WorkerConnector``: a P rank that pushes into a D rank, real channels and a fake engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.clock import wait_for
from fakes.fake_datadist import FakeDataDist
from fakes.rank import NUM_BLOCKS, Prefill, Rank, run

from vllm_llmdd_connector.layout.blocks import WantedBlocks
from vllm_llmdd_connector.metadata import PrefillChunk, ReceiveJob

UNTOUCHED = list(range(NUM_BLOCKS))
PUSHED = [0, 1, 2, 3, 102, 101, 6, 7]
"""P's blocks 1 and 2 in D's blocks 5 and 4."""


@pytest.fixture
def make_rank(datadist: FakeDataDist) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def make(kv_role: str, fill: int, **options: Any) -> Rank:
        ranks.append(Rank(kv_role, fill, **options))
        return ranks[-1]

    yield make
    for rank in reversed(ranks):
        rank.worker.shutdown()
    assert datadist.open_reservations == []


@pytest.fixture
def p(make_rank: Callable[..., Rank]) -> Iterator[Prefill]:
    prefill = Prefill(make_rank("kv_producer", 100))
    yield prefill
    prefill.server.close()


@pytest.fixture
def d(make_rank: Callable[..., Rank]) -> Rank:
    return make_rank("kv_consumer", 0)


def receive(p: Prefill, request_id: str = "d1", **changes: Any) -> ReceiveJob:
    """An order to have transfer ``t`` pushed into blocks 5 and 4."""
    fields: dict[str, Any] = {
        "request_id": request_id,
        "transfer_id": "t",
        "claim_id": 1,
        "control_address": ("127.0.0.1", p.server.port),
        "session": 1,
        "workers": (p.rank.endpoint,),
        "groups": [WantedBlocks([5, 4], 0)],
        "loaded_blocks": [5, 4],
        "timeout_s": 60.0,
    }
    return ReceiveJob(**{**fields, **changes})


def chunk(end: int = 32, blocks: tuple[int, ...] = (1, 2), production: int = 1) -> PrefillChunk:
    return PrefillChunk("t", production, 32, (blocks,), end)


def reserved(datadist: FakeDataDist, d: Rank, number: int = 1) -> None:
    """D has reserved, so its Reserve is on the way."""
    assert d.worker._engine is not None
    cluster_id = d.worker._engine.cluster_id
    wait_for(
        lambda: sum(r.cluster_id == cluster_id for r in datadist.open_reservations) == number,
        "the reservation",
    )


def known(p: Prefill, number: int = 1) -> None:
    """P's worker has taken D's Reserve."""
    pusher = p.rank.worker._pusher
    assert pusher is not None
    plan = pusher._plan

    def count() -> int:
        with pusher._lock:
            parked = sum(len(parts) for parts in plan._parked.values())
            return parked + sum(len(f.reservations) for f in plan._by_transfer.values())

    wait_for(lambda: count() == number, "the Reserve")


class TestPush:
    @pytest.mark.parametrize("d_is_first", [True, False])
    def test_blocks_arrive_whoever_comes_first(self, p: Prefill, d: Rank, d_is_first: bool) -> None:
        if d_is_first:
            d.step(jobs=[receive(p)])
            known(p)
        p.rank.step(chunks=[chunk()])
        p.rank.worker.forward_ended()
        if not d_is_first:
            d.step(jobs=[receive(p)])
        run(d, "d1")
        assert (d.received, d.failed) == ({"d1"}, set())
        assert d.blocks() == [PUSHED] * 2

    def test_each_layer_leaves_when_it_is_computed(self, p: Prefill, d: Rank) -> None:
        d.step(jobs=[receive(p)])
        known(p)
        p.rank.step(chunks=[chunk()])
        p.rank.worker.layer_computed("a")
        wait_for(lambda: d.blocks()[0] == PUSHED, "layer a")
        d.step()
        assert (d.blocks()[1], d.reported) == (UNTOUCHED, set())
        p.rank.worker.layer_computed("b")
        run(d, "d1")
        assert d.blocks() == [PUSHED] * 2
        p.rank.worker.forward_ended()

    def test_chunks_arrive_step_by_step(self, p: Prefill, d: Rank) -> None:
        d.step(jobs=[receive(p)])
        known(p)
        p.rank.step(chunks=[chunk(16, (1, 2))])
        p.rank.worker.forward_ended()
        wait_for(lambda: d.blocks()[1][5] == 101, "the first block")
        d.step()
        assert (d.blocks()[1][4], d.reported) == (4, set())
        p.rank.step(chunks=[chunk(32, ())])
        p.rank.worker.forward_ended()
        run(d, "d1")
        assert d.blocks() == [PUSHED] * 2

    def test_forward_without_prompts_marks_nothing(
        self, p: Prefill, d: Rank, datadist: FakeDataDist
    ) -> None:
        d.step(jobs=[receive(p)])
        known(p)
        p.rank.step()
        p.rank.worker.layer_computed("a")
        p.rank.worker.forward_ended()
        assert d.blocks() == [UNTOUCHED] * 2
        d.step(cancels={"d1": ""})
        run(d, "d1")


class TestVoid:
    def test_void_is_applied_before_the_step_and_the_next_production_arrives(
        self, p: Prefill, d: Rank
    ) -> None:
        d.step(jobs=[receive(p)])
        known(p)
        p.rank.step(chunks=[chunk(16, (1, 2))])
        p.rank.worker.forward_ended()
        wait_for(lambda: d.blocks()[1][5] == 101, "the first block")
        p.rank.step(voids=[1], chunks=[chunk(32, (3, 6), production=2)])
        p.rank.worker.forward_ended()
        run(d, "d1")
        assert d.received == {"d1"}
        assert d.blocks() == [[0, 1, 2, 3, 106, 103, 6, 7]] * 2


class TestGiveUp:
    def test_refused_request_fails_with_the_reason_and_its_blocks_stay(
        self, p: Prefill, d: Rank, datadist: FakeDataDist
    ) -> None:
        d.step(jobs=[receive(p)])
        known(p)
        d.step(cancels={"d1": "announce: P has aborted it"})
        run(d, "d1")
        assert d.report.failed == {"d1": "push: announce: P has aborted it"}
        reserved(datadist, d, 0)
        p.rank.step(chunks=[chunk()])
        p.rank.worker.forward_ended()
        assert d.blocks() == [UNTOUCHED] * 2

    def test_aborted_request_is_reported_once_as_received(self, p: Prefill, d: Rank) -> None:
        d.step(jobs=[receive(p)])
        known(p)
        d.step(cancels={"d1": ""})
        run(d, "d1")
        assert (d.received, d.failed) == ({"d1"}, set())

    def test_blocks_of_an_ended_request_can_be_used_while_p_goes_on(
        self, p: Prefill, d: Rank
    ) -> None:
        """I1: the transfer is in the middle when D gives its blocks to another request."""
        d.step(jobs=[receive(p)])
        known(p)
        p.rank.step(chunks=[chunk()])
        p.rank.worker.layer_computed("a")
        wait_for(lambda: d.blocks()[0] == PUSHED, "layer a")
        d.step(cancels={"d1": ""})
        run(d, "d1")
        for cache in d.caches.values():
            cache[4:6] = 77
        p.rank.worker.forward_ended()
        pusher = p.rank.worker._pusher
        assert pusher is not None
        (sender,) = pusher._carrier.by_cluster.values()  # type: ignore[union-attr]
        wait_for(lambda: not sender._started, "the transfer's end")
        assert [cache[4:6].unique().tolist() for cache in d.caches.values()] == [[77], [77]]

    def test_order_and_cancel_in_one_step_leave_nothing_open(self, p: Prefill, d: Rank) -> None:
        d.step(jobs=[receive(p)], cancels={"d1": "announce: gone"})
        run(d, "d1")
        assert d.failed == {"d1"}


class TestHandshake:
    @pytest.mark.parametrize("push", [True, False])
    def test_rank_takes_reservations_only_where_pushes_are_on(
        self, make_rank: Callable[..., Rank], push: bool
    ) -> None:
        rank = make_rank("kv_producer", 100, push=push)
        assert bool(rank.endpoint.control_port) is push
        assert rank.worker.handshake is not None
        assert rank.worker.handshake.can_push

    def test_step_s_chunks_are_no_trouble_where_pushes_are_off(
        self, make_rank: Callable[..., Rank]
    ) -> None:
        rank = make_rank("kv_producer", 100, push=False)
        rank.step(chunks=[chunk()], voids=[7])
        rank.worker.layer_computed("a")
        rank.worker.forward_ended()
        assert rank.worker.take_stats() is None

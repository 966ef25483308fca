"""``DataDistEngine`` on the fake LLM-DataDist: what it asks for, and errors in words."""

from __future__ import annotations

import ctypes
import importlib
import inspect
from collections.abc import Callable, Iterator

import pytest
from fakes.fake_datadist import FakeDataDist, FakeEngine
from fakes.fake_types import LLMStatusCode

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.errors import LinkError, TransferError, TransferTimeout
from vllm_llmdd_connector.layout.kv_layout import CachePlan, Region
from vllm_llmdd_connector.worker.backend import HostBackend
from vllm_llmdd_connector.worker.engine import DataDistEngine

NUM_BLOCKS, BLOCK_LEN, NUM_LAYERS = 4, 16, 2
P, D = 0xA, 0xD


class Side:
    """An engine with its own memory: block ``b`` of layer ``n`` consists of ``fill + 16n + b``."""

    def __init__(self, cluster_id: int, is_producer: bool, fill: int) -> None:
        layers = [
            bytes(
                fill + 16 * layer + block for block in range(NUM_BLOCKS) for _ in range(BLOCK_LEN)
            )
            for layer in range(NUM_LAYERS)
        ]
        self.memory = [ctypes.create_string_buffer(data, len(data)) for data in layers]
        regions = tuple(
            Region(f"layer{i}", ctypes.addressof(buffer), BLOCK_LEN)
            for i, buffer in enumerate(self.memory)
        )
        self.plan = CachePlan(0, 0, NUM_BLOCKS, BLOCK_LEN, regions)
        config = ConnectorConfig()
        self.engine = DataDistEngine(
            config, HostBackend(config), cluster_id, [self.plan], is_producer
        )

    def blocks(self, layer: int) -> list[int]:
        """The first byte of each block; every block is of one byte value."""
        raw = self.memory[layer].raw
        rows = [raw[i : i + BLOCK_LEN] for i in range(0, len(raw), BLOCK_LEN)]
        assert all(len(set(row)) == 1 for row in rows)
        return [row[0] for row in rows]

    @property
    def endpoint(self) -> WorkerEndpoint:
        engine = self.engine
        return WorkerEndpoint(
            cluster_id=engine.cluster_id,
            host="127.0.0.1",
            engine_port=engine.listen_port,
            control_port=0,
        )


@pytest.fixture
def make_side(datadist: FakeDataDist) -> Iterator[Callable[[int, bool, int], Side]]:
    sides: list[Side] = []

    def make(cluster_id: int, is_producer: bool, fill: int) -> Side:
        sides.append(Side(cluster_id, is_producer, fill))
        return sides[-1]

    yield make
    for side in sides:
        side.engine.close()


@pytest.fixture
def p(make_side: Callable[[int, bool, int], Side]) -> Side:
    return make_side(P, True, 100)


@pytest.fixture
def d(make_side: Callable[[int, bool, int], Side]) -> Side:
    return make_side(D, False, 0)


def test_pull_copies_exactly_the_named_blocks_of_every_region(p: Side, d: Side) -> None:
    d.engine.link(p.endpoint)
    d.engine.pull(P, d.plan, [3, 1], [0, 2])
    assert d.blocks(0) == [103, 1, 101, 3]
    assert d.blocks(1) == [119, 17, 117, 19]


def test_only_a_producer_listens(p: Side, d: Side, datadist: FakeDataDist) -> None:
    assert p.engine.listen_port > 0
    assert datadist.engines[D].options["listen_ip_info"] == ""
    assert datadist.engines[P].options["listen_ip_info"] == "127.0.0.1:0"


def test_only_a_producer_shares_its_memory(p: Side, d: Side, datadist: FakeDataDist) -> None:
    assert datadist.engines[P].options["share_memory"] is True
    assert datadist.engines[D].options["share_memory"] is False


def test_refused_link_names_peer_code_and_detail(p: Side, d: Side, datadist: FakeDataDist) -> None:
    datadist.faults(P).num_link_failures = 1
    with pytest.raises(
        LinkError, match=r"cluster a at 127\.0\.0\.1:\d+ ended with LLM_LINK_FAILED: scripted"
    ):
        d.engine.link(p.endpoint)


def test_second_link_to_one_peer_is_refused_until_unlinked(p: Side, d: Side) -> None:
    d.engine.link(p.endpoint)
    with pytest.raises(LinkError, match="LLM_ALREADY_LINK"):
        d.engine.link(p.endpoint)
    d.engine.unlink(p.endpoint)
    d.engine.link(p.endpoint)


def test_unlink_of_an_unknown_peer_is_silent(p: Side, d: Side) -> None:
    d.engine.unlink(p.endpoint)


def test_pull_without_link_fails_with_the_code(p: Side, d: Side) -> None:
    with pytest.raises(TransferError, match="LLM_NOT_YET_LINK"):
        d.engine.pull(P, d.plan, [0], [0])


def test_pull_outside_the_cache_fails_and_copies_nothing(p: Side, d: Side) -> None:
    d.engine.link(p.endpoint)
    before = d.blocks(0)
    with pytest.raises(TransferError, match=r"2 blocks of cache 0 from cluster a .*\[0, 4\)"):
        d.engine.pull(P, d.plan, [0, 4], [0, 1])
    assert d.blocks(0) == before


def test_dead_peer_is_a_timeout(p: Side, d: Side, datadist: FakeDataDist) -> None:
    d.engine.link(p.endpoint)
    datadist.kill(P)
    with pytest.raises(TransferTimeout, match="LLM_TIMEOUT"):
        d.engine.pull(P, d.plan, [0], [0])


def test_scripted_failure_counts_down(p: Side, d: Side, datadist: FakeDataDist) -> None:
    faults = datadist.faults(P)
    faults.pull_status, faults.num_pull_failures = LLMStatusCode.LLM_FAILED, 1
    d.engine.link(p.endpoint)
    with pytest.raises(TransferError, match="LLM_FAILED"):
        d.engine.pull(P, d.plan, [0], [0])
    d.engine.pull(P, d.plan, [0], [0])
    assert datadist.num_pulls_from(P) == 2


def test_peer_killed_between_two_blocks_ends_the_pull_there(
    p: Side, d: Side, datadist: FakeDataDist
) -> None:
    datadist.faults(P).after_block = lambda done: datadist.kill(P) if done == 3 else None
    d.engine.link(p.endpoint)
    with pytest.raises(TransferTimeout):
        d.engine.pull(P, d.plan, [0, 1], [0, 1])
    assert d.blocks(0) == [100, 101, 2, 3]
    assert d.blocks(1) == [116, 17, 18, 19]


def push(p: Side, d: Side, token: int, src_blocks: list[int], dst_positions: list[int]) -> str:
    """Of all layers, computed already, over D's link; its end."""
    d.engine.link(p.endpoint)
    marks = p.engine.new_synchronizer(NUM_LAYERS)
    marks.mark_all()
    return p.engine.start_push(p.plan, marks, D, token, src_blocks, dst_positions).wait()


def test_push_writes_the_reserved_blocks_by_their_positions(p: Side, d: Side) -> None:
    token = d.engine.open_reservation(d.plan, [3, 0])
    assert push(p, d, token, [1, 2], [0, 1]) == "LLM_SUCCESS"
    assert d.blocks(0) == [102, 1, 2, 101]
    assert d.blocks(1) == [118, 17, 18, 117]


def test_push_into_a_closed_reservation_writes_nothing(p: Side, d: Side) -> None:
    token = d.engine.open_reservation(d.plan, [3, 0])
    d.engine.close_reservation(token)
    d.engine.close_reservation(token)
    before = d.blocks(0)
    assert push(p, d, token, [1, 2], [0, 1]) == "LLM_KV_CACHE_NOT_EXIST"
    assert d.blocks(0) == before


@pytest.mark.parametrize("error", [ValueError("token value is out of range"), TypeError("token")])
def test_push_that_the_api_refuses_is_a_transfer_error(
    p: Side, d: Side, datadist: FakeDataDist, error: Exception
) -> None:
    """What D names comes from outside; any other exception ended P's worker in its next step."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    datadist.api.TransferWithCacheKeyConfig = refuse
    with pytest.raises(TransferError, match="to cluster d did not start: token"):
        push(p, d, 2**63, [1], [0])


def test_fake_has_names_codes_and_arguments_of_the_real_api() -> None:
    """A fake that drifts from the engine would make every test with it worthless."""
    real = pytest.importorskip("vllm_llmdd_connector.datadist", exc_type=ImportError)
    manager = importlib.import_module("vllm_llmdd_connector.datadist.cache_manager")
    fake = FakeDataDist().api
    assert [name for name in vars(fake) if not hasattr(real, name)] == []
    for code in fake.LLMStatusCode:
        assert real.LLMStatusCode[code.name] == code
    for role in fake.LLMRole:
        assert real.LLMRole[role.name] == role
    error = real.LLMException("text", status_code=real.LLMStatusCode.LLM_TIMEOUT)
    assert error.status_code == fake.LLMStatusCode.LLM_TIMEOUT
    engine = real.LLMDataDist(real.LLMRole.DECODER, 1)
    for name in ("init", "finalize", "link_clusters", "unlink_clusters", "last_link_error"):
        assert callable(getattr(engine, name))
    for name in ("open_reservation", "close_reservation", "transfer_cache_async"):
        theirs = inspect.signature(getattr(manager.CacheManager, name)).parameters
        assert inspect.signature(getattr(FakeEngine, name)).parameters.keys() <= theirs.keys()
    for name in ("mark", "mark_all", "reset"):
        assert callable(getattr(real.NativeLayerSynchronizer(1), name))

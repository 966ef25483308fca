"""Engine ``ascend``: P and D in two processes over the vendor's names, with its restrictions.

The package ``llm_datadist`` is our engine behind ``fakes.strict_vendor``; it raises a ``Violation``
where the vendor's documentation forbids a call.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from fakes.clock import wait_for
from fakes.install import vendor_importable
from fakes.rank import Rank, run
from fakes.rank_process import RankProcess

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.datadist import ascend
from vllm_llmdd_connector.errors import LinkError, TransferError, TransferTimeout
from vllm_llmdd_connector.layout.kv_layout import plan_caches
from vllm_llmdd_connector.worker.backend import choose_backend
from vllm_llmdd_connector.worker.engine import DataDistEngine

OPTIONS = {"engine": "ascend", "link_timeout_ms": 300, "sync_kv_timeout_ms": 700}


@pytest.fixture(autouse=True)
def _vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``llm_datadist`` can be imported here as in the other process."""
    monkeypatch.setattr(ascend, "LINK_MARGIN_MS", 100)
    with vendor_importable(monkeypatch):
        yield


@pytest.fixture
def violations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A forbidden call in any thread of this process fails the test."""
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    yield
    assert seen == []


@pytest.fixture(scope="module")
def idle() -> Iterator[list[RankProcess]]:
    """Prefill ranks that no test uses; one costs an import of vLLM."""
    processes: list[RankProcess] = []
    yield processes
    for process in processes:
        process.close()


@pytest.fixture
def make_p(idle: list[RankProcess]) -> Iterator[Callable[..., RankProcess]]:
    started: list[RankProcess] = []

    def make() -> RankProcess:
        started.append(idle.pop() if idle else RankProcess(100, **OPTIONS))
        return started[-1]

    yield make
    for process in started:
        if process.is_alive():
            idle.append(process)
        else:
            process.close()


@pytest.fixture
def d(violations: None) -> Iterator[Rank]:
    rank = Rank("kv_consumer", 0, **OPTIONS)
    yield rank
    rank.worker.shutdown()


class Puller:
    """D's engine without the worker around it."""

    def __init__(self) -> None:
        config = ConnectorConfig(**OPTIONS)  # type: ignore[arg-type]
        self.caches = {name: torch.zeros(8, 64, dtype=torch.uint8) for name in "ab"}
        (self.plan,) = plan_caches([["a", "b"]], self.caches, 8)
        backend = choose_backend(config, self.caches)
        self.engine = DataDistEngine(config, backend, 0xD, [self.plan], False)


@pytest.fixture
def puller(violations: None) -> Iterator[Puller]:
    puller = Puller()
    yield puller
    puller.engine.close()


@pytest.fixture
def silent() -> Iterator[int]:
    """A port whose owner accepts and says nothing until the test ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_blocks_arrive_byte_exact_and_a_killed_peer_s_successor_is_served(
    make_p: Callable[..., RankProcess], d: Rank
) -> None:
    p = make_p()
    job, late = p.call("hold", 1), p.call("hold", 2)
    d.step(jobs=[job])
    run(d, "d1")
    assert d.received == {"d1"}
    expected = torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 64)
    expected[5], expected[4] = 101, 102
    for cache in d.caches.values():
        assert torch.equal(cache, expected)
    assert p.call("num_leases") == 1
    p.kill()
    d.step(jobs=[late])
    run(d, "d2")
    assert d.failed == {"d2"}
    successor = make_p()
    for cache in d.caches.values():
        cache.zero_()
    d.step(jobs=[successor.call("hold", 3)])
    run(d, "d3")
    assert d.received == {"d1", "d3"}
    assert d.blocks() == [[0, 0, 0, 0, 102, 101, 0, 0]] * 2


def test_silent_and_absent_listeners_end_in_sentences(
    make_p: Callable[..., RankProcess], d: Rank, silent: int
) -> None:
    p = make_p()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        closed = unused.getsockname()[1]
    for claim_id, port, sentence in (
        (11, closed, "LLM_LINK_FAILED: nobody listens there"),
        (12, silent, "does not answer: an earlier attempt to link it still waits"),
    ):
        job = p.call("hold", claim_id)
        wrong = msgspec.structs.replace(p.endpoint, engine_port=port, cluster_id=claim_id)
        d.step(jobs=[dataclasses.replace(job, workers=(wrong,))])
        run(d, f"d{claim_id}")
        assert sentence in d.report.failed[f"d{claim_id}"]
    d.step(jobs=[p.call("hold", 13)])
    run(d, "d13")
    assert d.received == {"d13"}


class TestEngine:
    """One pull after the other, against one P; status codes as before CANN 9.1."""

    @pytest.fixture(autouse=True)
    def _plain_enum(self, _vendor: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STRICT_VENDOR_PLAIN_ENUM", "1")

    def test_stopped_then_killed_peer_map_to_timeout_and_failure(
        self, make_p: Callable[..., RankProcess], puller: Puller
    ) -> None:
        p = make_p()
        endpoint, engine = p.endpoint, puller.engine
        with pytest.raises(TransferError, match=r"LLM_NOT_YET_LINK.*there is no link to that"):
            engine.pull(endpoint.cluster_id, puller.plan, [1], [2])
        engine.link(endpoint)
        engine.pull(endpoint.cluster_id, puller.plan, [1, 7], [2, 0])
        for cache in puller.caches.values():
            assert cache[2].tolist() == [101] * 64
            assert cache[0].tolist() == [107] * 64
        with pytest.raises(LinkError, match="LLM_ALREADY_LINK: a link of that name is left over"):
            engine.link(endpoint)
        with pytest.raises(TransferError, match=r"LLM_PARAM_INVALID.*do not agree"):
            engine.pull(endpoint.cluster_id, puller.plan, [8], [0])
        p.stop()
        with pytest.raises(TransferTimeout, match=r"LLM_TIMEOUT.*raise sync_kv_timeout_ms"):
            engine.pull(endpoint.cluster_id, puller.plan, [1], [2])
        engine.unlink(endpoint)
        with pytest.raises(LinkError, match="did not answer within 400 ms"):
            engine.link(endpoint)
        engine.unlink(endpoint)
        p.resume()
        link_again(engine, endpoint)
        engine.pull(endpoint.cluster_id, puller.plan, [3], [3])
        assert puller.caches["b"][3].tolist() == [103] * 64
        p.kill()
        with pytest.raises(TransferError, match=r"LLM_FAILED.*ASCEND_GLOBAL_LOG_LEVEL"):
            engine.pull(endpoint.cluster_id, puller.plan, [1], [2])
        engine.unlink(endpoint)
        with pytest.raises(LinkError, match="LLM_LINK_FAILED: nobody listens there"):
            engine.link(endpoint)


def link_again(engine: DataDistEngine, endpoint: WorkerEndpoint) -> None:
    """The abandoned attempt ends now, maybe with a link: unlink and link as a peer thread does."""

    def linked() -> bool:
        engine.unlink(endpoint)
        try:
            engine.link(endpoint)
        except LinkError:
            return False
        return True

    wait_for(linked, "a link to the resumed peer")

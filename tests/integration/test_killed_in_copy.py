"""P or D is killed in the middle of a large copy from shared pages; the other one lives on.

Copies are D's work, in both flows, and slowed down so that they cannot end before the kill. What
the survivor holds is compared with what it held beside a living peer: nothing of the dead is left.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes.clock import wait_for
from fakes.fetch_remote import FetchRemote
from fakes.forked_process import ForkedProcess
from fakes.rank import Prefill, Rank, receive_job, run
from fakes.rank_process import Remote

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.datadist import _engine
from vllm_llmdd_connector.worker import senders

FLOWS = ["pull", "push"]
BLOCK_BYTES = 4 << 20
"""Of a layer; a transfer has two blocks of two layers."""
SLOW = 1 << 20
"""Bytes a second: 16 s for a transfer."""
OPTIONS: dict[str, Any] = {"transport": "shm", "sync_kv_timeout_ms": 3000}
LEASE_S = ConnectorConfig().lease_s
FILL_P, FILL_D, CANARY = 100, 0, 77
FROM, INTO = (1, 2), (5, 4)

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Held:
    """What a process holds of others, and for them."""

    descriptors: int
    threads: int
    foreign_pages: int
    """Mapped areas of memory that others share."""

    @classmethod
    def now(cls) -> Held:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return cls(
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            sum("/memfd:llmdd-kv" in line and " r--s " in line for line in maps),
        )

    def is_back(self) -> bool:
        now = Held.now()
        return (
            now.descriptors <= self.descriptors
            and now.threads <= self.threads
            and now.foreign_pages <= self.foreign_pages
        )


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts processes, which the test may kill."""
    processes: list[ForkedProcess] = []

    def started(kind: type[Any], fill: int) -> ForkedProcess:
        processes.append(ForkedProcess(kind, fill, block_bytes=BLOCK_BYTES, **OPTIONS))
        return processes[-1]

    yield started
    for process in processes:
        process.close()


@pytest.fixture
def slow_down() -> Iterator[Callable[[int], None]]:
    yield _engine.testing.set_copy_rate
    _engine.testing.set_copy_rate(0)


class TestPIsKilled:
    @pytest.fixture
    def d(self) -> Iterator[Rank]:
        rank = Rank("kv_consumer", FILL_D, block_bytes=BLOCK_BYTES, **OPTIONS)
        yield rank
        rank.worker.shutdown()

    @staticmethod
    def begin(d: Rank, p: ForkedProcess, flow: str, number: int) -> str:
        """Order one transfer; returns its request."""
        if flow == "pull":
            d.step(jobs=[p.call("hold", number)])
        else:
            d.step(jobs=[receive_job(number, p.call("control_port"), p.endpoint)])
            p.call("push", number)
        return f"d{number}"

    def check(self, d: Rank, p: ForkedProcess, flow: str, number: int) -> None:
        """One transfer whose every byte is right."""
        for block in INTO:
            d.fill(block, 0)
        request_id = self.begin(d, p, flow, number)
        run(d, request_id)
        assert d.report.failed.get(request_id, "") == ""
        for source, block in zip(FROM, INTO, strict=True):
            assert d.holds(block, FILL_P + source)

    @pytest.mark.parametrize("flow", FLOWS)
    def test_d_ends_the_request_and_keeps_nothing_of_p(
        self, d: Rank, start: Any, slow_down: Callable[[int], None], flow: str
    ) -> None:
        killed = start(Remote, FILL_P)
        self.check(d, killed, flow, 1)
        beside_p = Held.now()
        assert beside_p.foreign_pages, "P's pages are not shared"

        d.fill(INTO[0], 0)
        slow_down(SLOW)
        request_id = self.begin(d, killed, flow, 2)
        wait_for(lambda: d.caches["a"][INTO[0], 0] == FILL_P + FROM[0], "the copy's first bytes")
        assert not d.reported & {request_id}
        killed.kill()
        run(d, request_id)
        assert d.report.failed[request_id]
        for block in INTO:
            d.fill(block, CANARY)
        wait_for(lambda: not Held.now().foreign_pages, "the end of P's pages")
        assert all(d.holds(block, CANARY) for block in INTO)

        slow_down(0)
        self.check(d, start(Remote, FILL_P), flow, 3)
        wait_for(beside_p.is_back, f"one peer's share: {beside_p}")


class TestDIsKilled:
    @pytest.fixture
    def p(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefill]:
        # A thread that sends to one D waits for its next prompt, by default longer than a test.
        monkeypatch.setattr(senders, "IDLE_S", 0.5)
        rank = Rank("kv_producer", FILL_P, block_bytes=BLOCK_BYTES, **OPTIONS)
        prefill = Prefill(rank, **OPTIONS)
        yield prefill
        prefill.close()

    @staticmethod
    def begin(p: Prefill, d: ForkedProcess, flow: str, number: int) -> str:
        """Order one transfer; returns its request."""
        if flow == "pull":
            d.call("start", dataclasses.replace(p.hold(number), timeout_s=60.0))
            p.step()
        else:
            d.call("start", receive_job(number, p.server.port, p.rank.endpoint))
            p.push(number)
        return f"d{number}"

    def check(self, p: Prefill, d: ForkedProcess, flow: str, number: int) -> None:
        """One transfer whose every byte is right; P holds nothing for it afterwards."""
        assert d.call("wait", self.begin(p, d, flow, number)) == ""
        for source, block in zip(FROM, INTO, strict=True):
            assert d.call("holds", block, FILL_P + source)
        wait_for(lambda: is_at_rest(p, number), "P's rest")

    @pytest.mark.parametrize("flow", FLOWS)
    def test_p_ends_the_lease_and_keeps_nothing_of_d(
        self, p: Prefill, start: Any, flow: str
    ) -> None:
        killed = start(FetchRemote, FILL_D)
        self.check(p, killed, flow, 1)
        beside_d = Held.now()

        killed.call("slow_down", SLOW)
        killed.call("clear")
        self.begin(p, killed, flow, 2)
        killed.call("wait_for_first_byte", INTO[0], FILL_P + FROM[0])
        assert not is_at_rest(p, 2)
        killed.kill()
        if flow == "pull":
            p.clock.advance(LEASE_S - 0.1)
            assert not is_at_rest(p, 2)
            p.clock.advance(0.1)
        wait_for(lambda: is_at_rest(p, 2), "the end of the dead D's transfer")
        self.check(p, start(FetchRemote, FILL_D), flow, 3)
        wait_for(beside_d.is_back, f"one peer's share: {beside_d}")


def is_at_rest(p: Prefill, number: int) -> bool:
    """Whether P holds no lease and sends nothing; its prompt's production ends here."""
    p.producer.free_ended()
    pusher = p.rank.worker._pusher
    assert pusher is not None
    if p.producer.num_leases or pusher.num_under_way:
        return False
    pusher.void([1000 + number])
    with pusher._lock:
        return not pusher._plan.num_prefills + pusher._plan.num_parked

"""``PeerThread`` with ``integrity``: nothing is reported as received before its sums are P's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fakes.pull_peer import ReleasePeer
from fakes.puller import TP_RANK, Puller
from fakes.summed_memory import SummedMemory
from fakes.worker_peer import WorkerPeer

from vllm_llmdd_connector.control.messages import (
    AskSums,
    BlockSpan,
    Cancel,
    GroupSums,
    NoSums,
    Release,
    Reserve,
    Sums,
)
from vllm_llmdd_connector.layout.blocks import GroupBlocks, WantedBlocks
from vllm_llmdd_connector.worker import verify as module
from vllm_llmdd_connector.worker.checksum import pack

INTO = [5, 4, 2]
FIRST = 1
PULL = [GroupBlocks([1, 2, 3], INTO, FIRST)]
PUSH = [WantedBlocks(INTO, FIRST)]


@pytest.fixture
def memory() -> SummedMemory:
    return SummedMemory()


@pytest.fixture
def make_puller(
    scheduler: ReleasePeer, worker: WorkerPeer, memory: SummedMemory
) -> Iterator[Callable[..., Puller]]:
    pullers: list[Puller] = []

    def make(**options: float) -> Puller:
        scheduler.worker_port = worker.port
        pullers.append(Puller(scheduler, memory, **options))
        return pullers[-1]

    yield make
    for puller in pullers:
        puller.close()
        assert puller.engine.open_tokens == [], "a reservation outlived its thread"


@pytest.fixture
def puller(make_puller: Callable[..., Puller]) -> Puller:
    return make_puller()


def group_sums(memory: SummedMemory, blocks: list[int], count: int = 3) -> tuple[GroupSums, ...]:
    """Those that P sends when its blocks are D's ``blocks``."""
    return (GroupSums(count=count, sums=pack(memory.sums(*blocks))),)


def reason_of(puller: Puller, request_id: str) -> str:
    puller.wait_reported(request_id)
    return puller.failed[request_id]


class TestPull:
    def test_sums_are_asked_for_before_the_release(
        self, puller: Puller, worker: WorkerPeer, scheduler: ReleasePeer, memory: SummedMemory
    ) -> None:
        request_id = puller.submit(7, groups=PULL)
        ask = worker.next(AskSums)
        assert (ask.to_cluster, ask.production, ask.secret) == (0xA, 1007, "s")
        assert ask.spans == (BlockSpan(first=FIRST, count=3),)
        assert not scheduler.has_message()
        worker.say(Sums(number=ask.number, groups=group_sums(memory, INTO)))
        release = scheduler.next_release()
        assert release == Release(session=5, claim_id=7, rank=TP_RANK, production=1007, secret="s")
        scheduler.ack(release)
        puller.wait_reported(request_id)
        assert puller.received == [request_id]
        counts, failures = puller.figures()
        assert counts["integrity_checked_blocks"] == 3
        assert "integrity_failed_blocks" not in counts
        assert failures == {}

    def test_equal_sums_of_a_lease_that_ended_do_not_count(
        self, puller: Puller, worker: WorkerPeer, scheduler: ReleasePeer, memory: SummedMemory
    ) -> None:
        """Both the copy and P's sums may be of blocks that were another's."""
        request_id = puller.submit(7, groups=PULL)
        ask = worker.next(AskSums)
        worker.say(Sums(number=ask.number, groups=group_sums(memory, INTO)))
        scheduler.ack(scheduler.next_release(), valid=False)
        assert reason_of(puller, request_id).startswith("release: P had given the blocks up")

    def test_a_flipped_byte_fails_it_and_is_named(
        self,
        puller: Puller,
        worker: WorkerPeer,
        scheduler: ReleasePeer,
        memory: SummedMemory,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        right = group_sums(memory, INTO)
        memory.flip(region=2, block=4, offset=17)
        request_id = puller.submit(7, groups=PULL)
        worker.say(Sums(number=worker.next(AskSums).number, groups=right))
        assert reason_of(puller, request_id).startswith(
            "integrity: 1 of 3 checked blocks differ from P's: block 2 of the prompt "
            "(KV cache group 0, 4); a sum of group 0 is over 3 layers, r0 to r2; if it comes again"
        )
        counts, failures = puller.figures()
        assert (counts["integrity_checked_blocks"], counts["integrity_failed_blocks"]) == (3, 1)
        assert failures == {"integrity": 1}
        assert f"request {request_id}: stage integrity failed, prefill server" in caplog.text
        assert not scheduler.has_message(), "the scheduler side drops the claim"

    def test_many_bad_blocks_are_counted_and_some_are_named(
        self, puller: Puller, worker: WorkerPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_MAX_NAMED", 1)
        request_id = puller.submit(7, groups=PULL)
        wrong = (GroupSums(count=3, sums=bytes(24)),)
        worker.say(Sums(number=worker.next(AskSums).number, groups=wrong))
        assert "3 of 3 checked blocks" in reason_of(puller, request_id)
        assert "block 1 of the prompt (KV cache group 0, 5) and 2 more" in puller.failed[request_id]

    def test_a_last_block_may_have_no_sum(
        self, puller: Puller, worker: WorkerPeer, scheduler: ReleasePeer, memory: SummedMemory
    ) -> None:
        memory_of_p = group_sums(memory, INTO[:2], count=2)
        memory.flip(region=0, block=INTO[2], offset=0)
        request_id = puller.submit(7, groups=PULL)
        worker.say(Sums(number=worker.next(AskSums).number, groups=memory_of_p))
        scheduler.ack(scheduler.next_release())
        puller.wait_reported(request_id)
        assert puller.figures()[0]["integrity_checked_blocks"] == 2

    @pytest.mark.parametrize(
        ("groups", "words"),
        [
            ((), "checksums of 0 KV cache groups, expected 1"),
            ((GroupSums(count=1, sums=bytes(8)),), "1 checksums for 1 blocks"),
            ((GroupSums(count=3, sums=bytes(16)),), "2 checksums for 3 blocks"),
            ((GroupSums(count=3, sums=bytes(23)),), "2 checksums for 3 blocks"),
            ((GroupSums(count=4, sums=bytes(32)),), "4 checksums for 4 blocks"),
        ],
        ids=str,
    )
    def test_missing_sums_fail_it(
        self, puller: Puller, worker: WorkerPeer, groups: tuple[GroupSums, ...], words: str
    ) -> None:
        request_id = puller.submit(7, groups=PULL)
        worker.say(Sums(number=worker.next(AskSums).number, groups=groups))
        assert f"integrity: P sent {words}" in reason_of(puller, request_id)

    def test_refusal_fails_it_with_p_s_reason(self, puller: Puller, worker: WorkerPeer) -> None:
        request_id = puller.submit(7, groups=PULL)
        worker.say(NoSums(number=worker.next(AskSums).number, reason="lease\nended"))
        assert reason_of(puller, request_id) == "integrity: lease?ended"

    def test_question_is_repeated_and_an_answer_to_another_says_nothing(
        self,
        puller: Puller,
        worker: WorkerPeer,
        scheduler: ReleasePeer,
        memory: SummedMemory,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(module, "RESEND_S", 0.02)
        request_id = puller.submit(7, groups=PULL)
        first, second = worker.next(AskSums), worker.next(AskSums)
        assert first == second
        worker.say(NoSums(number=first.number + 2, reason="of another"))
        for _ in range(3):
            worker.say(Sums(number=first.number, groups=group_sums(memory, INTO)))
        scheduler.ack(scheduler.next_release())
        puller.wait_reported(request_id)
        assert puller.received == [request_id]

    def test_silence_fails_it_by_the_deadline(
        self,
        make_puller: Callable[..., Puller],
        worker: WorkerPeer,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(module, "RESEND_S", 0.02)
        puller = make_puller(request_timeout_s=0.1)
        request_id = puller.submit(7, groups=PULL, timeout_s=0.1)
        assert reason_of(puller, request_id) == (
            "integrity: P did not send its checksums within 0.1 s (raise request_timeout_s)"
        )

    def test_loss_of_p_s_worker_fails_it_at_once(self, puller: Puller, worker: WorkerPeer) -> None:
        request_id = puller.submit(7, groups=PULL)
        worker.next(AskSums)
        worker.close()
        assert "lost" in reason_of(puller, request_id)
        assert puller.figures()[1] == {"integrity": 1}

    def test_next_job_is_pulled_while_the_sums_are_awaited(
        self, puller: Puller, worker: WorkerPeer, scheduler: ReleasePeer, memory: SummedMemory
    ) -> None:
        ids = [puller.submit(claim_id, groups=PULL) for claim_id in (1, 2)]
        asks = [worker.next(AskSums) for _ in ids]
        for ask in reversed(asks):
            worker.say(Sums(number=ask.number, groups=group_sums(memory, INTO)))
        for release in scheduler.releases_by_claim([1, 2]).values():
            scheduler.ack(release)
        puller.wait_reported(*ids)
        assert sorted(puller.received) == ids

    def test_abort_does_not_wait_for_the_sums(self, puller: Puller, worker: WorkerPeer) -> None:
        request_id = puller.submit(7, groups=PULL)
        worker.next(AskSums)
        puller.completions.cancel(request_id)
        puller.thread.give_up(request_id, "aborted")
        puller.wait_reported(request_id)
        assert puller.received == [request_id], "nobody reads it"
        assert puller.figures()[1] == {}

    def test_close_fails_what_waits(self, puller: Puller, worker: WorkerPeer) -> None:
        request_id = puller.submit(7, groups=PULL)
        worker.next(AskSums)
        puller.thread.close()
        assert reason_of(puller, request_id) == "integrity: the worker is shutting down"


class TestPush:
    def test_equal_sums_are_received(
        self, puller: Puller, worker: WorkerPeer, scheduler: ReleasePeer, memory: SummedMemory
    ) -> None:
        request_id = puller.submit_receive(7, groups=PUSH)
        worker.done(worker.next(Reserve), sums=group_sums(memory, INTO))
        puller.wait_reported(request_id)
        assert puller.received == [request_id]
        assert scheduler.next_release().claim_id == 7
        assert puller.figures()[0]["integrity_checked_blocks"] == 3

    def test_a_flipped_byte_fails_it_after_the_reservation_is_closed(
        self, puller: Puller, worker: WorkerPeer, scheduler: ReleasePeer, memory: SummedMemory
    ) -> None:
        right = group_sums(memory, INTO)
        memory.flip(region=0, block=5, offset=0)
        request_id = puller.submit_receive(7, groups=PUSH)
        worker.done(worker.next(Reserve), sums=right)
        assert "block 1 of the prompt (KV cache group 0, 5)" in reason_of(puller, request_id)
        assert puller.engine.open_tokens == []
        assert puller.figures()[1] == {"integrity": 1}
        assert not scheduler.has_message()

    def test_done_without_sums_fails_it(self, puller: Puller, worker: WorkerPeer) -> None:
        request_id = puller.submit_receive(7, groups=PUSH)
        worker.done(worker.next(Reserve))
        assert "checksums of 0 KV cache groups" in reason_of(puller, request_id)

    def test_late_sums_fail_it_by_the_deadline(
        self, make_puller: Callable[..., Puller], worker: WorkerPeer
    ) -> None:
        puller = make_puller(request_timeout_s=0.1)
        request_id = puller.submit_receive(7, groups=PUSH, timeout_s=0.1)
        reserve = worker.next(Reserve)
        worker.next(Cancel)
        worker.done(reserve)
        assert reason_of(puller, request_id).startswith("push: P did not send all blocks within")

    def test_blocks_of_an_aborted_request_are_not_read(
        self, puller: Puller, worker: WorkerPeer
    ) -> None:
        request_id = puller.submit_receive(7, groups=PUSH)
        reserve = worker.next(Reserve)
        puller.completions.cancel(request_id)
        worker.done(reserve, sums=(GroupSums(count=3, sums=bytes(24)),))
        puller.wait_reported(request_id)
        assert puller.received == [request_id]
        counts, failures = puller.figures()
        assert "integrity_checked_blocks" not in counts
        assert failures == {}


def test_off_asks_for_nothing(scheduler: ReleasePeer, worker: WorkerPeer) -> None:
    scheduler.worker_port = worker.port
    puller = Puller(scheduler)
    request_id = puller.submit(7)
    scheduler.ack(scheduler.next_release())
    puller.wait_reported(request_id)
    assert puller.received == [request_id]
    assert not worker.has_message()
    puller.close()

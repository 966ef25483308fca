"""P's worker sums leased prompts: for whom knows the secret, while the lease lives, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.clock import wait_for
from fakes.summed_memory import SummedMemory

from vllm_llmdd_connector.control.messages import (
    NOT_HELD,
    AskSums,
    BlockSpan,
    GroupSums,
    Message,
    NoSums,
    Sums,
)
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.metadata import LeasedPrompt
from vllm_llmdd_connector.worker import lease_sums as module
from vllm_llmdd_connector.worker.checksum import BlockReader, pack
from vllm_llmdd_connector.worker.lease_sums import LeaseSums
from vllm_llmdd_connector.worker.sum_thread import SumThread

P = 0xA
BLOCKS = (4, 2, 5)


class HeldReader(BlockReader):
    """Reads only what the test lets it."""

    def __init__(self, memory: SummedMemory) -> None:
        super().__init__(memory.plans)
        self.before_region: Callable[[], None] = lambda: None
        self.num_read = 0

    def add(self, *args: Any) -> bool:
        self.before_region()
        is_complete = super().add(*args)
        self.num_read += is_complete
        return is_complete


class Worker:
    """One rank's part that answers; ``answers`` is what D was told."""

    def __init__(self) -> None:
        self.memory = SummedMemory()
        self.reader = HeldReader(self.memory)
        self.thread = SumThread(self.reader)
        self.sums = LeaseSums(self.memory.plans, "full", self.thread, P)
        self.answers: list[Message] = []

    def hold(self, production: int = 7, num_final: int = 3, **changes: Any) -> None:
        fields = {"secret": "s", "block_ids": (BLOCKS,), "num_final": (num_final,)}
        self.sums.update([LeasedPrompt(production=production, **{**fields, **changes})], [])

    def ask(self, number: int = 1, first: int = 0, count: int = 3, **changes: Any) -> None:
        fields = {
            "to_cluster": P,
            "production": 7,
            "secret": "s",
            "spans": (BlockSpan(first=first, count=count),),
        }
        self.sums.handle(AskSums(number=number, **{**fields, **changes}), self.answers.append)

    def end(self, production: int = 7) -> None:
        self.sums.update([], [production])

    def expected(self, *blocks: int, number: int = 1) -> Sums:
        sums = pack(self.memory.sums(*blocks))
        return Sums(number=number, groups=(GroupSums(count=len(blocks), sums=sums),))

    def wait_answers(self, count: int = 1) -> list[Message]:
        wait_for(lambda: len(self.answers) >= count, f"{count} answers")
        return self.answers


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.thread.close()


def refused(number: int = 1) -> list[Message]:
    return [NoSums(number=number, reason=NOT_HELD)]


class TestAnswers:
    def test_blocks_of_the_span_by_position(self, worker: Worker) -> None:
        worker.hold()
        worker.ask(first=1, count=2)
        assert worker.wait_answers() == [worker.expected(2, 5)]

    def test_a_last_block_that_changes_is_left_out(self, worker: Worker) -> None:
        worker.hold(num_final=2)
        worker.ask()
        assert worker.wait_answers() == [worker.expected(4, 2)]

    @pytest.mark.parametrize(("first", "count"), [(3, 0), (2, 1)])
    def test_without_a_block_to_sum_the_answer_comes_at_once(
        self, worker: Worker, first: int, count: int
    ) -> None:
        worker.hold(num_final=2)
        worker.ask(first=first, count=count)
        assert worker.answers == [Sums(number=1, groups=(GroupSums(count=0, sums=b""),))]
        assert worker.reader.num_read == 0

    def test_a_question_before_the_step_waits_for_it(self, worker: Worker) -> None:
        worker.ask()
        assert worker.answers == []
        worker.hold()
        assert worker.wait_answers() == [worker.expected(*BLOCKS)]

    def test_a_repeated_question_is_answered_once_while_it_is_computed(
        self, worker: Worker
    ) -> None:
        worker.reader.before_region = lambda: [worker.ask() for _ in range(3)] and None
        worker.hold()
        worker.ask()
        worker.wait_answers()
        worker.thread.close()
        assert worker.answers == [worker.expected(*BLOCKS)]

    def test_several_questions_each_have_their_answer(self, worker: Worker) -> None:
        worker.hold()
        for number in (1, 3, 5):
            worker.ask(number)
        answers = worker.wait_answers(3)
        assert {answer.number for answer in answers if isinstance(answer, Sums)} == {1, 3, 5}


class TestRefusals:
    @pytest.mark.parametrize("is_held", [True, False])
    def test_wrong_secret(self, worker: Worker, is_held: bool) -> None:
        worker.ask(secret="guessed")
        worker.hold()
        if is_held:
            worker.ask(number=3, secret="guessed")
            assert worker.answers == refused(1) + refused(3)
        assert worker.answers[:1] == refused()
        assert worker.reader.num_read == 0

    @pytest.mark.parametrize(
        "spans",
        [
            (),
            (BlockSpan(first=0, count=4),),
            (BlockSpan(first=3, count=1),),
            (BlockSpan(first=0, count=1), BlockSpan(first=0, count=1)),
        ],
        ids=str,
    )
    def test_blocks_that_the_lease_does_not_have(
        self, worker: Worker, spans: tuple[BlockSpan, ...]
    ) -> None:
        worker.hold()
        worker.ask(spans=spans)
        reason = "the prefill server does not hold all of the blocks"
        assert worker.answers == [NoSums(number=1, reason=reason)]

    def test_a_block_that_has_left_a_window(self, worker: Worker) -> None:
        worker.hold(block_ids=((0, 2, 5),))
        worker.ask()
        worker.ask(number=3, first=1, count=2)
        assert isinstance(worker.wait_answers(2)[0], NoSums)
        assert worker.answers[1] == worker.expected(2, 5, number=3)

    def test_another_process_at_this_address(self, worker: Worker) -> None:
        with pytest.raises(RemoteProtocolError, match="AskSums for cluster b"):
            worker.ask(to_cluster=0xB)


class TestEndOfALease:
    def test_afterwards_nothing_is_read(self, worker: Worker) -> None:
        worker.hold()
        worker.end()
        worker.ask()
        assert worker.answers == refused()
        assert worker.reader.num_read == 0

    def test_a_question_that_waits_for_its_step_is_refused(self, worker: Worker) -> None:
        worker.ask()
        worker.end()
        assert worker.answers == refused()

    def test_in_the_middle_it_stops_the_reading_without_waiting_for_it(
        self, worker: Worker
    ) -> None:
        def end() -> None:
            worker.reader.before_region = lambda: None
            worker.end()

        worker.reader.before_region = end
        worker.hold()
        worker.ask()
        assert worker.wait_answers() == refused()
        worker.hold(production=8)
        worker.ask(number=3, production=8)
        assert worker.wait_answers(2)[1] == worker.expected(*BLOCKS, number=3)
        assert worker.reader.num_read == 3, "of the second question only"


class TestBounds:
    def test_questions_for_unknown_leases_push_out_the_oldest(
        self, worker: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MAX_PARKED", 2)
        for production in (1, 2, 3):
            worker.ask(number=production, production=production)
        for production in (1, 2, 3):
            worker.hold(production=production)
        assert {a.number for a in worker.wait_answers(2) if isinstance(a, Sums)} == {2, 3}

    def test_ended_leases_are_forgotten_at_last(
        self, worker: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MAX_ENDED", 2)
        for production in (1, 2, 3):
            worker.end(production)
        worker.ask(number=3, production=3)
        worker.ask(number=1, production=1)
        assert worker.answers == refused(3)

    def test_questions_about_one_lease(
        self, worker: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MAX_PER_LEASE", 2)
        for number in (1, 3, 5):
            worker.ask(number)
        worker.hold()
        assert {a.number for a in worker.wait_answers(2) if isinstance(a, Sums)} == {1, 3}


def test_an_error_ends_one_job_and_not_the_thread(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        worker.reader.before_region = lambda: None
        raise OSError("torn")

    worker.reader.before_region = fail
    worker.hold()
    worker.ask()
    wait_for(lambda: "checksums of cache 0 failed" in caplog.text, "the log line")
    worker.ask(number=3)
    assert worker.wait_answers() == [worker.expected(*BLOCKS, number=3)]

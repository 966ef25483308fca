"""``Pusher``: what should not happen is told to D, and costs the other transfers nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes.clock import FakeClock
from fakes.push_side import HeldTask, PushSide

from vllm_llmdd_connector.control.messages import Done, Failed
from vllm_llmdd_connector.layout.blocks import NULL_BLOCK


@pytest.fixture
def side(clock: FakeClock) -> Iterator[PushSide]:
    side = PushSide(clock)
    yield side
    side.close()


def test_null_block_is_never_sent(side: PushSide) -> None:
    """It stands for a block that vLLM has dropped; its bytes are nobody's."""
    side.reserve()
    side.step(40, 4, NULL_BLOCK, 6)
    (answer,) = side.wait_answers()
    assert isinstance(answer, Failed)
    assert "dropped" in answer.reason
    assert side.tasks == []


def test_wait_that_raises_fails_its_transfer_only(
    side: PushSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(task: HeldTask) -> str:
        raise RuntimeError("the engine's task is gone")

    with monkeypatch.context() as patch:
        patch.setattr(HeldTask, "wait", broken)
        side.reserve()
        side.step(40)
        (answer,) = side.wait_answers()
    assert isinstance(answer, Failed)
    assert "internal error" in answer.reason
    side.reserve(2)
    side.tasks[1].end()
    second = side.wait_answers(2)[1]
    assert isinstance(second, Done)
    assert second.reservation == 2


def test_reservation_of_a_prompt_whose_step_never_ended_is_answered(side: PushSide) -> None:
    """It was taken without a word, and D waited for its deadline."""
    side.begin(20, 4, 5)
    side.begin(40, 6, transfer_id="other", production=8)
    side.reserve()
    (answer,) = side.wait_answers()
    assert isinstance(answer, Failed)
    assert "did not end" in answer.reason
    assert side.tasks == []

"""Whose turn it is at a D whose cache is full."""

from __future__ import annotations

import pytest

from vllm_llmdd_connector.scheduler.turns import Turns


@pytest.fixture
def turns() -> Turns:
    """A request ``old`` was asked, and vLLM had no blocks for it; ``new`` has received its own."""
    turns = Turns()
    turns.on_asked("old")
    turns.end_step()
    turns.on_arrived("new")
    return turns


def test_request_without_room_lets_an_arrived_one_run(turns: Turns) -> None:
    """It stood before all that had their blocks, and vLLM stopped at it in every step."""
    assert turns.must_pass("old")
    turns.on_placed("new")
    assert not turns.must_pass("old")


def test_it_is_asked_again_after_one_step(turns: Turns) -> None:
    """Whatever keeps vLLM from the arrived one, nobody is passed over for ever."""
    assert turns.must_pass("old")
    turns.end_step()
    assert not turns.must_pass("old")


def test_nobody_passes_for_itself(turns: Turns) -> None:
    assert not turns.must_pass("new")


def test_nobody_passes_while_there_is_room() -> None:
    turns = Turns()
    turns.on_asked("old")
    turns.on_placed("old")
    turns.end_step()
    turns.on_arrived("new")
    assert not turns.must_pass("other")

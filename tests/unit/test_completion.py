"""``Completions``: one report for each request that vLLM waits for, none for any other."""

from __future__ import annotations

import threading

import pytest

from vllm_llmdd_connector.worker.completion import Completions, Drained


@pytest.fixture
def completions() -> Completions:
    completions = Completions()
    completions.expect("r", [5, 6])
    return completions


def test_nothing_is_drained_before_a_result(completions: Completions) -> None:
    assert completions.drain() is None
    assert completions.num_waiting == 1


def test_success_is_drained_once(completions: Completions) -> None:
    completions.succeed("r")
    assert completions.drain() == Drained(received={"r"})
    assert completions.drain() is None
    assert completions.num_waiting == 0


def test_failure_is_drained_with_reason_and_blocks(completions: Completions) -> None:
    completions.fail("r", "torn")
    assert completions.drain() == Drained(failed={"r": "torn"}, failed_blocks={5, 6})


@pytest.mark.parametrize("first", ["succeed", "fail"])
def test_second_result_of_a_request_is_dropped(completions: Completions, first: str) -> None:
    if first == "fail":
        completions.fail("r", "torn")
    completions.succeed("r")
    completions.fail("r", "torn again")
    completions.succeed("r")
    drained = completions.drain()
    assert drained is not None
    assert len(drained.received) + len(drained.failed) == 1
    assert ("r" in drained.received) is (first == "succeed")


def test_s36_crash_none_since_results_of_strangers_are_dropped(completions: Completions) -> None:
    completions.succeed("stranger")
    completions.fail("stranger", "torn")
    completions.cancel("stranger")
    assert completions.drain() is None
    assert not completions.is_cancelled("stranger")


def test_failure_of_an_aborted_request_is_reported_as_received(completions: Completions) -> None:
    """vLLM frees its blocks on that report; as failed it would be scheduled again."""
    completions.cancel("r")
    assert completions.is_cancelled("r")
    completions.fail("r", "aborted")
    assert completions.drain() == Drained(received={"r"})
    assert not completions.is_cancelled("r")


def test_abort_after_the_result_changes_nothing(completions: Completions) -> None:
    completions.fail("r", "torn")
    completions.cancel("r")
    assert completions.drain() == Drained(failed={"r": "torn"}, failed_blocks={5, 6})
    assert not completions.is_cancelled("r")


def test_results_of_many_threads_are_all_drained_once() -> None:
    completions = Completions()
    names = [f"r{i}" for i in range(400)]
    for name in names:
        completions.expect(name, [])
    drained: list[str] = []

    def report(part: int) -> None:
        for name in names[part::4]:
            completions.succeed(name)
            completions.succeed(name)

    threads = [threading.Thread(target=report, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained.extend((completions.drain() or Drained()).received)
    drained.extend((completions.drain() or Drained()).received)
    assert sorted(drained) == sorted(names)

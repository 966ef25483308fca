"""``integrity`` between two processes with the real engines, threads and control channels."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.clock import wait_for
from fakes.install import vendor_importable
from fakes.rank import Rank, receive_job, run
from fakes.rank_process import RankProcess

from vllm_llmdd_connector.metadata import Job
from vllm_llmdd_connector.worker import receive, verify
from vllm_llmdd_connector.worker.checksum import Place
from vllm_llmdd_connector.worker.verify import Verifier

FLOWS = ["pull", "push"]
INTO = [5, 4]
"""D's blocks for P's blocks 1 and 2."""
SAMPLED_FIRST, SAMPLED_LAST_ONLY = 1, 3
"""Transfer numbers whose sample has block 0 of the prompt, and has not."""


_numbers = itertools.count(1)
"""Claims and transfers; a P serves several tests."""


class Pair:
    """P in a process of its own, D here."""

    def __init__(self, p: RankProcess, options: dict[str, Any]) -> None:
        self.p = p
        self.d = Rank("kv_consumer", 0, **options)

    def run(self, flow: str, timeout_s: float = 60.0) -> str:
        """One request; returns the reason of its failure, or an empty text."""
        number = next(_numbers)
        request_id = f"d{number}"
        if flow == "pull":
            job: Job = self.p.call("hold", number)
            self.d.step(jobs=[dataclasses.replace(job, timeout_s=timeout_s)])
        else:
            port = self.p.call("control_port")
            self.d.step(jobs=[receive_job(number, port, self.p.endpoint, timeout_s)])
            self.p.call("push", number)
        run(self.d, request_id)
        return self.d.report.failed.get(request_id, "")

    def counts(self) -> dict[str, int]:
        stats = self.d.worker.take_stats()
        return {} if stats is None else stats.data["counts"]


@pytest.fixture(scope="module")
def process() -> Iterator[RankProcess]:
    """P's for all tests; one process costs an import of vLLM."""
    process = RankProcess(100)
    yield process
    process.close()


@pytest.fixture
def make_pair(
    process: RankProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(**options: Any) -> Pair:
        process.endpoint = process.call("reopen", 100, options)
        pairs.append(Pair(process, options))
        return pairs[-1]

    with vendor_importable(monkeypatch):
        yield make
        for pair in pairs:
            pair.d.worker.shutdown()


@pytest.fixture
def flip_at_d(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pair, str, int, int], None]:
    """Has one bit of D's memory change after the copy and before the comparison, once."""

    def install(pair: Pair, layer: str, block: int, offset: int) -> None:
        own_sums, left = Verifier.own_sums, [1]

        def flipped(self: Verifier, job: Job, number: int) -> dict[Place, int] | None:
            if left:
                left.pop()
                pair.d.caches[layer][block, offset] ^= 1
            return own_sums(self, job, number)

        monkeypatch.setattr(Verifier, "own_sums", flipped)

    return install


@pytest.mark.parametrize("engine", ["host", "ascend"])
def test_full_passes_equal_bytes_and_finds_a_flipped_bit(
    make_pair: Callable[..., Pair],
    flip_at_d: Callable[[Pair, str, int, int], None],
    engine: str,
) -> None:
    pair = make_pair(integrity="full", engine=engine)
    for flow in FLOWS:
        pair.counts()
        assert pair.run(flow) == ""
        assert pair.counts()["integrity_checked_blocks"] == 2
        for layer, position, offset in (("a", 0, 0), ("b", 1, 63)):
            flip_at_d(pair, layer, INTO[position], offset)
            named = f"block {position} of the prompt (KV cache group 0, {INTO[position]})"
            reason = pair.run(flow)
            assert reason.startswith(f"integrity: 1 of 2 checked blocks differ from P's: {named};")
            assert pair.counts()["integrity_failed_blocks"] == 1
        assert pair.run(flow) == ""


def test_bit_that_flips_at_p_between_copy_and_sum_is_found(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(integrity="full", engine="host")
    pair.p.call("flip_before_answer", "b", 2, 7)
    assert "block 1 of the prompt" in pair.run("pull")
    assert pair.run("pull") == "", "copied and summed as it is"


@pytest.mark.parametrize("flow", FLOWS)
def test_sample_finds_it_in_a_block_of_the_sample(
    make_pair: Callable[..., Pair],
    flip_at_d: Callable[[Pair, str, int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    flow: str,
) -> None:
    pair = make_pair(integrity="sample")
    drawn = iter([SAMPLED_LAST_ONLY, SAMPLED_FIRST, SAMPLED_LAST_ONLY])
    module = verify if flow == "pull" else receive
    monkeypatch.setattr(module, "secrets", SimpleNamespace(randbits=lambda bits: next(drawn)))
    flip_at_d(pair, "a", INTO[0], 9)
    assert pair.run(flow) == ""
    assert pair.counts()["integrity_checked_blocks"] == 1
    flip_at_d(pair, "a", INTO[0], 9)
    assert "integrity: 1 of 2 checked blocks" in pair.run(flow)
    flip_at_d(pair, "b", INTO[1], 9)
    assert "integrity: 1 of 1 checked blocks" in pair.run(flow)


def test_off_compares_nothing(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    assert [pair.run(flow) for flow in FLOWS] == ["", ""]
    seen = pair.counts()
    assert seen["recv_blocks"] == 4
    assert "integrity_checked_blocks" not in seen


def test_pull_is_compared_where_nothing_is_pushed(
    make_pair: Callable[..., Pair], flip_at_d: Callable[[Pair, str, int, int], None]
) -> None:
    pair = make_pair(integrity="full", push=False)
    assert pair.run("pull") == ""
    flip_at_d(pair, "a", INTO[0], 1)
    assert pair.run("pull").startswith("integrity: 1 of 2")


def test_sums_that_do_not_come_end_with_the_deadline_or_with_p(
    make_pair: Callable[..., Pair],
) -> None:
    """The last one here: it kills P's process."""
    pair = make_pair(integrity="full", engine="host")
    pair.p.call("mute_sums")
    late = pair.run("pull", timeout_s=1.0)
    assert late.startswith("integrity: P did not send its checksums within")
    assert pair.run("push", timeout_s=1.0).startswith("push: P did not send all blocks within 60 s")
    pair.d.step(jobs=[pair.p.call("hold", 10_000)])
    (peer,) = pair.d.worker._peers
    assert peer._checks is not None
    pending = peer._checks._pending
    wait_for(lambda: len(pending) == 1, "the question for checksums")
    pair.p.kill()
    run(pair.d, "d10000")
    assert pair.d.report.failed["d10000"].startswith("integrity: the control connection to")

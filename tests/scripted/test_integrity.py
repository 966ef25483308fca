"""Option ``integrity`` around real schedulers: right KV passes, one flipped byte does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from fakes.clock import PATIENCE_S
from harness import VERSION, Result
from pairs import MakePair, Pair, counts, prompt_of

from vllm_llmdd_connector.metadata import Job
from vllm_llmdd_connector.worker.checksum import Place
from vllm_llmdd_connector.worker.sum_thread import SumJob, SumThread
from vllm_llmdd_connector.worker.verify import Verifier

FULL: dict[str, Any] = {"extra_config": {"integrity": "full"}}
IMPATIENT: dict[str, Any] = {"extra_config": {"integrity": "full", "request_timeout_s": 0.5}}
POLICIES = ["recompute", "fail"]
FLOWS = ["pull", "push"]

needs_failure_route = pytest.mark.skipif(
    VERSION < (0, 30), reason="before vLLM 0.30 the connector refuses several KV cache groups"
)
SETUPS = [
    pytest.param({}, id="one group"),
    pytest.param({"sliding_window": 24}, id="two groups", marks=needs_failure_route),
    pytest.param({"tp_size": 2}, id="two ranks"),
    pytest.param({"pipeline_depth": 2}, id="asynchronous scheduling"),
    pytest.param({"separate_storage": True}, id="a storage per layer"),
    pytest.param({"p": {"max_num_batched_tokens": 32}}, id="several chunks"),
]


def run(pair: Pair, flow: str, prompt: list[int]) -> Result:
    """One request through both engines."""
    if flow == "push":
        return pair.run(pair.push_after_announcement(prompt))[0]
    return pair.transfer(prompt)


def flip(verifier: Verifier, model_id: int, region: int, block: int, offset: int) -> None:
    """Change one bit of D's memory."""
    view, _ = verifier._reader._regions[model_id, region]
    length = next(plan.block_len for plan in verifier._plans if plan.model_id == model_id)
    view[block * length + offset] ^= 1


@pytest.fixture
def flip_at_d(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pair, int], None]:
    """Has one byte of the last block that arrives at a rank change before it is compared, once."""

    def install(pair: Pair, rank: int) -> None:
        verifier = pair.d.workers[rank].connector._worker._peer_context.verifier
        own_sums = Verifier.own_sums
        left = [1]

        def flipped(self: Verifier, job: Job, number: int) -> dict[Place, int] | None:
            if self is verifier and left:
                left.pop()
                last = self._plans[-1]
                block = job.groups[last.group_index].dst_blocks[-1]
                flip(self, last.model_id, len(last.regions) - 1, block, last.block_len - 1)
            return own_sums(self, job, number)

        monkeypatch.setattr(Verifier, "own_sums", flipped)

    return install


def assert_failed_by_policy(pair: Pair, prompt: list[int], result: Result) -> None:
    if pair.d.spec.load_failure_policy == "recompute":
        assert pair.is_right(prompt, result)
    else:
        assert (result.finish_reason, result.tokens) == ("error", [])


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("fields", SETUPS)
@pytest.mark.parametrize("length", [5, 48, 49, 100])
def test_right_blocks_pass(
    make_pair: MakePair, flow: str, fields: dict[str, Any], length: int
) -> None:
    pair = make_pair(**FULL, **fields)
    prompt = prompt_of(length)
    assert pair.is_right(prompt, run(pair, flow, prompt))
    pair.finish()
    seen = counts(pair.d)
    assert seen["integrity_checked_blocks"] == seen["recv_blocks"]
    assert "integrity_failed_blocks" not in seen


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("policy", POLICIES)
class TestFlippedByte:
    @pytest.mark.parametrize(("tp_size", "rank"), [(1, 0), (2, 0), (2, 1)])
    def test_it_fails_the_request_by_policy_and_no_other(
        self,
        make_pair: MakePair,
        flip_at_d: Callable[[Pair, int], None],
        flow: str,
        policy: str,
        tp_size: int,
        rank: int,
    ) -> None:
        pair = make_pair(**FULL, tp_size=tp_size, d={"load_failure_policy": policy})
        flip_at_d(pair, rank)
        prompt, later = prompt_of(70), prompt_of(70, 2)
        assert_failed_by_policy(pair, prompt, run(pair, flow, prompt))
        assert pair.is_right(later, run(pair, flow, later))
        pair.finish()
        seen = counts(pair.d)
        assert seen["failed at integrity"] == 1
        assert seen["integrity_failed_blocks"] == 1

    @needs_failure_route
    def test_it_is_found_in_the_last_of_several_groups(
        self,
        make_pair: MakePair,
        flip_at_d: Callable[[Pair, int], None],
        flow: str,
        policy: str,
    ) -> None:
        pair = make_pair(**FULL, sliding_window=24, d={"load_failure_policy": policy})
        flip_at_d(pair, 0)
        prompt = prompt_of(100)
        assert_failed_by_policy(pair, prompt, run(pair, flow, prompt))
        pair.finish()
        assert counts(pair.d)["failed at integrity"] == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("flow", "stage"), [("pull", "integrity"), ("push", "push")])
def test_sums_that_never_come_fail_the_request_by_its_deadline(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, flow: str, stage: str, policy: str
) -> None:
    pair = make_pair(**IMPATIENT, d={"load_failure_policy": policy})
    monkeypatch.setattr(SumThread, "_sum_region", lambda self, job: None)
    prompt = prompt_of(70)
    assert_failed_by_policy(pair, prompt, run(pair, flow, prompt))
    pair.finish()
    assert counts(pair.d)[f"failed at {stage}"] == 1


def test_block_that_p_goes_on_writing_has_no_sum(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill leg of several tokens: P's last block has changed since it left when P sums it."""
    pair = make_pair(**FULL)
    gate = threading.Event()
    sum_region = SumThread._sum_region

    def late(self: SumThread, job: SumJob) -> None:
        assert gate.wait(PATIENCE_S)
        sum_region(self, job)

    monkeypatch.setattr(SumThread, "_sum_region", late)
    prompt = prompt_of(70)
    transfer_id = pair.new_transfer(prompt)
    request_id = pair.push_d(prompt, transfer_id)
    pair.run_until(lambda: transfer_id in pair.handovers._by_transfer)
    at_p = pair.push_p(prompt, transfer_id, max_tokens=5)
    pair.p.step()
    pair.step_d_until_reserved(transfer_id)
    pair.p.step()
    pair.wait_for_copies(transfer_id, 2 * pair.p.spec.num_layers)
    pair.p.run(at_p)
    gate.set()
    assert pair.is_right(prompt, pair.run(request_id)[0])
    pair.finish()
    seen = counts(pair.d)
    assert (seen["recv_blocks"], seen["integrity_checked_blocks"]) == (5, 4)


@pytest.mark.parametrize("flow", FLOWS)
def test_other_setting_of_d_is_refused_with_both_values_and_d_prefills(
    make_pair: MakePair, caplog: pytest.LogCaptureFixture, flow: str
) -> None:
    pair = make_pair(**FULL, d={"extra_config": {"integrity": "off"}})
    prompt = prompt_of(70)
    result = pair.run(pair.push(prompt))[0] if flow == "push" else pair.transfer(prompt)
    assert pair.is_right(prompt, result)
    assert "integrity differs: local 'full', peer 'off'" in caplog.text
    assert "recv_requests" not in counts(pair.d)

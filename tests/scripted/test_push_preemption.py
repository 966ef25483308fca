"""P loses what it has computed: D gets nothing of it, and everything of the next computation."""

from __future__ import annotations

import threading

import pytest
from fakes.clock import wait_for
from pairs import MakePair, Pair, counts, prompt_of

from vllm_llmdd_connector.control.messages import Message, Release
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.scheduler.lease import LeaseTable
from vllm_llmdd_connector.scheduler.producer_control import ProducerControl

FIRST = "transfer-1"


def start(pair: Pair, length: int) -> tuple[list[int], str, str]:
    """A prompt whose first chunk P has computed, and for which D has blocks; both requests."""
    prompt = prompt_of(length)
    transfer_id = pair.new_transfer(prompt)
    request_id = pair.push_d(prompt, transfer_id)
    pair.run_until(lambda: transfer_id in pair.handovers._by_transfer)
    at_p = pair.push_p(prompt, transfer_id)
    pair.p.step()
    pair.step_d_until_reserved(transfer_id)
    return prompt, at_p, request_id


def _ranks_released(leases: LeaseTable) -> set[int]:
    claims = [claim for lease in list(leases._leases.values()) for claim in lease.claims.values()]
    return {rank for claim in claims for rank in claim.ranks_released}


class TestPreemptedAtP:
    @pytest.mark.parametrize("pipeline_depth", [1, 2])
    @pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
    @pytest.mark.parametrize("caching", [False, True])
    def test_s21_wrong_output_none_when_p_preempts_at_any_step(
        self, make_pair: MakePair, pipeline_depth: int, num_steps: int, caching: bool
    ) -> None:
        """In the middle, and in the last chunk with its output still to come."""
        pair = make_pair(
            p={
                "max_num_batched_tokens": 32,
                "pipeline_depth": pipeline_depth,
                "enable_prefix_caching": caching,
            }
        )
        prompt, at_p, request_id = start(pair, 130)
        for _ in range(num_steps):
            pair.p.step()
        pair.p.preempt(at_p)
        assert pair.is_right(prompt, pair.run(request_id)[0])
        assert counts(pair.d).get("recv_requests") == 1
        pair.finish()
        assert counts(pair.p).get("leases_expired", 0) == 0

    def test_while_a_push_is_held_and_the_blocks_are_used_again(self, make_pair: MakePair) -> None:
        """The copy reads what another request has written; it must not count."""
        pair = make_pair(
            p={"max_num_batched_tokens": 64, "num_blocks": 9, "enable_prefix_caching": False},
            max_model_len=128,
        )
        faults = pair.push_faults()
        faults.gate, faults.hold_at = threading.Event(), 2
        prompt, at_p, request_id = start(pair, 100)
        wait_for(faults.held.is_set, "the copy that is held")
        table = pair.p.block_ids(at_p)[0][:4]
        pair.p.preempt(at_p)
        request = pair.p.request(at_p)
        pair.p.scheduler.waiting.remove(request)
        other = pair.p.add_request(prompt_of(120, 9), max_tokens=2)
        for _ in range(2):
            pair.p.step()
        assert set(table) & set(pair.p.block_ids(other)[0])
        faults.gate.set()
        pair.p.scheduler.waiting.prepend_request(request)
        assert pair.is_right(prompt, pair.run(request_id)[0])
        assert len(pair.journal.voids) == 1
        assert len(pair.journal.dones) == 1
        pair.finish()

    @pytest.mark.parametrize("caching", [False, True])
    def test_between_the_dones_of_two_ranks(self, make_pair: MakePair, caching: bool) -> None:
        """Rank 0 has all its blocks and does not ask again; only rank 1 needs the new ones."""
        pair = make_pair(
            tp_size=2,
            p={
                "max_num_batched_tokens": 64,
                "enable_prefix_caching": caching,
                "pipeline_depth": 2,
            },
        )
        faults = pair.push_faults(rank=1)
        faults.gate = threading.Event()
        prompt, at_p, request_id = start(pair, 100)
        leases = pair.p.connector._scheduler._producer.leases
        pair.p.step()
        wait_for(
            lambda: _ranks_released(leases) == {0} and faults.held.is_set(), "rank 0's release"
        )
        pair.p.preempt(at_p)
        pair.p.step()
        faults.gate.set()
        assert pair.is_right(prompt, pair.run(request_id)[0])
        assert len(pair.journal.dones) == 2
        assert len(pair.journal.voids) == 1
        pair.finish()
        assert counts(pair.p).get("leases_expired", 0) == 0

    @pytest.mark.parametrize("num_steps", [1, 5])
    def test_a_release_that_comes_after_the_preemption(
        self, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, num_steps: int
    ) -> None:
        """D was done with the lost computation; the lease of the next one must not wait for it."""
        released, is_deaf = ProducerControl._released, [True]

        def hear(control: ProducerControl, message: Release) -> Message:
            if is_deaf:
                raise RemoteProtocolError("not heard")
            return released(control, message)

        monkeypatch.setattr(ProducerControl, "_released", hear)
        pair = make_pair(p={"max_num_batched_tokens": 64, "pipeline_depth": 2})
        prompt, at_p, request_id = start(pair, 100)
        pair.p.step()
        assert pair.is_right(prompt, pair.d.run(request_id)[0])
        pair.p.preempt(at_p)
        for _ in range(num_steps):
            pair.p.step()
        is_deaf.clear()
        pair.finish()
        assert len(pair.journal.reserves) == 1
        assert counts(pair.p).get("leases_expired", 0) == 0

    def test_the_pool_runs_out_while_prompts_are_pushed(self, make_pair: MakePair) -> None:
        pair = make_pair(
            p={"num_blocks": 30, "max_model_len": 400, "max_num_batched_tokens": 64},
            d={"num_blocks": 200},
        )
        prompts = [prompt_of(150 + 9 * seed, seed) for seed in range(6)]
        ids = [pair.push(prompt) for prompt in prompts]
        for prompt, result in zip(prompts, pair.run(*ids), strict=True):
            assert pair.is_right(prompt, result)
        pair.finish()
        assert counts(pair.p).get("leases_expired", 0) == 0
        assert not [name for name in counts(pair.d) if name.startswith("failed")]


class TestPreemptedAtD:
    @pytest.mark.parametrize("pipeline_depth", [1, 2])
    def test_s07_hang_none_when_d_preempts_after_the_load(
        self, make_pair: MakePair, pipeline_depth: int
    ) -> None:
        pair = make_pair(pipeline_depth=pipeline_depth, d={"enable_prefix_caching": False})
        prompt = prompt_of(70)
        request_id = pair.push(prompt, max_tokens=10)
        pair.run_until(lambda: len(pair.d.results[request_id].tokens) == 3)
        pair.d.preempt(request_id)
        assert pair.is_right(prompt, pair.run(request_id)[0])
        assert len(pair.journal.reserves) == 1
        pair.finish()

    def test_no_room_for_the_blocks_yet(self, make_pair: MakePair) -> None:
        """P computes and holds the blocks until D has room."""
        pair = make_pair()
        prompt = prompt_of(70)
        with pair.d.hold_blocks():
            request_id = pair.push(prompt)
            pair.run_until(lambda: bool(pair.p.results) and not pair.p.has_work)
            for _ in range(20):
                pair.d.step()
            assert pair.status(request_id) == "WAITING"
            assert pair.journal.reserves == []
        assert pair.is_right(prompt, pair.run(request_id)[0])
        assert len(pair.journal.dones) == 1
        pair.finish()

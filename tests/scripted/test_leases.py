"""P's leases: D reads blocks that P still holds, or does not use them; and every lease ends."""

from __future__ import annotations

import threading

import pytest
from pairs import MakePair, Pair, counts, num_blocks_pulled, prompt_of

LEASE_S = 30.0


def _overwrite_free_blocks(pair: Pair) -> None:
    """Let P compute another prompt into every block that it has freed."""
    size = pair.p.spec.block_size * pair.p.free_blocks()
    prompt = prompt_of(min(size, pair.p.spec.max_model_len - 1), 77)
    pair.p.run(pair.p.add_request(prompt))


class TestExpiry:
    def test_a_lease_nobody_claims_ends_by_itself(self, make_pair: MakePair) -> None:
        pair = make_pair()
        pair.params(prompt_of(70))
        pair.p.step()
        assert pair.p.free_blocks() < pair.p.initial_free_blocks
        pair.p_clock.advance(LEASE_S + 1)
        pair.finish()
        assert counts(pair.p)["leases_expired"] == 1

    @pytest.mark.parametrize("preempts", [False, True])
    def test_idle_p_resets_its_prefix_cache_once_no_lease_lives(
        self, make_pair: MakePair, preempts: bool
    ) -> None:
        """It once refused, or raised, until it was asked for another prompt."""
        pair = make_pair()
        pair.params(prompt_of(70))
        pair.p.drain()
        assert not pair.p.scheduler.reset_prefix_cache()
        pair.p_clock.advance(LEASE_S + 1)
        assert pair.p.scheduler.reset_prefix_cache(reset_running_requests=preempts)
        assert counts(pair.p)["leases_expired"] == 1
        pair.finish()

    def test_one_renewed_lease_delays_no_other(self, make_pair: MakePair) -> None:
        pair = make_pair()
        faults = pair.network.faults(pair.producers[0])
        faults.pull_gate = threading.Event()
        fetched = prompt_of(70, 1)
        request_id = pair.decode(fetched, pair.params(fetched))
        pair.run_until(faults.pull_started.is_set)
        pair.p_clock.advance(LEASE_S - 5)
        leases = pair.p.connector._scheduler._producer.leases
        claim_id = next(iter(leases._claims))
        pair.params(prompt_of(40, 2))
        assert leases.renew(claim_id, pair.p_clock())
        pair.p_clock.advance(LEASE_S - 1)
        pair.p.step()
        assert len(leases) == 2
        pair.p_clock.advance(2)
        leases.renew(claim_id, pair.p_clock())
        pair.p.free_blocks()
        assert len(leases) == 1
        faults.pull_gate.set()
        assert pair.is_right(fetched, pair.run(request_id)[0])
        pair.finish()

    def test_d_comes_too_late(self, make_pair: MakePair) -> None:
        """P has reused the blocks: D computes the prompt itself, whatever its policy."""
        pair = make_pair(d={"load_failure_policy": "fail"})
        prompt = prompt_of(70)
        params = pair.params(prompt)
        pair.p_clock.advance(LEASE_S + 1)
        pair.p.drain()
        _overwrite_free_blocks(pair)
        result = pair.run(pair.decode(prompt, params))[0]
        assert pair.is_right(prompt, result)
        assert pair.network.pulls == []
        pair.finish()
        assert counts(pair.d)["failed at claim"] == 1

    @pytest.mark.parametrize("policy", ["recompute", "fail"])
    @pytest.mark.parametrize("tp_size", [1, 2])
    def test_s22_wrong_output_none_when_the_lease_ends_while_d_reads(
        self, make_pair: MakePair, policy: str, tp_size: int
    ) -> None:
        """D has read what P wrote over it: the tokens are right or there are none."""
        pair = make_pair(tp_size=tp_size, d={"load_failure_policy": policy})
        prompt = prompt_of(70)
        params = pair.params(prompt)
        gates = [pair.network.faults(cluster_id) for cluster_id in pair.producers]
        for faults in gates:
            faults.pull_gate = threading.Event()
        request_id = pair.decode(prompt, params)
        pair.run_until(lambda: all(faults.pull_started.is_set() for faults in gates))
        pair.p_clock.advance(LEASE_S * 2)
        pair.p.drain()
        _overwrite_free_blocks(pair)
        for faults in gates:
            assert faults.pull_gate is not None
            faults.pull_gate.set()
        result = pair.run(request_id)[0]
        if policy == "recompute":
            assert pair.is_right(prompt, result)
        else:
            assert (result.finish_reason, result.tokens) == ("error", [])
        pair.finish()
        assert counts(pair.d)["failed at release"] == tp_size

    @pytest.mark.parametrize("policy", ["recompute", "fail"])
    def test_the_lease_ends_between_the_releases_of_two_ranks(
        self, make_pair: MakePair, policy: str
    ) -> None:
        """Rank 0 has its confirmation, rank 1 reads overwritten blocks: the request fails whole."""
        pair = make_pair(tp_size=2, d={"load_failure_policy": policy})
        prompt = prompt_of(70)
        params = pair.params(prompt)
        late = pair.network.faults(pair.producers[1])
        late.pull_gate = threading.Event()
        request_id = pair.decode(prompt, params)
        received = pair.d.workers[0].connector._worker._completions
        pair.run_until(lambda: late.pull_started.is_set() and received.num_waiting == 0)
        assert pair.status(request_id) == "WAITING_FOR_REMOTE_KVS"
        pair.p_clock.advance(LEASE_S * 2)
        pair.p.drain()
        _overwrite_free_blocks(pair)
        late.pull_gate.set()
        result = pair.run(request_id)[0]
        if policy == "recompute":
            assert pair.is_right(prompt, result)
        else:
            assert (result.finish_reason, result.tokens) == ("error", [])
        pair.finish()

    def test_max_lease_bounds_every_renewal(self, make_pair: MakePair) -> None:
        pair = make_pair(p={"extra_config": {"max_lease_s": 50.0}})
        faults = pair.network.faults(pair.producers[0])
        faults.pull_gate = threading.Event()
        prompt = prompt_of(70)
        request_id = pair.decode(prompt, pair.params(prompt))
        pair.run_until(faults.pull_started.is_set)
        leases = pair.p.connector._scheduler._producer.leases
        claim_id = next(iter(leases._claims))
        pair.p_clock.advance(25)
        assert leases.renew(claim_id, pair.p_clock())
        pair.p_clock.advance(26)
        pair.p.drain()
        assert pair.p.free_blocks() == pair.p.initial_free_blocks
        faults.pull_gate.set()
        pair.run(request_id)
        pair.finish()


class TestCap:
    def test_beyond_the_cap_a_prompt_is_not_handed_over(self, make_pair: MakePair) -> None:
        pair = make_pair(num_blocks=40, p={"extra_config": {"max_leased_fraction": 0.25}})
        first, second = prompt_of(100, 1), prompt_of(100, 2)
        params = pair.params(first)
        refused = pair.prefill(second)
        assert refused.kv_transfer_params is None
        ids = [pair.decode(first, params), pair.decode(second, None)]
        for prompt, result in zip([first, second], pair.run(*ids), strict=True):
            assert pair.is_right(prompt, result)
        pair.finish()
        assert counts(pair.p)["leases_over_cap"] == 1

    def test_the_only_lease_may_be_larger_than_the_cap(self, make_pair: MakePair) -> None:
        pair = make_pair(num_blocks=40, p={"extra_config": {"max_leased_fraction": 0.1}})
        prompt = prompt_of(200)
        assert pair.is_right(prompt, pair.transfer(prompt))
        pair.finish()


class TestSeveralRanks:
    def test_the_lease_lives_until_the_last_rank_has_read(self, make_pair: MakePair) -> None:
        pair = make_pair(tp_size=2, d={"load_failure_policy": "fail"})
        prompt = prompt_of(70)
        params = pair.params(prompt)
        late = pair.network.faults(pair.producers[1])
        late.pull_gate = threading.Event()
        request_id = pair.decode(prompt, params)
        received = pair.d.workers[0].connector._worker._completions
        pair.run_until(lambda: late.pull_started.is_set() and received.num_waiting == 0)
        for _ in range(5):
            pair.p.step()
        assert pair.p.free_blocks() == pair.p.initial_free_blocks - 5
        late.pull_gate.set()
        assert pair.is_right(prompt, pair.run(request_id)[0])
        pair.finish()


class TestSeveralClaims:
    def test_s44_wrong_output_none_for_several_choices(self, make_pair: MakePair) -> None:
        """As with ``n = 2``: the lease ends after the last of them, not after the first."""
        pair = make_pair(d={"enable_prefix_caching": False})
        prompt = prompt_of(70)
        params = pair.params(prompt)
        ids = [pair.decode(prompt, params), pair.decode(prompt, params, max_tokens=6)]
        for result in pair.run(*ids):
            assert pair.is_right(prompt, result)
        assert num_blocks_pulled(pair) == 10
        pair.finish()
        assert counts(pair.p)["leases_released"] == 1

    def test_a_ticket_is_worth_nothing_once_the_lease_has_ended(self, make_pair: MakePair) -> None:
        pair = make_pair(d={"enable_prefix_caching": False})
        prompt = prompt_of(70)
        params = pair.params(prompt)
        pair.run(pair.decode(prompt, params))
        pair.finish()
        result = pair.run(pair.decode(prompt, params))[0]
        assert pair.is_right(prompt, result)
        assert num_blocks_pulled(pair) == 5
        pair.finish()

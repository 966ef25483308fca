"""Preemption on either side, and steps in flight when it happens."""

from __future__ import annotations

import pytest
from pairs import MakePair, counts, num_blocks_pulled, prompt_of


class TestAtD:
    @pytest.mark.parametrize("pipeline_depth", [1, 2])
    def test_s07_hang_none_when_d_preempts_after_the_load(
        self, make_pair: MakePair, pipeline_depth: int
    ) -> None:
        """Its remote part was used up: no second transfer, no wait for one."""
        pair = make_pair(pipeline_depth=pipeline_depth, d={"enable_prefix_caching": False})
        prompt = prompt_of(70)
        request_id = pair.decode(prompt, pair.params(prompt), max_tokens=10)
        pair.run_until(lambda: len(pair.d.results[request_id].tokens) == 3)
        pair.d.preempt(request_id)
        assert pair.is_right(prompt, pair.run(request_id)[0])
        assert len(pair.network.pulls) == 1
        pair.finish()

    @pytest.mark.parametrize("pipeline_depth", [1, 2])
    def test_the_pool_runs_out_while_requests_decode(
        self, make_pair: MakePair, pipeline_depth: int
    ) -> None:
        pair = make_pair(
            p={"num_blocks": 100},
            d={"num_blocks": 20, "max_model_len": 256},
            pipeline_depth=pipeline_depth,
        )
        prompts = [prompt_of(62, seed) for seed in range(4)]
        ids = [pair.decode(prompt, pair.params(prompt), max_tokens=40) for prompt in prompts]
        live = [pair.d.request(request_id) for request_id in ids]
        for prompt, result in zip(prompts, pair.run(*ids), strict=True):
            assert pair.is_right(prompt, result)
        assert sum(request.num_preemptions for request in live) > 0
        assert len(pair.network.pulls) <= len(prompts)
        pair.finish()

    def test_no_room_for_the_remote_blocks_yet(self, make_pair: MakePair) -> None:
        """vLLM asks again and again; the lease is kept alive and the pull happens once."""
        pair = make_pair()
        prompt = prompt_of(70)
        params = pair.params(prompt)
        with pair.d.hold_blocks():
            request_id = pair.decode(prompt, params)
            for _ in range(50):
                pair.d.step()
            assert pair.status(request_id) == "WAITING"
            assert pair.network.pulls == []
        assert pair.is_right(prompt, pair.run(request_id)[0])
        assert num_blocks_pulled(pair) == 5
        pair.finish()

    def test_the_lease_ends_while_there_is_no_room(self, make_pair: MakePair) -> None:
        pair = make_pair(d={"load_failure_policy": "fail"}, p={"extra_config": {"lease_s": 0.15}})
        prompt = prompt_of(70)
        params = pair.params(prompt)
        with pair.d.hold_blocks():
            request_id = pair.decode(prompt, params)
            pair.run_until(lambda: bool(pair.p.connector._scheduler._producer.leases._claims))
            pair.p_clock.advance(60)
            pair.run_until(lambda: not pair.p.has_work)
            assert pair.p.free_blocks() == pair.p.initial_free_blocks
            pair.run_until(lambda: counts(pair.d).get("failed at claim") == 1)
        assert pair.is_right(prompt, pair.run(request_id)[0])
        assert pair.network.pulls == []
        pair.finish()


class TestAtP:
    @pytest.mark.parametrize(
        ("pipeline_depth", "num_steps"),
        [*((1, n) for n in (1, 2, 4)), *((2, n) for n in (1, 4, 5))],
    )
    def test_s21_wrong_output_none_when_p_preempts_at_any_step(
        self, make_pair: MakePair, pipeline_depth: int, num_steps: int
    ) -> None:
        """Also in its last chunk, with that step's output still to come."""
        pair = make_pair(p={"max_num_batched_tokens": 32, "pipeline_depth": pipeline_depth})
        prompt = prompt_of(130)
        request_id = pair.start_prefill(prompt)
        for _ in range(num_steps):
            pair.p.step()
        pair.p.preempt(request_id)
        params = pair.p.run(request_id)[0].kv_transfer_params
        assert params is not None
        table = params["remote_block_ids"]
        assert pair.p.mismatches(table, prompt) == []
        assert pair.is_right(prompt, pair.run(pair.decode(prompt, params))[0])
        pair.finish()

    @pytest.mark.parametrize("pipeline_depth", [1, 2])
    def test_the_pool_runs_out_while_prompts_are_prefilled(
        self, make_pair: MakePair, pipeline_depth: int
    ) -> None:
        pair = make_pair(
            p={
                "num_blocks": 30,
                "max_model_len": 400,
                "max_num_batched_tokens": 64,
                "pipeline_depth": pipeline_depth,
                "extra_config": {"max_leased_fraction": 1.0},
            },
        )
        prompts = [prompt_of(150 + 9 * seed, seed) for seed in range(5)]
        legs = [pair.start_prefill(prompt) for prompt in prompts]
        decoded: dict[int, str] = {}

        def all_decoding() -> bool:
            for index, leg in enumerate(legs):
                if index not in decoded and pair.p.results[leg].finished:
                    params = pair.p.results[leg].kv_transfer_params
                    decoded[index] = pair.decode(prompts[index], params)
            return len(decoded) == len(prompts)

        pair.run_until(all_decoding)
        pair.run(*decoded.values())
        for index, request_id in decoded.items():
            assert pair.is_right(prompts[index], pair.d.results[request_id])
        pair.finish()
        assert counts(pair.p).get("leases_expired", 0) == 0

    def test_leased_blocks_are_not_taken_for_running_prefills(self, make_pair: MakePair) -> None:
        pair = make_pair(p={"num_blocks": 24, "max_model_len": 330})
        prompt, other = prompt_of(150), prompt_of(300, 2)
        params = pair.params(prompt)
        table = params["remote_block_ids"]
        waiting = pair.p.add_request(other)
        for _ in range(10):
            pair.p.step()
        assert not pair.p.results[waiting].finished
        assert pair.p.mismatches(table, prompt) == []
        assert pair.is_right(prompt, pair.run(pair.decode(prompt, params))[0])
        assert pair.p.run(waiting)[0].tokens == pair.p.model.generate(other, 1)
        pair.finish()

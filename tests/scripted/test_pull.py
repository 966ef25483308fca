"""The pull flow when nothing goes wrong: right tokens and bytes, no more than needed, no leak."""

from __future__ import annotations

from typing import Any

import pytest
from harness import VERSION, Engine
from pairs import CONNECTOR, MakePair, Pair, counts, num_blocks_pulled, prompt_of

from vllm_llmdd_connector.errors import ConfigError

needs_failure_route = pytest.mark.skipif(
    VERSION < (0, 30), reason="before vLLM 0.30 the connector refuses several KV cache groups"
)
SETUPS = [
    pytest.param({}, id="one group"),
    pytest.param({"sliding_window": 24}, id="two groups", marks=needs_failure_route),
    pytest.param({"tp_size": 2}, id="two ranks"),
    pytest.param({"pipeline_depth": 2}, id="asynchronous scheduling"),
    pytest.param({"separate_storage": True}, id="a storage per layer"),
    pytest.param({"zero_new_blocks": True}, id="new blocks are zeroed"),
    pytest.param({"role": "kv_both"}, id="both roles"),
]


class TestOneRequest:
    @pytest.mark.parametrize("fields", SETUPS)
    @pytest.mark.parametrize("length", [5, 47, 48, 49, 100])
    def test_d_decodes_on_the_kv_of_p(
        self, make_pair: MakePair, fields: dict[str, Any], length: int
    ) -> None:
        pair = make_pair(**fields)
        prompt = prompt_of(length)
        first = pair.prefill(prompt)
        request_id = pair.decode(prompt, first.kv_transfer_params, max_tokens=20)
        pair.run_until(lambda: len(pair.d.results[request_id].tokens) >= 2)
        assert pair.d.request_mismatches(request_id) == []
        result = pair.run(request_id)[0]
        assert first.tokens == result.tokens[:1]
        assert pair.is_right(prompt, result)
        assert pair.network.pulls
        pair.finish()

    @pytest.mark.parametrize("fields", SETUPS)
    def test_blocks_arrive_before_the_first_forward_of_d(
        self, make_pair: MakePair, fields: dict[str, Any]
    ) -> None:
        pair = make_pair(**fields)
        prompt = prompt_of(100)
        params = pair.params(prompt)
        before = pair.d.steps_with_tokens
        request_id = pair.decode(prompt, params)
        pair.run_until(lambda: pair.status(request_id) == "RUNNING")
        assert pair.d.steps_with_tokens - before == 1
        assert pair.d.request_mismatches(request_id) == []
        pair.run(request_id)
        pair.finish()

    def test_a_prompt_of_one_token_needs_no_transfer(self, make_pair: MakePair) -> None:
        pair = make_pair()
        assert pair.is_right([7], pair.transfer([7]))
        assert pair.network.pulls == []
        pair.finish()

    def test_chunked_prefill_on_p(self, make_pair: MakePair) -> None:
        pair = make_pair(p={"max_num_batched_tokens": 32})
        prompt = prompt_of(150)
        assert pair.is_right(prompt, pair.transfer(prompt))
        pair.finish()

    def test_pools_of_different_size(self, make_pair: MakePair) -> None:
        pair = make_pair(p={"num_blocks": 200}, d={"num_blocks": 40})
        for seed in range(4):
            pair.p.add_request(prompt_of(400, seed), max_tokens=100)
        pair.p.run_until(lambda: pair.p.free_blocks() < 100)
        prompt = prompt_of(100, 9)
        params = pair.params(prompt)
        assert max(params["remote_block_ids"][0]) >= 40
        assert pair.is_right(prompt, pair.run(pair.decode(prompt, params))[0])
        pair.finish()

    def test_p_stops_at_its_first_token(self, make_pair: MakePair) -> None:
        pair = make_pair()
        prompt = prompt_of(40)
        first = pair.prefill(prompt, stop_token_ids=[pair.p.model.next_token(prompt)])
        assert first.finish_reason == "stop"
        result = pair.run(pair.decode(prompt, first.kv_transfer_params))[0]
        assert pair.is_right(prompt, result)
        assert pair.network.pulls
        pair.finish()

    def test_the_counters_tell_what_was_moved(self, make_pair: MakePair) -> None:
        pair = make_pair(tp_size=2)
        pair.transfer(prompt_of(100))
        pair.finish()
        received = counts(pair.d)
        assert received["recv_requests"] == 2
        assert received["recv_blocks"] == 2 * 7
        block_bytes = 16 * 2 * 16 * 2
        assert received["recv_bytes"] == 2 * 7 * block_bytes * pair.d.spec.num_layers
        assert counts(pair.p) == {"leases_opened": 1, "leases_released": 1}


class TestPrefixCaches:
    def test_a_prefix_that_d_has_is_not_transferred(self, make_pair: MakePair) -> None:
        pair = make_pair()
        prompt = prompt_of(100)
        pair.d.run(pair.d.add_request(prompt[:64]))
        result = pair.transfer(prompt)
        assert pair.is_right(prompt, result)
        assert num_blocks_pulled(pair) == 3
        pair.finish()

    @pytest.mark.parametrize("length", [64, 65])
    def test_s02_leak_none_of_a_prompt_that_d_has_completely(
        self, make_pair: MakePair, length: int
    ) -> None:
        """The same prompt twice: the second time D needs at most the last token."""
        pair = make_pair()
        prompt = prompt_of(length)
        pair.d.run(pair.d.add_request([*prompt, 1]))
        params = pair.params(prompt)
        assert pair.p.free_blocks() < pair.p.initial_free_blocks
        result = pair.run(pair.decode(prompt, params))[0]
        assert pair.is_right(prompt, result)
        assert num_blocks_pulled(pair) <= 1
        pair.finish()
        assert counts(pair.p)["leases_released"] == 1

    def test_a_prefix_that_p_has_is_transferred_too(self, make_pair: MakePair) -> None:
        pair = make_pair()
        prompt = prompt_of(100)
        pair.p.run(pair.p.add_request(prompt[:64]))
        assert pair.is_right(prompt, pair.transfer(prompt))
        assert num_blocks_pulled(pair) == 7
        pair.finish()

    def test_received_blocks_serve_later_requests(self, make_pair: MakePair) -> None:
        pair = make_pair()
        prompt = prompt_of(100)
        pair.transfer(prompt)
        again = prompt[:96] + prompt_of(40, 5)
        result = pair.d.run(pair.d.add_request(again, max_tokens=3))[0]
        assert pair.is_right(again, result)
        pair.finish()


class TestManyRequests:
    @pytest.mark.parametrize("pipeline_depth", [1, 2])
    def test_requests_of_all_lengths_at_once(
        self, make_pair: MakePair, pipeline_depth: int
    ) -> None:
        pair = make_pair(
            num_blocks=200, pipeline_depth=pipeline_depth, max_num_seqs=6, max_num_batched_tokens=96
        )
        prompts = [prompt_of(3 + 7 * i, i) for i in range(16)]
        ids = [pair.decode(prompt, pair.params(prompt), 3 + len(prompt) % 9) for prompt in prompts]
        for prompt, result in zip(prompts, pair.run(*ids), strict=True):
            assert pair.is_right(prompt, result)
        pair.finish()

    def test_local_and_remote_prompts_side_by_side(self, make_pair: MakePair) -> None:
        pair = make_pair()
        remote, local = prompt_of(90, 1), prompt_of(90, 2)
        ids = [pair.decode(remote, pair.params(remote)), pair.decode(local, None)]
        results = pair.run(*ids)
        assert pair.is_right(remote, results[0])
        assert pair.is_right(local, results[1])
        assert counts(pair.d)["local_prefills"] == 1
        pair.finish()

    def test_two_decode_servers_fetch_from_one_prefill_server(
        self, make_pair: MakePair, make_engine: Any
    ) -> None:
        pair = make_pair()
        other = make_engine(**CONNECTOR, role="kv_consumer")
        both = [pair, Pair(pair.p, other, pair.network, pair.p_clock, pair.journal)]
        for seed in range(4):
            prompt = prompt_of(60, seed)
            assert both[seed % 2].is_right(prompt, both[seed % 2].transfer(prompt))
        for each in both:
            each.finish()


class TestStartUp:
    def test_the_registered_name_needs_no_module_path(
        self, datadist: Any, make_engine: Any
    ) -> None:
        from vllm_llmdd_connector import register

        register()
        engine: Engine = make_engine(connector="LLMDataDistConnector")
        assert type(engine.connector).__module__ == "vllm_llmdd_connector.connector"

    @pytest.mark.skipif(VERSION >= (0, 30), reason="vLLM 0.30 can be told of a failure")
    def test_several_groups_are_refused_where_a_failure_could_not_be_told(
        self, datadist: Any, make_engine: Any
    ) -> None:
        with pytest.raises(ConfigError, match="cannot be told"):
            make_engine(**CONNECTOR, sliding_window=24)

    def test_an_unknown_option_is_named(self, datadist: Any, make_engine: Any) -> None:
        with pytest.raises(ConfigError, match="did you mean 'lease_s'"):
            make_engine(**CONNECTOR, extra_config={"leases": 3})

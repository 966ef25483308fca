"""Self-tests of the harness: it computes what it says, and it notices wrong KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import LOOPBACK, VERSION, Engine, Result, run_until
from pairs import prompt_of

PAIRS: dict[str, dict[str, Any]] = {
    "one group": {},
    "two groups": {"sliding_window": 24},
    "two ranks": {"tp_size": 2},
    "asynchronous scheduling": {"pipeline_depth": 2},
    "a storage per layer": {"separate_storage": True, "sliding_window": 24},
}

MakeEngine = Callable[..., Engine]


def prefill(engine: Engine, prompt: list[int], **options: Any) -> Result:
    """Run the first leg and return it; the engine then holds the blocks."""
    request_id = engine.add_request(
        prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}, **options
    )
    return engine.run(request_id)[0]


@pytest.fixture
def make_pair(make_engine: MakeEngine) -> Callable[..., tuple[Engine, Engine]]:
    def make(**fields: Any) -> tuple[Engine, Engine]:
        return (
            make_engine(**LOOPBACK, role="kv_producer", engine_id="P", **fields),
            make_engine(**LOOPBACK, role="kv_consumer", engine_id="D", **fields),
        )

    return make


class TestOneEngine:
    @pytest.mark.parametrize("fields", PAIRS.values(), ids=PAIRS)
    def test_tokens_are_those_computed_from_token_ids_alone(
        self, make_engine: MakeEngine, fields: dict[str, Any]
    ) -> None:
        engine = make_engine(**fields)
        prompts = [prompt_of(length, length) for length in (1, 16, 17, 100)]
        for prompt in prompts:
            engine.add_request(prompt, max_tokens=6)
        for prompt, result in zip(prompts, engine.run(), strict=True):
            assert result.tokens == engine.model.generate(prompt, 6)
        engine.drain()
        assert engine.free_blocks() == engine.initial_free_blocks

    @pytest.mark.parametrize("pipeline_depth", [1, 2])
    @pytest.mark.parametrize("device_lag", [False, True])
    def test_preempted_requests_go_on_with_the_right_tokens(
        self, make_engine: MakeEngine, pipeline_depth: int, device_lag: bool
    ) -> None:
        engine = make_engine(
            num_blocks=12, max_model_len=160, pipeline_depth=pipeline_depth, device_lag=device_lag
        )
        prompts = [prompt_of(75, seed) for seed in range(2)]
        ids = [engine.add_request(prompt, max_tokens=30) for prompt in prompts]
        live = [engine.request(request_id) for request_id in ids]
        for prompt, result in zip(prompts, engine.run(), strict=True):
            assert result.tokens == engine.model.generate(prompt, 30)
        assert sum(request.num_preemptions for request in live) > 0

    @pytest.mark.parametrize("pipeline_depth", [1, 2])
    def test_preempt_sends_a_running_request_back_to_the_queue(
        self, make_engine: MakeEngine, pipeline_depth: int
    ) -> None:
        engine = make_engine(pipeline_depth=pipeline_depth)
        prompt = prompt_of(40)
        request_id = engine.add_request(prompt, max_tokens=5)
        engine.run_until(lambda: len(engine.results[request_id].tokens) == 2)
        request = engine.request(request_id)
        engine.preempt(request_id)
        assert request.status.name == "PREEMPTED"
        assert engine.run()[0].tokens == engine.model.generate(prompt, 5)

    def test_held_blocks_preempt_inside_the_scheduler(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        prompt = prompt_of(30)
        request_id = engine.add_request(prompt, max_tokens=5)
        engine.step()
        request = engine.request(request_id)
        with engine.hold_blocks():
            engine.run_until(lambda: request.status.name == "PREEMPTED", max_steps=5)
            assert engine.free_blocks() == 2
        assert engine.run()[0].tokens == engine.model.generate(prompt, 5)
        assert engine.free_blocks() == engine.initial_free_blocks

    def test_chunked_prefill_and_a_cached_prefix_hold_the_right_bytes(
        self, make_engine: MakeEngine
    ) -> None:
        engine = make_engine(max_num_batched_tokens=32, zero_new_blocks=True)
        prompt = prompt_of(100)
        engine.run(engine.add_request(prompt))
        steps = engine.steps
        again = engine.add_request(prompt, max_tokens=3)
        engine.step()
        assert engine.block_ids(again)[0][0] != 0
        assert engine.request_mismatches(again) == []
        assert engine.run(again)[0].tokens == engine.model.generate(prompt, 3)
        assert steps == 4, "a prompt of 100 tokens takes four chunks of 32"
        assert engine.steps - steps == 3, "the cached prefix leaves one chunk"

    def test_abort_between_and_during_steps_frees_the_blocks(self, make_engine: MakeEngine) -> None:
        engine = make_engine(pipeline_depth=2)
        ids = [engine.add_request(prompt_of(50, seed), max_tokens=50) for seed in range(2)]
        engine.run_until(lambda: bool(engine.results[ids[0]].tokens))
        engine.abort(ids[0])
        engine.abort(ids[1], during_step=True)
        engine.drain()
        assert engine.free_blocks() == engine.initial_free_blocks

    def test_a_predicate_that_never_holds_fails_with_the_state(
        self, make_engine: MakeEngine
    ) -> None:
        engine = make_engine()
        engine.add_request(prompt_of(20), max_tokens=50)
        with pytest.raises(AssertionError, match=r"within 3 steps: step 3, .*req-1: RUNNING"):
            engine.run_until(lambda: False, max_steps=3)


class TestTwoEngines:
    @pytest.mark.parametrize("fields", PAIRS.values(), ids=PAIRS)
    @pytest.mark.parametrize("length", [5, 16, 17, 100])
    def test_decode_after_remote_prefill_equals_one_engine(
        self, make_pair: Callable[..., tuple[Engine, Engine]], fields: dict[str, Any], length: int
    ) -> None:
        p, d = make_pair(**fields)
        prompt = prompt_of(length)
        first = prefill(p, prompt)
        request_id = d.add_request(
            prompt, max_tokens=8, kv_transfer_params=first.kv_transfer_params
        )
        d.run_until(lambda: len(d.results[request_id].tokens) >= 2)
        assert d.request_mismatches(request_id) == []
        result = d.run(request_id)[0]
        assert first.tokens == result.tokens[:1]
        assert result.tokens == d.model.generate(prompt, 8)
        assert d.request(request_id) is None
        for engine in (p, d):
            engine.drain()
            assert engine.free_blocks() == engine.initial_free_blocks

    def test_blocks_are_loaded_and_not_computed_again(
        self, make_pair: Callable[..., tuple[Engine, Engine]]
    ) -> None:
        p, d = make_pair(max_num_batched_tokens=16)
        prompt = prompt_of(100)
        params = prefill(p, prompt).kv_transfer_params
        assert params is not None
        digest = p.digest(params["remote_block_ids"])
        before = d.steps
        request_id = d.add_request(prompt, max_tokens=2, kv_transfer_params=params)
        d.run_until(lambda: d.request(request_id).status.name == "RUNNING")
        assert d.digest(d.block_ids(request_id)) == digest
        d.run(request_id)
        assert d.steps - before <= 4

    @pytest.mark.parametrize("fields", PAIRS.values(), ids=PAIRS)
    def test_a_flipped_bit_changes_digest_bytes_and_tokens(
        self, make_pair: Callable[..., tuple[Engine, Engine]], fields: dict[str, Any]
    ) -> None:
        p, d = make_pair(**fields)
        prompt = prompt_of(60)
        params = prefill(p, prompt).kv_transfer_params
        assert params is not None
        digest = p.digest(params["remote_block_ids"])
        request_id = d.add_request(prompt, max_tokens=8, kv_transfer_params=params)
        d.step()
        table = d.block_ids(request_id)
        rank, layer, index = d.spec.tp_size - 1, 1, 3
        block_id = table[d.layer_group(layer)][index]
        d.block_words(layer, block_id, rank)[-1, 2, -1] ^= 1 << 40
        wrong = d.mismatches(table, prompt)
        assert [(w.rank, w.layer, w.index, w.block_id) for w in wrong] == [
            (rank, layer, index, block_id)
        ]
        assert d.digest(table) != digest
        tokens = d.run(request_id)[0].tokens
        right = d.model.generate(prompt, 8)
        assert tokens[0] != right[0]
        assert tokens != right

    def test_a_full_local_hit_still_releases_the_producer(
        self, make_pair: Callable[..., tuple[Engine, Engine]]
    ) -> None:
        p, d = make_pair()
        prompt = prompt_of(65)
        d.run(d.add_request(prompt))
        params = prefill(p, prompt[:64]).kv_transfer_params
        held = p.initial_free_blocks - p.free_blocks()
        d.run(d.add_request(prompt[:64], max_tokens=2, kv_transfer_params=params))
        p.drain()
        assert held == 4
        assert p.free_blocks() == p.initial_free_blocks

    @pytest.mark.parametrize("policy", ["recompute", "fail"])
    @pytest.mark.parametrize("tp_size", [1, 2])
    def test_a_failed_load_follows_the_policy(
        self, make_engine: MakeEngine, policy: str, tp_size: int
    ) -> None:
        p = make_engine(**LOOPBACK, engine_id="P", tp_size=tp_size)
        d = make_engine(**LOOPBACK, engine_id="D", tp_size=tp_size, load_failure_policy=policy)
        d.workers[-1].connector.fail_loads = True
        prompt = prompt_of(70)
        request_id = d.add_request(
            prompt, max_tokens=3, kv_transfer_params=prefill(p, prompt).kv_transfer_params
        )
        result = d.run(request_id)[0]
        if policy == "recompute":
            assert result.tokens == d.model.generate(prompt, 3)
        else:
            assert result.finish_reason == "error"
            assert result.tokens == []
        run_until(lambda: not (p.has_work or d.has_work), p, d)
        assert d.free_blocks() == d.initial_free_blocks

    def test_a_lagging_device_writes_into_blocks_that_were_given_away(
        self, make_engine: MakeEngine
    ) -> None:
        """An aborted request's step is still in flight while its block is loaded for another one.

        vLLM 0.23 hands the block out at once, so the late write lands in loaded KV. Later versions
        keep a consumer's freed blocks back until the step in flight is processed.
        """
        small = {"num_blocks": 6, "max_model_len": 64, "max_num_batched_tokens": 64}
        p = make_engine(**LOOPBACK, role="kv_producer", engine_id="P", **small)
        d = make_engine(
            **LOOPBACK,
            role="kv_consumer",
            engine_id="D",
            pipeline_depth=2,
            device_lag=True,
            enable_prefix_caching=False,
            **small,
        )
        params = prefill(p, prompt_of(60)).kv_transfer_params
        victim = d.add_request(prompt_of(20, 2), max_tokens=30)
        d.run_until(lambda: len(d.results[victim].tokens) == 2)
        d.abort(victim)
        request_id = d.add_request(prompt_of(60), max_tokens=3, kv_transfer_params=params)
        result = d.run(request_id)[0]
        right = d.model.generate(prompt_of(60), 3)
        assert (result.tokens == right) == (VERSION >= (0, 24))

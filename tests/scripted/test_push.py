"""The push flow when nothing goes wrong: either leg first, any length, layer by layer."""

from __future__ import annotations

from typing import Any

import pytest
from harness import VERSION
from pairs import MakePair, counts, prompt_of

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
    pytest.param({"p": {"max_num_batched_tokens": 32}}, id="several chunks"),
    pytest.param({"role": "kv_both"}, id="both roles"),
]


@pytest.mark.parametrize("fields", SETUPS)
@pytest.mark.parametrize("length", [5, 48, 49, 100])
class TestOneRequest:
    def test_d_first(self, make_pair: MakePair, fields: dict[str, Any], length: int) -> None:
        """D has announced the prompt and P computes it then."""
        pair = make_pair(**fields)
        prompt = prompt_of(length)
        request_id = pair.push_after_announcement(prompt, max_tokens=20)
        pair.run_until(lambda: len(pair.d.results[request_id].tokens) >= 2)
        assert pair.d.request_mismatches(request_id) == []
        assert pair.is_right(prompt, pair.run(request_id)[0])
        assert len(pair.journal.dones) == pair.p.spec.tp_size
        assert pair.network.pulls == []
        pair.finish()
        assert counts(pair.p)["sent_requests"] == pair.p.spec.tp_size

    def test_p_first(self, make_pair: MakePair, fields: dict[str, Any], length: int) -> None:
        """P has finished when D comes: what it holds is sent at once."""
        pair = make_pair(**fields)
        prompt = prompt_of(length)
        transfer_id = pair.new_transfer(prompt)
        pair.p.run(pair.push_p(prompt, transfer_id))
        assert pair.p.free_blocks() < pair.p.initial_free_blocks
        request_id = pair.push_d(prompt, transfer_id)
        assert pair.is_right(prompt, pair.run(request_id)[0])
        assert len(pair.journal.dones) == pair.p.spec.tp_size
        assert pair.network.pulls == []
        pair.finish()
        assert counts(pair.p).get("leases_expired", 0) == 0

    def test_both_at_once(self, make_pair: MakePair, fields: dict[str, Any], length: int) -> None:
        pair = make_pair(**fields)
        prompt = prompt_of(length)
        assert pair.is_right(prompt, pair.run(pair.push(prompt))[0])
        assert len(pair.journal.dones) == pair.p.spec.tp_size
        pair.finish()


class TestNothingToSend:
    def test_a_prompt_of_one_token(self, make_pair: MakePair) -> None:
        pair = make_pair()
        assert pair.is_right([7], pair.run(pair.push([7]))[0])
        assert pair.network.pushes == []
        pair.finish()

    @pytest.mark.parametrize("length", [64, 65])
    def test_s02_leak_none_of_a_prompt_that_d_has_completely(
        self, make_pair: MakePair, length: int
    ) -> None:
        pair = make_pair()
        prompt = prompt_of(length)
        pair.d.run(pair.d.add_request([*prompt, 1]))
        result = pair.run(pair.push(prompt))[0]
        assert pair.is_right(prompt, result)
        assert sum(len(call.src_blocks) for call in pair.network.pushes) <= 1
        pair.finish()
        assert counts(pair.p).get("leases_expired", 0) == 0


class TestPrefixCaches:
    def test_a_prefix_that_d_has_is_not_sent(self, make_pair: MakePair) -> None:
        pair = make_pair()
        prompt = prompt_of(100)
        pair.d.run(pair.d.add_request(prompt[:64]))
        assert pair.is_right(prompt, pair.run(pair.push_after_announcement(prompt))[0])
        assert sum(len(call.src_blocks) for call in pair.network.pushes) == 3
        pair.finish()

    def test_a_prefix_that_p_has_leaves_with_the_first_chunk(self, make_pair: MakePair) -> None:
        pair = make_pair(p={"max_num_batched_tokens": 32})
        prompt = prompt_of(150)
        pair.p.run(pair.p.add_request(prompt[:64]))
        request_id = pair.push_after_announcement(prompt)
        pair.p.step()
        pair.step_d_until_reserved("transfer-1")
        pair.wait_for_copies("transfer-1", pair.p.spec.num_layers)
        assert [len(call.src_blocks) for call in pair.network.pushes] == [6]
        assert pair.is_right(prompt, pair.run(request_id)[0])
        assert sum(len(call.src_blocks) for call in pair.network.pushes) == 10
        pair.finish()

    def test_received_blocks_serve_later_requests(self, make_pair: MakePair) -> None:
        pair = make_pair()
        prompt = prompt_of(100)
        pair.run(pair.push(prompt))
        again = prompt[:96] + prompt_of(40, 5)
        assert pair.is_right(again, pair.d.run(pair.d.add_request(again, max_tokens=3))[0])
        pair.finish()


class TestOffOnOneSide:
    @pytest.mark.parametrize("side", ["p", "d"])
    @pytest.mark.parametrize("p_first", [False, True])
    def test_d_pulls_when_p_has_finished(
        self, make_pair: MakePair, side: str, p_first: bool
    ) -> None:
        pair = make_pair(**{side: {"extra_config": {"push": False}}})
        prompt = prompt_of(100)
        if p_first:
            transfer_id = pair.new_transfer(prompt)
            pair.p.run(pair.push_p(prompt, transfer_id))
            request_id = pair.push_d(prompt, transfer_id)
        else:
            request_id = pair.push_after_announcement(prompt)
        assert pair.is_right(prompt, pair.run(request_id)[0])
        assert pair.network.pushes == []
        assert len(pair.network.pulls) == 1
        pair.finish()
        assert counts(pair.p)["leases_released"] == 1

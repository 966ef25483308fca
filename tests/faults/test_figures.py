"""What an operator can tell apart, and what the design costs on purpose."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fakes.fake_datadist import LLMStatusCode
from pairs import MakePair, counts, prompt_of

PROMPT = prompt_of(70)


class TestApart:
    """Transport failures and expiries have metrics of their own, on the side that sees them."""

    @pytest.mark.parametrize("is_push", [False, True])
    def test_s42_metrics_of_a_transport_failure(self, make_pair: MakePair, is_push: bool) -> None:
        pair = make_pair(d={"load_failure_policy": "recompute"})
        pair.network.faults(pair.producers[0]).pull_status = LLMStatusCode.LLM_TIMEOUT
        pair.push_faults().status = LLMStatusCode.LLM_TIMEOUT
        result = pair.run(pair.push(PROMPT))[0] if is_push else pair.transfer(PROMPT)
        assert pair.is_right(PROMPT, result)
        pair.finish()
        stage = "push" if is_push else "transfer"
        failed = {k: v for k, v in counts(pair.d).items() if k.startswith("failed")}
        assert failed == {f"failed at {stage}": 1}
        assert "leases_expired" not in counts(pair.p)

    @pytest.mark.parametrize("is_claimed", [False, True])
    def test_s42_metrics_of_an_expiry(self, make_pair: MakePair, is_claimed: bool) -> None:
        pair = make_pair(d={"load_failure_policy": "recompute"})
        params = pair.params(PROMPT)
        faults = pair.network.faults(pair.producers[0])
        faults.pull_gate = threading.Event()
        if is_claimed:
            request_id = pair.decode(PROMPT, params)
            pair.run_until(faults.pull_started.is_set)
        pair.p_clock.advance(301)
        # P ends leases in the steps that it takes.
        pair.p.run(pair.p.add_request([1]))
        if not is_claimed:
            request_id = pair.decode(PROMPT, params)
        faults.pull_gate.set()
        assert pair.is_right(PROMPT, pair.run(request_id)[0])
        pair.finish()
        stage = "release" if is_claimed else "claim"
        failed = {k: v for k, v in counts(pair.d).items() if k.startswith("failed")}
        assert failed == {f"failed at {stage}": 1}
        assert counts(pair.p)["leases_expired"] == 1


@pytest.mark.parametrize("is_push", [False, True])
@pytest.mark.parametrize("length", [63, 64, 65])
def test_s43_cost_of_one_token_at_d(make_pair: MakePair, is_push: bool, length: int) -> None:
    """D computes the last token of a prompt, to sample from it, and no other."""
    pair = make_pair()
    prompt = prompt_of(length)
    computed: list[int] = []
    build = pair.d.connector.build_connector_meta

    def look_on(output: Any) -> Any:
        computed.extend(output.num_scheduled_tokens.values())
        return build(output)

    pair.d.connector.build_connector_meta = look_on
    params = None if is_push else pair.params(prompt)
    request_id = pair.push(prompt) if is_push else pair.decode(prompt, params)
    assert pair.is_right(prompt, pair.run(request_id)[0])
    assert computed == [1] * 4
    pair.finish()

"""Crashes of the engine core: what a connector may say of a request, and when."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.fake_datadist import LLMStatusCode
from harness import VERSION, Engine, run_until
from pairs import CONNECTOR, MakePair, Pair, counts, num_blocks_pulled, prompt_of
from store_connector import HAS_IT, filled_from

from vllm_llmdd_connector.control.messages import Done, Failed, ReleaseAck

ONLY_WITH_GROUPS = pytest.mark.skipif(
    VERSION < (0, 30), reason="such a model is refused, because vLLM cannot be told of failures"
)


@pytest.mark.parametrize("is_push", [False, True])
def test_s29_crash_none_when_nothing_is_needed_of_a_dead_p(
    make_pair: MakePair, is_push: bool
) -> None:
    """D has the whole prompt: there is nothing to load, nobody to tell, and nothing to report."""
    pair = make_pair()
    prompt = prompt_of(65)
    pair.d.run(pair.d.add_request([*prompt, 1]))
    params = pair.params(prompt)
    port = pair.p.connector._scheduler._server.port
    if is_push:
        params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port}
        params["transfer_id"] = "t"
    pair.p.close()
    for max_tokens in (1, 4):
        result = pair.d.run(pair.decode(prompt, params, max_tokens))[0]
        assert pair.is_right(prompt, result)
    pair.d.drain()
    assert pair.d.free_blocks() == pair.d.initial_free_blocks


@ONLY_WITH_GROUPS
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("is_push", [False, True])
def test_s30_crash_none_when_a_load_into_several_groups_fails(
    make_pair: MakePair, is_push: bool, policy: str
) -> None:
    """vLLM may be told of block ids only where there is a single group."""
    pair = make_pair(sliding_window=24, pipeline_depth=2, d={"load_failure_policy": policy})
    prompt, other = prompt_of(70), prompt_of(70, 2)
    local = pair.d.add_request(prompt_of(40, 3), max_tokens=20)
    pair.push_faults().status = LLMStatusCode.LLM_FAILED
    pair.network.faults(pair.producers[0]).pull_status = LLMStatusCode.LLM_FAILED
    result = pair.run(pair.push(prompt))[0] if is_push else pair.transfer(prompt)
    if policy == "recompute":
        assert pair.is_right(prompt, result)
    else:
        assert (result.finish_reason, result.tokens) == ("error", [])
    assert pair.is_right(prompt_of(40, 3), pair.run(local)[0])
    pair.push_faults().status = None
    pair.network.faults(pair.producers[0]).pull_status = None
    assert pair.is_right(other, pair.transfer(other))
    pair.finish()


@pytest.mark.parametrize("kind", [Done, Failed, ReleaseAck])
def test_s36_crash_none_when_p_speaks_of_unknown_requests(
    make_pair: MakePair, kind: type[Any]
) -> None:
    """A peer's completions name requests that never were, while one is waited for."""
    pair = make_pair()
    prompt = prompt_of(70)
    faults = pair.network.faults(pair.producers[0])
    strange = {
        Done: Done(transfer_id="nobody", reservation=7, production=1),
        Failed: Failed(transfer_id="nobody", reservation=7, reason="scripted"),
        ReleaseAck: ReleaseAck(claim_id=7, production=1, valid=True),
    }[kind]
    seen: list[Any] = []

    def say(number: int) -> None:
        if not seen:
            (peer,) = pair.d.workers[0].connector._worker._peers
            peer._on_message(strange, peer._worker_dialer)
            seen.append(strange)

    faults.after_block = say
    assert pair.is_right(prompt, pair.transfer(prompt))
    assert seen
    pair.finish()


def with_store(make_engine: Any, store_first: bool = True, **fields: Any) -> Engine:
    """A decode engine whose connectors are a store and ours."""
    ours = {
        "kv_connector": CONNECTOR["connector"],
        "kv_connector_module_path": CONNECTOR["module_path"],
        "kv_role": "kv_consumer",
    }
    store = {
        "kv_connector": "StoreConnector",
        "kv_connector_module_path": "store_connector",
        "kv_role": "kv_both",
    }
    connectors = [store, ours] if store_first else [ours, store]
    return make_engine(
        connector="MultiConnector", extra_config={"connectors": connectors}, **fields
    )


@pytest.mark.parametrize("store_first", [True, False])
def test_s33_s43_crash_none_in_a_multi_connector(
    make_pair: MakePair, make_engine: Any, store_first: bool
) -> None:
    """Whoever offers first loads; ours leaves a prompt to the store, and P gets its blocks back."""
    plain = make_pair()
    d = with_store(make_engine, store_first, load_failure_policy="fail")
    pair = Pair(plain.p, d, plain.network, plain.p_clock, plain.journal)
    filled_from(pair.p)
    won, lost = prompt_of(70), prompt_of(70, 2)
    for prompt, is_stored in ((won, False), (lost, True)):
        params = pair.params(prompt)
        params |= {HAS_IT: is_stored, "remote_request_id": "stored"}
        num_blocks = num_blocks_pulled(pair)
        assert pair.is_right(prompt, pair.run(pair.decode(prompt, params))[0])
        is_ours = not (is_stored and store_first)
        assert num_blocks_pulled(pair) - num_blocks == (5 if is_ours else 0)
    run_until(lambda: pair.p.free_blocks() == pair.p.initial_free_blocks, pair.p, pair.d)
    assert d.free_blocks() == d.initial_free_blocks
    assert counts(pair.p)["leases_released"] == 2

"""Leaks: blocks, leases, links and threads are back after whatever ended them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fakes.clock import wait_for
from pairs import CONNECTOR, MakePair, Pair, counts, prompt_of
from wire import Wire, late

from vllm_llmdd_connector.control.messages import Done, Release, ReleaseAck

NUM_RESTARTS = 20


@pytest.mark.parametrize("tp_size", [1, 2])
def test_s15_leak_none_when_a_release_comes_after_the_lease(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    """P has given the blocks to another prompt: the late words end nobody's lease but count."""
    wire = Wire(monkeypatch)
    pair = make_pair(tp_size=tp_size, d_clock=wire.d_clock, d={"load_failure_policy": "fail"})
    wire.let(Release, late)
    prompt, other = prompt_of(70), prompt_of(70, 2)
    request_id = pair.decode(prompt, pair.params(prompt))
    pair.run_until(wire.seen.is_set)
    wire.end_waits()
    result = pair.run(request_id)[0]
    assert (result.finish_reason, result.tokens) == ("error", [])
    pair.p_clock.advance(400)
    pair.finish()
    params = pair.params(other)
    leased = pair.p.initial_free_blocks - pair.p.free_blocks()
    wire.heal()
    assert pair.is_right(other, pair.run(pair.decode(other, params))[0])
    assert leased == 5
    pair.finish()
    assert counts(pair.d)["failed at release"] >= 1
    ended = counts(pair.p)
    assert ended["leases_opened"] == 2
    assert ended["leases_released"] + ended.get("leases_expired", 0) == 2


@pytest.mark.parametrize("kind", [Done, ReleaseAck])
def test_s15_leak_none_when_a_completion_is_for_nobody(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, kind: type[Any]
) -> None:
    """D's client has gone away, and vLLM has forgotten the request, when its completion comes."""
    wire = Wire(monkeypatch)
    pair = make_pair(d_clock=wire.d_clock)
    wire.let(kind, late)
    prompt = prompt_of(70)
    request_id = pair.push(prompt) if kind is Done else pair.decode(prompt, pair.params(prompt))
    pair.run_until(wire.seen.is_set)
    pair.d.abort(request_id)
    pair.d.step()
    wire.end_waits()
    pair.run_until(lambda: pair.d.request(request_id) is None)
    wire.heal()
    pair.run_until(lambda: not (pair.p.has_work or pair.d.has_work))
    pair.p_clock.advance(400)
    pair.finish()
    assert not [name for name in counts(pair.d) if name.startswith("failed")]


def own_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("llmdd"))


@pytest.mark.parametrize("is_push", [False, True])
def test_s17_leak_none_when_p_is_restarted_again_and_again(
    make_pair: MakePair, make_engine: Any, is_push: bool
) -> None:
    """D keeps no link, thread, session or peer of a process that is gone."""
    pair = make_pair()
    port = pair.p.connector._scheduler._server.port
    threads: list[list[str]] = []
    for seed in range(NUM_RESTARTS):
        prompt = prompt_of(40, seed)
        result = pair.run(pair.push(prompt))[0] if is_push else pair.transfer(prompt)
        assert pair.is_right(prompt, result)
        pair.finish()
        worker = pair.d.workers[0].connector._worker
        assert len(worker._peers) == 1
        assert len(worker._engine._datadist.linked) == 1
        assert len(pair.d.connector._scheduler._client._sessions) == 1
        threads.append([name.partition("-peer-")[0] for name in own_threads()])
        pair.p.close()
        wait_for(lambda worker=worker: not len(worker._peers), "the end of the lost peer's thread")
        restarted = make_engine(
            **CONNECTOR, role="kv_producer", extra_config={"control_port": port}
        )
        pair = Pair(restarted, pair.d, pair.network, pair.p_clock, pair.journal)
        pair.journal.watch(restarted)
    assert len({len(names) for names in threads}) == 1

"""Defects that are put into the connector, or into its engine, show up in the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from engine_model import SimEngine
from plan import OPTIONS, Fault
from world_verdict import Verdict

from vllm_llmdd_connector.scheduler.lease import LeaseTable
from vllm_llmdd_connector.worker.completion import Completions
from vllm_llmdd_connector.worker.push_plan import PushPlan
from vllm_llmdd_connector.worker.receive import Receiver
from vllm_llmdd_connector.worker.releases import Releases

Simulate = Callable[..., Verdict]
SMALL: dict[str, Any] = {
    "num_p": 1,
    "num_d": 1,
    "common": {"max_model_len": 256, "enable_prefix_caching": False, "num_layers": 2},
    "p": {"max_num_batched_tokens": 64, "extra_config": OPTIONS},
    "d": {"max_num_batched_tokens": 300, "extra_config": OPTIONS},
    "both_roles": False,
    "mean_gap_s": 0.08,
    "latency_s": 0.0001,
    "block_s": 0.0002,
    "twin_chance": 0.0,
    "retry_chance": 0.0,
    "late_chance": 0.0,
    "lost_client_chance": 0.0,
}


def always(kind: str, amount: float = 0.5) -> tuple[Fault, ...]:
    """One kind of fault, over and over."""
    return tuple(Fault(0.1 + 0.2 * i, kind, i % 2, 0.19, amount) for i in range(40))


def test_a_push_that_needs_no_reservation(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimEngine, "_may_write", lambda self, reservation: True)
    verdict = simulate(
        "noticed:0", flows=("push",), abort_chance=0.5, faults=always("slow copies"), **SMALL
    )
    assert verdict.wrong


def test_a_failed_load_that_d_takes_for_a_good_one(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Completions, "fail", lambda self, request_id, reason: self.succeed(request_id)
    )
    verdict = simulate("noticed:1", faults=always("fail copies"), **SMALL)
    assert any("instead of" in text for text in verdict.wrong)


def test_a_deadline_that_is_ignored(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Receiver, "check", lambda self, dialer, now_s: None)
    monkeypatch.setattr(Receiver, "next_event_s", lambda self: math.inf)
    verdict = simulate("noticed:2", flows=("push",), faults=always("drop", 0.7), **SMALL)
    assert verdict.hangs


def test_blocks_of_ended_leases_that_p_keeps(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LeaseTable, "take_ended", lambda self, now_s: [])
    verdict = simulate("noticed:3", 20, faults=(), abort_chance=0.0, **SMALL)
    assert any("not free" in text for text in verdict.leaks)


def test_a_release_that_is_never_sent(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Releases, "start", lambda self, *args: None)
    verdict = simulate("noticed:4", 20, flows=("push",), faults=(), abort_chance=0.0, **SMALL)
    assert any("leases_expired" in text for text in verdict.errors)


def test_a_thread_that_spins(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deadline has passed, and it does nothing about it."""
    monkeypatch.setattr(Receiver, "check", lambda self, dialer, now_s: None)
    verdict = simulate("noticed:2", flows=("push",), faults=always("drop", 0.7), **SMALL)
    assert any("polls without a pause" in text for text in verdict.errors)


def test_a_done_before_everything_has_arrived(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PushPlan, "is_done", lambda self, reservation: True)
    verdict = simulate("noticed:5", 20, flows=("push",), faults=(), abort_chance=0.0, **SMALL)
    assert any("done, but wrong" in text for text in verdict.wrong)

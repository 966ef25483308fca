"""``HandoverTable``: announcements that D's own releases have overtaken."""

from __future__ import annotations

import pytest
from fakes.rendezvous import Rendezvous

from vllm_llmdd_connector.control.messages import Gone
from vllm_llmdd_connector.scheduler import handover as handover_module


def test_announcement_after_the_last_release_opens_nothing() -> None:
    """D's ranks release over connections of their own."""
    seen = Rendezvous()
    seen.announce()
    handover = seen.admitted()
    seen.table.release("t", 1, rank=0, num_ranks=1)
    assert seen.announce(has_blocks=True) is None
    assert handover.suitors == {}
    assert handover.was_dropped


def test_announcement_after_the_end_opens_nothing() -> None:
    seen = Rendezvous()
    seen.announce()
    seen.table.end(seen.admitted(), "")
    assert seen.announce(has_blocks=True) is None
    assert len(seen.table) == 0


def test_refused_claim_opens_nothing_and_is_refused_again() -> None:
    """D repeats an announcement whose answer is late. Once P's request was over, the repetition
    waited for another one of this transfer id, for a D that had been told to prefill."""
    seen = Rendezvous()
    seen.announce(prompt_hash="other")
    handover = seen.arrive()
    seen.table.end(handover, "")
    assert seen.announce(prompt_hash="other") is None
    assert len(seen.table) == 0
    first, second = seen.answers[1]
    assert isinstance(first, Gone)
    assert first == second


def test_reason_is_told_again_if_the_first_answer_was_lost() -> None:
    seen = Rendezvous()
    seen.announce()
    seen.table.end(seen.admitted(), "aborted")
    assert seen.announce() is None
    assert seen.answers[1][-2:] == [Gone(claim_id=1, reason="aborted")] * 2


def test_another_claim_is_not_meant() -> None:
    seen = Rendezvous()
    seen.announce()
    seen.table.end(seen.admitted(), "")
    assert seen.announce(claim_id=2) is not None


def test_only_the_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover_module, "MAX_HANDOVERS", 2)
    seen = Rendezvous()
    for claim_id in (1, 2, 3):
        seen.announce(claim_id)
        seen.table.drop("t", claim_id)
    assert seen.announce(claim_id=3) is None
    assert seen.announce(claim_id=1) is not None

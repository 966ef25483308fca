"""Self-tests of the harness of pushes: it notices wrong bytes and copies that come too early."""

from __future__ import annotations

import threading

import pytest
from fakes.fake_push import FakeSynchronizer
from pairs import MakePair, prompt_of


class _Hasty(FakeSynchronizer):
    """Takes every layer for computed as soon as the step begins."""

    def reset(self) -> None:
        super().reset()
        self.mark_all()


def test_a_block_flipped_while_the_push_is_held_is_noticed(make_pair: MakePair) -> None:
    pair = make_pair()
    prompt = prompt_of(100)
    faults = pair.push_faults()
    faults.gate, faults.hold_at = threading.Event(), 3
    request_id = pair.push_after_announcement(prompt)
    pair.run_until(faults.held.is_set)
    (reservation,) = pair.network.open_reservations
    pair.d.block_words(1, reservation.blocks[2])[1, 5, 0] ^= 1 << 7
    faults.gate.set()
    result = pair.run(request_id)[0]
    assert not pair.is_right(prompt, result)
    assert pair.network.violations == ["transfer-1: done, but wrong in layer 1, position 2"]
    pair.network.violations.clear()


def test_a_copy_before_the_layer_is_computed_is_noticed(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair()
    for pusher in pair.pushers():
        for synchronizer in pusher._events._live.values():
            monkeypatch.setattr(synchronizer, "__class__", _Hasty)
    prompt = prompt_of(50)

    def copy_everything(layer: int) -> None:
        if layer == 0:
            pair.step_d_until_reserved("transfer-1")
            pair.wait_for_copies("transfer-1", pair.p.spec.num_layers)

    pair.p.workers[0].before_layer = copy_everything
    request_id = pair.push_after_announcement(prompt)
    assert not pair.is_right(prompt, pair.run(request_id)[0])
    early = [text for text in pair.network.violations if "before it was computed" in text]
    wrong = [text for text in pair.network.violations if "done, but wrong" in text]
    assert len(early) + len(wrong) == len(pair.network.violations)
    assert early
    assert wrong
    pair.network.violations.clear()

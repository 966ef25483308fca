"""``HeldLeases``: a P rank confirms until it reports the blocks as sent, and never afterwards."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_llmdd_connector.control.messages import Release, ReleaseAck
from vllm_llmdd_connector.metadata import Hold
from vllm_llmdd_connector.worker import held_leases as held_leases_module
from vllm_llmdd_connector.worker.held_leases import HeldLeases


def hold(production: int) -> Hold:
    return Hold(production, f"request{production}", f"secret{production}")


def release(production: int, claim_id: int = 1, secret: str | None = None) -> Release:
    return Release(
        cluster_id=0xA,
        claim_id=claim_id,
        production=production,
        secret=f"secret{production}" if secret is None else secret,
    )


def ask(held: HeldLeases, message: Release) -> list[ReleaseAck]:
    answers: list[ReleaseAck] = []
    held.on_release(message, answers.append)
    return answers


@pytest.fixture
def held() -> HeldLeases:
    return HeldLeases()


def test_held_blocks_are_confirmed_every_time_but_counted_once(held: HeldLeases) -> None:
    held.hold([hold(1)])
    confirmed = ReleaseAck(claim_id=1, production=1, valid=True)
    assert ask(held, release(1)) == ask(held, release(1)) == [confirmed]
    assert held.take_released() == {1: 1}
    assert ask(held, release(1)) == [confirmed]
    assert held.take_released() == {}


def test_every_claim_on_one_lease_is_counted(held: HeldLeases) -> None:
    held.hold([hold(1)])
    for claim_id in (1, 2):
        ask(held, release(1, claim_id))
    assert held.take_released() == {1: 1, 2: 1}


def test_ended_lease_is_refused_and_reported_as_sent(held: HeldLeases) -> None:
    held.hold([hold(1), hold(2)])
    assert held.end([1]) == {"request1"}
    assert ask(held, release(1)) == [ReleaseAck(claim_id=1, production=1, valid=False)]
    assert ask(held, release(2))[0].valid


def test_lease_is_reported_as_sent_only_once(held: HeldLeases) -> None:
    held.hold([hold(1)])
    assert held.end([1]) == {"request1"}
    assert held.end([1, 7]) == set()


def test_wrong_secret_is_refused_and_not_counted(held: HeldLeases) -> None:
    held.hold([hold(1)])
    assert not ask(held, release(1, secret="guess"))[0].valid
    assert held.take_released() == {}


def test_release_ahead_of_its_step_message_is_answered_when_that_comes(held: HeldLeases) -> None:
    answers: list[ReleaseAck] = []
    held.on_release(release(1), answers.append)
    assert answers == []
    held.hold([hold(1)])
    assert [answer.valid for answer in answers] == [True]
    assert held.take_released() == {1: 1}


def test_release_resent_while_it_waits_is_answered_once(held: HeldLeases) -> None:
    first: list[ReleaseAck] = []
    second: list[ReleaseAck] = []
    held.on_release(release(1), first.append)
    held.on_release(release(1), second.append)
    held.hold([hold(1)])
    assert (len(first), len(second)) == (0, 1)


def test_waiting_release_with_a_wrong_secret_is_refused_in_the_end(held: HeldLeases) -> None:
    answers: list[ReleaseAck] = []
    held.on_release(release(1, secret="guess"), answers.append)
    held.hold([hold(1)])
    assert [answer.valid for answer in answers] == [False]


def test_release_of_a_later_lease_goes_on_waiting(held: HeldLeases) -> None:
    answers: list[ReleaseAck] = []
    held.on_release(release(5), answers.append)
    held.hold([hold(4)])
    assert answers == []
    held.hold([hold(5)])
    assert [answer.valid for answer in answers] == [True]


def test_invented_numbers_do_not_keep_the_place_of_honest_releases(
    held: HeldLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting releases had no bound in time: once enough were invented, all others were refused."""
    monkeypatch.setattr(held_leases_module, "MAX_PARKED", 2)
    invented = [ask(held, release(1_000_000 + number)) for number in range(2)]
    honest = ask(held, release(1))
    assert [answer.valid for answer in invented[0]] == [False]
    assert invented[1] == honest == []
    held.hold([hold(1)])
    assert [answer.valid for answer in honest] == [True]


class Confirmations(RuleBasedStateMachine):
    """Holds, ends and releases in any order, as two threads may bring them."""

    def __init__(self) -> None:
        super().__init__()
        self.held = HeldLeases()
        self.last = 0
        self.live: set[int] = set()
        self.ended: set[int] = set()
        self.answers: list[ReleaseAck] = []
        self.num_seen = 0
        self.sent: list[str] = []
        self.confirmed: set[int] = set()
        self.released: dict[int, int] = {}

    @rule(count=st.integers(1, 3))
    def step_brings_holds(self, count: int) -> None:
        numbers = range(self.last + 1, self.last + 1 + count)
        self.live.update(numbers)
        self.last += count
        self.held.hold([hold(number) for number in numbers])

    @rule(data=st.data())
    def step_brings_ends(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.integers(1, self.last + 1), max_size=3))
        self.live.difference_update(numbers)
        self.ended.update(number for number in numbers if number <= self.last)
        self.sent.extend(self.held.end(numbers))

    @rule(data=st.data(), is_guess=st.booleans())
    def d_releases(self, data: st.DataObject, is_guess: bool) -> None:
        number = data.draw(st.integers(1, self.last + 3))
        claim_id = number * 10 + data.draw(st.integers(0, 1))
        message = release(number, claim_id, "guess" if is_guess else None)
        self.held.on_release(message, self.answers.append)

    @rule()
    def step_takes_released(self) -> None:
        for claim_id, count in self.held.take_released().items():
            self.released[claim_id] = self.released.get(claim_id, 0) + count

    @invariant()
    def confirms_exactly_what_is_held(self) -> None:
        for answer in self.answers[self.num_seen :]:
            if answer.valid:
                assert answer.production in self.live
                assert answer.production not in self.ended
                self.confirmed.add(answer.claim_id)
        self.num_seen = len(self.answers)

    @invariant()
    def every_lease_is_sent_at_most_once_and_every_claim_counted_at_most_once(self) -> None:
        assert len(self.sent) == len(set(self.sent))
        assert set(self.released) <= self.confirmed
        assert set(self.released.values()) <= {1}


TestConfirmations = Confirmations.TestCase
TestConfirmations.settings = settings(max_examples=40)

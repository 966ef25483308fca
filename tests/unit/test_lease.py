"""``LeaseTable``: every lease ends once, by its own deadline, and leaves nothing behind."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from vllm_llmdd_connector.scheduler.lease import MAX_CONFIRMED, Lease, LeaseEnd, LeaseTable

LEASE_S, MAX_LEASE_S = 10.0, 35.0


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable(LEASE_S, MAX_LEASE_S, num_ranks=2)


def open_lease(table: LeaseTable, request_id: str = "p", now_s: float = 0.0) -> Lease:
    return table.open(request_id, "secret", "hash", [[1, 2, 3]], (1, 2, 3), now_s)


def claim(table: LeaseTable, lease: Lease, claim_id: int, now_s: float = 0.0) -> Lease | str:
    return table.claim(lease.production, "secret", "hash", claim_id, now_s)


def release(table: LeaseTable, lease: Lease, claim_id: int, rank: int) -> bool:
    return table.release(lease.production, "secret", claim_id, rank)


class TestDeadlines:
    def test_unclaimed_lease_expires_after_lease_s(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        assert table.take_ended(LEASE_S - 0.01) == []
        assert table.take_ended(LEASE_S) == [lease]
        assert lease.end is LeaseEnd.EXPIRED
        assert table.take_ended(2 * LEASE_S) == []

    def test_claim_and_renewal_extend_from_now(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        claim(table, lease, 1, 9.0)
        assert table.take_ended(18.9) == []
        assert table.renew(1, 18.9)
        assert table.take_ended(28.8) == []
        assert table.take_ended(28.9) == [lease]

    def test_renewals_end_at_the_bound(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        claim(table, lease, 1, 0.0)
        for now_s in range(1, int(MAX_LEASE_S)):
            assert table.renew(1, float(now_s))
            assert table.take_ended(float(now_s)) == []
        assert table.take_ended(MAX_LEASE_S) == [lease]
        assert not table.renew(1, MAX_LEASE_S)

    def test_bound_below_lease_s_counts_for_the_unclaimed_too(self) -> None:
        table = LeaseTable(10.0, 4.0, num_ranks=1)
        lease = open_lease(table)
        assert table.take_ended(4.0) == [lease]

    def test_one_renewed_lease_does_not_delay_another(self, table: LeaseTable) -> None:
        first, second = open_lease(table, "first"), open_lease(table, "second")
        claim(table, first, 1, 5.0)
        assert table.take_ended(10.0) == [second]

    def test_abandoned_claim_ends_the_lease_when_the_live_one_is_closed(
        self, table: LeaseTable
    ) -> None:
        """Claim 1 was last heard of long ago; only claim 2 kept the lease."""
        lease = open_lease(table)
        claim(table, lease, 1, 0.0)
        claim(table, lease, 2, 9.0)
        table.drop(lease.production, "secret", 2)
        assert table.take_ended(11.0) == [lease]

    def test_lease_whose_longest_claim_is_dropped_ends_with_the_next_one(
        self, table: LeaseTable
    ) -> None:
        """Claim 2 has been renewed, then its end comes before the one that was expected."""
        lease = open_lease(table)
        claim(table, lease, 1, 0.0)
        claim(table, lease, 2, 1.0)
        table.renew(1, 5.0)
        assert table.take_ended(12.0) == []
        table.renew(2, 12.0)
        table.drop(lease.production, "secret", 2)
        assert table.take_ended(14.9) == []
        assert table.take_ended(15.0) == [lease]

    def test_renewals_leave_nothing_behind(self, table: LeaseTable) -> None:
        """A D may send any number of them, and P looks after a lease when its time comes."""
        leases = [open_lease(table, name) for name in ("p", "q")]
        for number, lease in enumerate(leases):
            claim(table, lease, number)
        for count in range(1000):
            assert table.renew(count % 2, count / 1000)
        assert len(table._expiry) == len(leases)
        assert table.take_ended(10.9) == []
        assert table.take_ended(11.0) == leases

    def test_claim_goes_on_with_the_prompt_s_next_production(self, table: LeaseTable) -> None:
        """A preempted prompt is computed again before the blocks of its first lease are freed,
        which took the claim with it."""
        first = open_lease(table)
        claim(table, first, 1)
        table.void(first)
        second = open_lease(table)
        table.attach(second, 1, 1.0)
        assert table.take_ended(2.0) == [first]
        table.forget(first)
        assert table.has_claim(1)
        assert table.renew(1, LEASE_S)
        assert table.take_ended(LEASE_S + 1) == []

    def test_claims_and_drops_leave_nothing_behind(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        claim(table, lease, 1)
        for count in range(1000):
            claim(table, lease, 2 + count, count / 1000)
            table.drop(lease.production, "secret", 2 + count)
        assert len(table._expiry) == 1
        assert table.take_ended(10.0) == [lease]


class TestRelease:
    def test_all_ranks_of_the_only_claim_end_the_lease(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        claim(table, lease, 1)
        assert release(table, lease, 1, rank=1)
        assert table.take_ended(1.0) == []
        assert release(table, lease, 1, rank=0)
        assert table.take_ended(1.0) == [lease]
        assert lease.end is LeaseEnd.RELEASED

    def test_repeated_release_has_the_same_answer_and_counts_once(self, table: LeaseTable) -> None:
        """D sends a release again when the answer is late; a second rank is not done by that."""
        lease = open_lease(table)
        claim(table, lease, 1)
        for _ in range(3):
            assert release(table, lease, 1, rank=0)
        assert table.take_ended(1.0) == []
        assert release(table, lease, 1, rank=1)
        assert release(table, lease, 1, rank=1)
        assert table.take_ended(1.0) == [lease]

    def test_first_of_several_claims_does_not_end_it(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        claim(table, lease, 1)
        claim(table, lease, 2)
        for claim_id in (1, 2):
            assert table.take_ended(1.0) == []
            for rank in (0, 1):
                assert release(table, lease, claim_id, rank)
        assert table.take_ended(1.0) == [lease]

    def test_repeated_claim_does_not_forget_a_rank(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        claim(table, lease, 1)
        release(table, lease, 1, rank=0)
        claim(table, lease, 1)
        release(table, lease, 1, rank=1)
        assert table.take_ended(1.0) == [lease]

    def test_release_after_the_end_is_refused(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        claim(table, lease, 1)
        assert table.take_ended(LEASE_S) == [lease]
        assert not release(table, lease, 1, rank=0)
        table.forget(lease)
        assert not release(table, lease, 1, rank=0)

    def test_confirmation_is_repeated_when_the_blocks_have_been_freed(
        self, table: LeaseTable
    ) -> None:
        """D asks again when the answer was lost. P may have stepped in between, freed the blocks
        and said of the very same reading that it did not count."""
        lease = open_lease(table)
        claim(table, lease, 1)
        assert release(table, lease, 1, 0)
        assert release(table, lease, 1, 1)
        assert table.take_ended(1.0) == [lease]
        table.forget(lease)
        assert release(table, lease, 1, 1)
        assert not release(table, lease, 2, 1)
        assert not table.release(lease.production, "another secret", 1, 1)

    def test_number_of_confirmations_to_be_repeated_is_bounded(self) -> None:
        table = LeaseTable(LEASE_S, MAX_LEASE_S, num_ranks=1)
        leases = [open_lease(table) for _ in range(MAX_CONFIRMED + 1)]
        for lease in leases:
            assert release(table, lease, 1, 0)
            claim(table, lease, 1)
            table.drop(lease.production, "secret", 1)
        for lease in table.take_ended(0.0):
            table.forget(lease)
        assert not release(table, leases[0], 1, 0)
        assert release(table, leases[-1], 1, 0)

    def test_confirmation_before_the_end_is_repeated_after_it_for_that_rank_only(
        self, table: LeaseTable
    ) -> None:
        lease = open_lease(table)
        claim(table, lease, 1)
        assert release(table, lease, 1, rank=0)
        assert table.take_ended(LEASE_S) == [lease]
        assert release(table, lease, 1, rank=0)
        assert not release(table, lease, 1, rank=1)
        assert not release(table, lease, 2, rank=0)

    def test_deadline_that_nobody_has_seen_yet_is_no_end(self, table: LeaseTable) -> None:
        """The blocks go back only with ``take_ended``: until then the reader is told the truth."""
        lease = open_lease(table)
        claim(table, lease, 1)
        assert release(table, lease, 1, rank=0)
        assert table.renew(1, LEASE_S + 1.0)
        assert release(table, lease, 1, rank=1)
        assert table.take_ended(LEASE_S + 1.0) == [lease]
        assert lease.end is LeaseEnd.RELEASED

    def test_wrong_secret_or_number_is_refused_and_not_counted(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        claim(table, lease, 1)
        for rank in (0, 1):
            assert not table.release(lease.production, "guess", 1, rank)
            assert not table.release(lease.production + 1, "secret", 1, rank)
        assert table.take_ended(1.0) == []

    def test_release_of_an_expired_claim_is_confirmed_while_another_one_holds_the_lease(
        self, table: LeaseTable
    ) -> None:
        """Whether the blocks were held is asked, not by whom."""
        lease = open_lease(table)
        claim(table, lease, 1, 0.0)
        claim(table, lease, 2, 5.0)
        assert not table.take_ended(LEASE_S)
        assert release(table, lease, 1, rank=0)
        assert release(table, lease, 1, rank=1)
        assert table.take_ended(LEASE_S) == []
        assert table.renew(2, LEASE_S)

    def test_drop_of_an_unclaimed_lease_ends_it(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        table.drop(lease.production, "secret", 99)
        assert table.take_ended(0.0) == [lease]

    def test_drop_of_one_claim_leaves_the_other(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        claim(table, lease, 1)
        claim(table, lease, 2)
        table.drop(lease.production, "secret", 1)
        assert table.take_ended(0.0) == []
        assert table.renew(2, 1.0)
        assert not table.renew(1, 1.0)


class TestAttach:
    """Announced prompts: D's hold does not come by a claim."""

    def test_attached_claim_is_renewed_released_and_ends_the_lease(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        table.attach(lease, 1, 5.0)
        assert table.has_claim(1)
        assert table.take_ended(14.9) == []
        assert table.renew(1, 14.9)
        assert [release(table, lease, 1, rank) for rank in (0, 1)] == [True, True]
        assert not table.has_claim(1)
        assert table.take_ended(14.9) == [lease]
        assert lease.end is LeaseEnd.RELEASED

    def test_ranks_that_were_done_before_the_lease_count(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        table.attach(lease, 1, 0.0, {0})
        assert release(table, lease, 1, 1)
        assert lease.end is LeaseEnd.RELEASED

    def test_attaching_again_renews_and_forgets_no_rank(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        table.attach(lease, 1, 0.0, {0})
        table.attach(lease, 1, 8.0)
        assert table.take_ended(17.9) == []
        assert release(table, lease, 1, 1)
        assert lease.end is LeaseEnd.RELEASED


class TestVoid:
    def test_void_lease_ends_at_once_whoever_has_a_claim(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        claim(table, lease, 1)
        table.void(lease)
        assert not release(table, lease, 1, 0)
        assert not table.renew(1, 0.0)
        assert table.take_ended(0.0) == [lease]
        assert lease.end is LeaseEnd.VOIDED

    def test_void_of_an_ended_lease_changes_nothing(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        table.drop(lease.production, "secret", 1)
        table.void(lease)
        assert lease.end is LeaseEnd.RELEASED
        assert table.take_ended(0.0) == [lease]


class TestProductions:
    def test_lease_takes_the_number_that_its_computation_had(self, table: LeaseTable) -> None:
        number = table.new_production()
        other = open_lease(table)
        lease = table.open("q", "secret", "hash", [[4]], (4,), 0.0, number)
        assert lease.production == number != other.production
        assert table.new_production() not in (number, other.production)
        assert claim(table, lease, 1) is lease


class TestOvertaken:
    """Claims and releases come over different connections, and a claim is repeated."""

    def test_claim_after_its_last_release_is_refused(self, table: LeaseTable) -> None:
        """It would have held the blocks for another ``lease_s``, for nobody."""
        lease = open_lease(table)
        claim(table, lease, 1)
        claim(table, lease, 2)
        for rank in (0, 1):
            release(table, lease, 1, rank)
        assert "released or dropped" in str(claim(table, lease, 1))
        assert list(lease.claims) == [2]

    def test_claim_after_its_drop_is_refused(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        claim(table, lease, 2)
        table.drop(lease.production, "secret", 1)
        assert "released or dropped" in str(claim(table, lease, 1))
        assert list(lease.claims) == [2]


class TestRefusal:
    def test_wrong_secret_hash_or_number_is_refused_in_words(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        number = lease.production
        assert "no longer holds" in str(table.claim(number, "guess", "hash", 1, 0.0))
        assert "no longer holds" in str(table.claim(number + 1, "secret", "hash", 1, 0.0))
        assert "prompt differs" in str(table.claim(number, "secret", "other", 1, 0.0))

    def test_claim_id_of_another_lease_is_refused(self, table: LeaseTable) -> None:
        first, second = open_lease(table, "first"), open_lease(table, "second")
        claim(table, first, 1)
        assert "in use" in str(claim(table, second, 1))

    def test_drop_with_a_wrong_secret_is_ignored(self, table: LeaseTable) -> None:
        lease = open_lease(table)
        table.drop(lease.production, "guess", 1)
        assert table.take_ended(0.0) == []


def test_forgotten_lease_leaves_nothing_behind(table: LeaseTable) -> None:
    lease = open_lease(table)
    claim(table, lease, 1)
    assert table.num_held_blocks == 3
    assert table.take_ended(LEASE_S) == [lease]
    assert table.num_held_blocks == 3
    table.forget(lease)
    assert (len(table), table.num_held_blocks) == (0, 0)
    assert not table.renew(1, 0.0)
    assert table.take_ended(100.0) == []


class Leases(RuleBasedStateMachine):
    """Any order of events; the model keeps only what the table's promises speak of."""

    open_leases = Bundle("open_leases")
    ended_leases = Bundle("ended_leases")

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(LEASE_S, MAX_LEASE_S, num_ranks=2)
        self.now_s = 0.0
        self.opened: dict[int, Lease] = {}
        self.ended: set[int] = set()
        self.last_sign_s: dict[int, float] = {}
        self.confirmed: set[tuple[int, int, int]] = set()
        self.past: set[tuple[int, int, int]] = set()
        """Confirmed ones of released leases whose blocks are freed."""

    @rule(target=open_leases, held=st.frozensets(st.integers(1, 9), min_size=1, max_size=5))
    def open(self, held: frozenset[int]) -> int:
        blocks = tuple(sorted(held))
        lease = self.table.open("p", "secret", "hash", [blocks], blocks, self.now_s)
        assert lease.production not in self.last_sign_s, "a number was given twice"
        self.opened[lease.production] = lease
        self.last_sign_s[lease.production] = self.now_s
        return lease.production

    @rule(production=open_leases, claim_id=st.integers(1, 6))
    def claim(self, production: int, claim_id: int) -> None:
        lease = self.opened.get(production)
        if lease is not None and not isinstance(
            claim(self.table, lease, claim_id, self.now_s), str
        ):
            assert lease.end is None
            self.last_sign_s[production] = self.now_s

    @rule(claim_id=st.integers(1, 6))
    def renew(self, claim_id: int) -> None:
        holders = [lease for lease in self.opened.values() if claim_id in lease.claims]
        renewed = self.table.renew(claim_id, self.now_s)
        assert renewed == bool(holders)
        for lease in holders:
            self.last_sign_s[lease.production] = self.now_s

    @rule(production=open_leases, claim_id=st.integers(1, 6))
    def drop(self, production: int, claim_id: int) -> None:
        self.table.drop(production, "secret", claim_id)

    @rule(
        production=open_leases,
        claim_id=st.integers(1, 6),
        rank=st.integers(0, 1),
        secret=st.sampled_from(["secret", "secret", "guess"]),
    )
    def release(self, production: int, claim_id: int, rank: int, secret: str) -> None:
        """Confirmed for the first time only before the end, and again after it: of a lease that was
        released even when its blocks are freed."""
        lease = self.opened.get(production)
        reader = (production, claim_id, rank)
        is_live = lease is not None and lease.end is None
        is_repeated = reader in self.confirmed and (lease is not None or reader in self.past)
        expected = is_live or is_repeated
        answer = self.table.release(production, secret, claim_id, rank)
        assert answer == (expected and secret == "secret")
        if answer:
            self.confirmed.add(reader)

    @rule(target=ended_leases, seconds=st.floats(0.0, 12.0))
    def step(self, seconds: float) -> object:
        self.now_s += seconds
        ended = self.table.take_ended(self.now_s)
        for lease in ended:
            assert lease.production not in self.ended, "a lease ended twice"
            assert lease.end is not None
            self.ended.add(lease.production)
        return multiple(*(lease.production for lease in ended))

    @rule(production=consumes(ended_leases))
    def vllm_frees(self, production: int) -> None:
        lease = self.opened.pop(production)
        self.table.forget(lease)
        if lease.end is LeaseEnd.RELEASED:
            self.past |= {reader for reader in self.confirmed if reader[0] == production}

    @invariant()
    def held_blocks_are_those_of_all_leases_that_are_not_forgotten(self) -> None:
        held = set().union(*(lease.held_blocks for lease in self.opened.values()))
        assert self.table.num_held_blocks == len(held)
        assert self.table.num_not_held([*held, 100]) == 1
        assert len(self.table) == len(self.opened)

    @invariant()
    def no_claim_outlives_its_lease_or_its_last_rank(self) -> None:
        for lease in self.opened.values():
            assert lease.end is None or not lease.claims
            for claim_id, state in lease.claims.items():
                assert len(state.ranks_released) < 2
                for rank in state.ranks_released:
                    assert (lease.production, claim_id, rank) in self.confirmed

    @invariant()
    def live_leases_have_had_a_sign_of_life_and_respect_the_bound(self) -> None:
        for lease in self.opened.values():
            if lease.end is None:
                assert lease.deadline_s <= self.last_sign_s[lease.production] + LEASE_S
                assert lease.deadline_s <= lease.opened_s + MAX_LEASE_S

    def teardown(self) -> None:
        """Whatever happened, after the bound no lease is left that did not end once."""
        self.now_s += MAX_LEASE_S
        self.step(0.0)
        assert self.opened.keys() <= self.ended
        for production in list(self.opened):
            self.vllm_frees(production)
        assert (len(self.table), self.table.num_held_blocks) == (0, 0)
        assert not self.table._claims


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=40)

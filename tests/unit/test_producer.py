"""``Producer``: which finished prompts are held, and when a lease ends."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.clock import FakeClock
from fakes.prefiller import LEASE_S, Prefiller
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.messages import Gone, ReleaseAck
from vllm_llmdd_connector.metadata import SentPrompt
from vllm_llmdd_connector.params import Ticket, read_ticket


@pytest.fixture
def prefiller(clock: FakeClock) -> Prefiller:
    return Prefiller(clock)


class TestHandOver:
    @pytest.mark.parametrize("status", ["FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"])
    def test_finished_prompt_is_held_and_its_ticket_returned(
        self, prefiller: Prefiller, status: str
    ) -> None:
        params = prefiller.finish(status=status)
        assert params is not None
        ticket = read_ticket(params)
        assert ticket.address == ("127.0.0.1", 4000)
        assert (ticket.instance, ticket.transfer_id, ticket.num_tokens) == ("instance-p", "p", 40)
        assert params["remote_block_ids"] == [[4, 5, 6]]
        assert params["remote_engine_id"] == "engine-p"
        assert prefiller.pool.touched == [4, 5, 6]
        assert prefiller.pool.in_use == [4, 5, 6]
        assert prefiller.message().is_empty

    def test_s28_leak_none_of_lookahead_blocks(self, prefiller: Prefiller) -> None:
        params = prefiller.finish(blocks=(4, 5, 6, 7, 8))
        assert params is not None
        assert params["remote_block_ids"] == [[4, 5, 6]]
        assert prefiller.pool.in_use == [4, 5, 6]

    def test_null_blocks_are_named_but_not_held(self, prefiller: Prefiller) -> None:
        """What has left a window: its place counts, the null block belongs to everybody."""
        params = prefiller.finish(blocks=(0, 5, 6))
        assert params is not None
        assert params["remote_block_ids"] == [[0, 5, 6]]
        assert prefiller.pool.touched == [5, 6]

    @pytest.mark.parametrize(
        "changes",
        [
            {"status": "FINISHED_ABORTED"},
            {"status": "FINISHED_ERROR"},
            {"params": None},
            {"params": {"do_remote_decode": False}},
            {"prompt": None},
            {"prompt_embeds": "a tensor"},
            {"blocks": (0, 0, 0)},
            {"blocks": ()},
        ],
        ids=str,
    )
    def test_anything_else_is_freed_at_once(
        self, prefiller: Prefiller, changes: dict[str, Any]
    ) -> None:
        assert prefiller.finish(**changes) is None
        assert prefiller.producer.num_leases == 0
        assert prefiller.pool.touched == []

    def test_leases_beyond_the_cap_are_not_opened_but_counted(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock, max_leased_fraction=0.05)
        prefiller.ticket("first")
        assert prefiller.finish("second", (7, 8, 9)) is None
        assert prefiller.pool.in_use == [4, 5, 6]
        assert prefiller.counts() == {"leases_opened": 1, "leases_over_cap": 1}

    def test_blocks_of_a_common_prefix_count_once_towards_the_cap(self, clock: FakeClock) -> None:
        """Each lease used to count a shared system prompt's blocks as its own."""
        prefiller = Prefiller(clock, max_leased_fraction=0.05)
        for number, last_block in enumerate((7, 8, 9)):
            assert prefiller.finish(f"p{number}", (4, 5, last_block))
        assert not prefiller.finish("p3", (4, 5, 10))

    def test_only_lease_may_exceed_the_cap(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock, max_leased_fraction=0.01)
        assert prefiller.finish("first")

    def test_ended_lease_no_longer_counts_towards_the_cap(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock, max_leased_fraction=0.05)
        prefiller.drop(prefiller.ticket("first"))
        assert prefiller.finish("second", (7, 8, 9))

    def test_prompts_are_digested_once_and_only_when_asked_for(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock, kv_digest="/somewhere")
        prefiller.ticket()
        assert prefiller.message().sent_prompts == [SentPrompt("p", "p", ((4, 5, 6),))]
        assert prefiller.message().is_empty

    def test_prompt_that_is_not_handed_over_is_not_digested(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock, kv_digest="/somewhere")
        assert prefiller.finish(status="FINISHED_ABORTED") is None
        assert prefiller.message().is_empty


class TestEnd:
    def test_release_by_all_ranks_gives_the_blocks_back_once(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock, num_ranks=2)
        ticket = prefiller.ticket()
        prefiller.claim(ticket)
        prefiller.release(ticket, rank=0)
        assert prefiller.step() == []
        prefiller.release(ticket, rank=1)
        assert prefiller.pool.in_use == [4, 5, 6]
        assert sorted(prefiller.step()) == [4, 5, 6]
        assert prefiller.pool.in_use == []
        assert prefiller.step() == []
        assert prefiller.counts() == {"leases_opened": 1, "leases_released": 1}

    def test_end_of_a_prompt_is_evicted_before_its_beginning(self, prefiller: Prefiller) -> None:
        prefiller.drop(prefiller.ticket())
        assert prefiller.step() == [6, 5, 4]

    def test_shared_blocks_stay_until_their_last_lease_ends(self, prefiller: Prefiller) -> None:
        first, second = prefiller.ticket("first"), prefiller.ticket("second", (4, 5, 9))
        prefiller.drop(first)
        prefiller.step()
        assert prefiller.pool.in_use == [4, 5, 9]
        prefiller.drop(second)
        prefiller.step()
        assert prefiller.pool.in_use == []

    def test_blocks_that_a_request_uses_stay_with_it(self, prefiller: Prefiller) -> None:
        ticket = prefiller.ticket()
        prefiller.pool.allocate((4, 5))
        prefiller.drop(ticket)
        prefiller.step()
        assert prefiller.pool.ref_counts((4, 5, 6)) == [1, 1, 0]

    def test_lease_dropped_before_the_next_step_is_digested_all_the_same(
        self, clock: FakeClock
    ) -> None:
        prefiller = Prefiller(clock, kv_digest="/somewhere")
        prefiller.drop(prefiller.ticket())
        assert sorted(prefiller.step()) == [4, 5, 6]
        assert [prompt.request_id for prompt in prefiller.message().sent_prompts] == ["p"]

    def test_unclaimed_lease_expires_and_is_counted(self, prefiller: Prefiller) -> None:
        prefiller.ticket()
        prefiller.clock.advance(LEASE_S - 0.001)
        assert prefiller.step() == []
        prefiller.clock.advance(0.001)
        assert sorted(prefiller.step()) == [4, 5, 6]
        assert prefiller.counts()["leases_expired"] == 1
        assert prefiller.producer.num_leases == 0

    def test_renewed_lease_lives_and_the_other_one_expires(self, prefiller: Prefiller) -> None:
        prefiller.claim(prefiller.ticket("first"), 1)
        prefiller.claim(prefiller.ticket("second", (7, 8, 9)), 2)
        prefiller.clock.advance(LEASE_S / 2)
        assert prefiller.renew(1) == []
        prefiller.clock.advance(LEASE_S / 2)
        assert sorted(prefiller.step()) == [7, 8, 9]

    def test_renewal_of_an_ended_or_unknown_claim_is_gone(self, prefiller: Prefiller) -> None:
        ticket = prefiller.ticket()
        prefiller.claim(ticket)
        prefiller.drop(ticket)
        answers = prefiller.renew(1, 99)
        assert [type(answer) for answer in answers] == [Gone, Gone]

    def test_claim_after_the_end_is_gone(self, prefiller: Prefiller) -> None:
        ticket = prefiller.ticket()
        prefiller.drop(ticket, 1)
        (answer,) = prefiller.claim(ticket, 2)
        assert isinstance(answer, Gone)


class HeldBlocks(RuleBasedStateMachine):
    """Prompts with common beginnings, two ranks at D, and messages at any moment between hooks."""

    @initialize()
    def start(self) -> None:
        self.prefiller = Prefiller(FakeClock(), num_ranks=2, max_leased_fraction=0.2)
        self.tickets: list[tuple[Ticket, tuple[int, ...]]] = []
        self.confirmed: set[tuple[int, int, int]] = set()

    @rule(length=st.integers(0, 2), own=st.integers(3, 40))
    def prompt_finishes(self, length: int, own: int) -> None:
        blocks = (*range(1, length + 1), *range(own, own + 3 - length))
        params = self.prefiller.finish(f"p{len(self.tickets)}", blocks)
        if params is not None:
            self.tickets.append((read_ticket(params), blocks))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), claim_id=st.integers(1, 4))
    def d_claims_renews_or_drops(self, data: st.DataObject, claim_id: int) -> None:
        ticket, _ = data.draw(st.sampled_from(self.tickets))
        match data.draw(st.sampled_from(["claim", "claim", "renew", "drop"])):
            case "claim":
                self.prefiller.claim(ticket, claim_id)
            case "renew":
                self.prefiller.renew(claim_id)
            case "drop":
                self.prefiller.drop(ticket, claim_id)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), claim_id=st.integers(1, 4), rank=st.integers(0, 1))
    def d_releases(self, data: st.DataObject, claim_id: int, rank: int) -> None:
        """What is confirmed has not been given back, or D would have read foreign blocks. The
        repetition of a release gets its answer again, which was true then."""
        ticket, blocks = data.draw(st.sampled_from(self.tickets))
        (answer,) = self.prefiller.release(ticket, claim_id, rank)
        assert isinstance(answer, ReleaseAck)
        release = ticket.production, claim_id, rank
        if answer.valid and release not in self.confirmed:
            assert all(self.prefiller.pool.ref_counts(blocks))
            self.confirmed.add(release)

    @rule(seconds=st.sampled_from([0.0, 1.0, LEASE_S / 2, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.prefiller.clock.advance(seconds)

    @rule()
    def vllm_calls_a_hook(self) -> None:
        self.prefiller.step()

    @invariant()
    def references_are_those_of_the_leases(self) -> None:
        """Without requests in vLLM nobody else has any; the pool counts each of them."""
        pool = self.prefiller.pool
        assert sum(pool.ref_counts(range(100))) == len(pool.touched) - len(pool.freed)
        assert len(pool.in_use) == self.prefiller.producer.leases.num_held_blocks

    def teardown(self) -> None:
        """Whatever happened, every block that was touched is given back once."""
        if not hasattr(self, "prefiller"):
            return
        self.prefiller.clock.advance(ConnectorConfig().max_lease_s)
        self.prefiller.step()
        pool = self.prefiller.pool
        assert sorted(pool.touched) == sorted(pool.freed)
        assert (pool.in_use, self.prefiller.producer.num_leases) == ([], 0)


TestHeldBlocks = HeldBlocks.TestCase
TestHeldBlocks.settings = settings(max_examples=40)

"""``Producer``: which finished prompts are held, what a D is answered, when a lease ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fakes.block_pool import FakeBlockPool
from fakes.builders import make_endpoint, make_fingerprint
from fakes.clock import FakeClock
from fakes.requests import make_request
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
from vllm_llmdd_connector.control.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Claim,
    Drop,
    Gone,
    Grant,
    Hello,
    Message,
    Reject,
    Release,
    ReleaseAck,
    Renew,
    Unknown,
    Welcome,
    raw_fingerprint,
)
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.metadata import SentPrompt, StepMessage
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.params import Ticket, read_ticket
from vllm_llmdd_connector.scheduler.producer import Producer

PROMPT = list(range(40))
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
LEASE_S = ConnectorConfig().lease_s


class Prefiller:
    """A ``Producer`` of 100 blocks of 16 tokens, vLLM around it, and D's side of the talk."""

    def __init__(self, clock: FakeClock, num_ranks: int = 1, **options: Any) -> None:
        self.stats = TransferStats()
        self.clock = clock
        self.pool: Any = FakeBlockPool(100)
        self.producer = Producer(
            ConnectorConfig(**options),
            "engine-p",
            "instance-p",
            4000,
            [16],
            100,
            num_ranks,
            clock,
            self.stats,
        )
        self.producer.bind_block_pool(self.pool)
        self.producer.set_identity(make_fingerprint(), (make_endpoint(),))
        (welcome,) = self.say(Hello(version=PROTOCOL_VERSION, fingerprint=FINGERPRINT))
        assert isinstance(welcome, Welcome)
        self.welcome = welcome

    def finish(
        self, request_id: str = "p", blocks: tuple[int, ...] = (4, 5, 6), **changes: Any
    ) -> dict[str, Any] | None:
        """vLLM ends a request: asks, then frees the request's own references, if it may."""
        fields = {"status": "FINISHED_LENGTH_CAPPED", "params": dict(PREFILL), "prompt": PROMPT}
        request = make_request(request_id, **{**fields, **changes})
        self.pool.allocate(blocks)
        is_delayed, params = self.producer.request_finished(request, [blocks])
        assert not is_delayed, "vLLM would step without pause until the lease has ended"
        self.pool.end_request(blocks)
        return params

    def ticket(self, request_id: str = "p", blocks: tuple[int, ...] = (4, 5, 6)) -> Ticket:
        params = self.finish(request_id, blocks)
        assert params is not None
        return read_ticket(params)

    def say(self, message: AnyMessage) -> list[Message]:
        """As on the control thread, where vLLM's blocks must not change."""
        before = self.pool.touched[:], self.pool.freed[:]
        answers: list[Message] = []
        self.producer.handle(message, answers.append)
        assert (self.pool.touched, self.pool.freed) == before
        return answers

    def claim(self, ticket: Ticket, claim_id: int = 1, **changes: Any) -> list[Message]:
        fields = {
            "session": self.welcome.session,
            "claim_id": claim_id,
            "production": ticket.production,
            "secret": ticket.secret,
            "prompt_hash": ticket.prompt_hash,
        }
        return self.say(Claim(**{**fields, **changes}))

    def drop(self, ticket: Ticket, claim_id: int = 1) -> list[Message]:
        return self.say(
            Drop(
                session=self.welcome.session,
                claim_id=claim_id,
                production=ticket.production,
                secret=ticket.secret,
            )
        )

    def renew(self, *claim_ids: int) -> list[Message]:
        return self.say(Renew(session=self.welcome.session, claim_ids=claim_ids))

    def release(
        self, ticket: Ticket, claim_id: int = 1, rank: int = 0, **changes: Any
    ) -> list[Message]:
        fields = {
            "session": self.welcome.session,
            "claim_id": claim_id,
            "rank": rank,
            "production": ticket.production,
            "secret": ticket.secret,
        }
        return self.say(Release(**{**fields, **changes}))

    def step(self) -> list[int]:
        """What the scheduler does in a step; returns the blocks that vLLM got back in it."""
        num_freed = len(self.pool.freed)
        self.producer.free_ended()
        freed: list[int] = self.pool.freed[num_freed:]
        return freed

    def message(self) -> StepMessage:
        step = StepMessage()
        self.producer.fill(step)
        return step

    def counts(self) -> dict[str, int]:
        stats = self.stats.take()
        return {} if stats is None else stats.data["counts"]


def confirmed(is_held: bool, claim_id: int = 1, production: int = 1) -> list[Message]:
    return [ReleaseAck(claim_id=claim_id, production=production, valid=is_held)]


FINGERPRINT = raw_fingerprint(make_fingerprint())


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

    def test_blocks_behind_the_prompt_are_neither_named_nor_held(
        self, prefiller: Prefiller
    ) -> None:
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
            {"prompt_embeds": object()},
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
        assert prefiller.message().sent_prompts == [SentPrompt("p", ((4, 5, 6),))]
        assert prefiller.message().is_empty

    def test_prompt_that_is_not_handed_over_is_not_digested(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock, kv_digest="/somewhere")
        assert prefiller.finish(status="FINISHED_ABORTED") is None
        assert prefiller.message().is_empty


class TestHello:
    def test_welcome_names_session_instance_and_workers(self, prefiller: Prefiller) -> None:
        assert prefiller.welcome.instance == "instance-p"
        assert prefiller.welcome.workers == (make_endpoint(),)
        (again,) = prefiller.say(Hello(version=PROTOCOL_VERSION, fingerprint=FINGERPRINT))
        assert again == prefiller.welcome

    def test_other_version_is_refused_before_its_fingerprint_is_read(
        self, prefiller: Prefiller
    ) -> None:
        (answer,) = prefiller.say(Hello(version=9, fingerprint=raw_fingerprint(make_fingerprint())))
        assert isinstance(answer, Reject)
        assert "prefill server 1, decode server 9" in answer.reason

    def test_difference_is_refused_with_both_values_and_sides(self, prefiller: Prefiller) -> None:
        other = raw_fingerprint(make_fingerprint(dtype="float16"))
        (answer,) = prefiller.say(Hello(version=PROTOCOL_VERSION, fingerprint=other))
        assert isinstance(answer, Reject)
        assert "dtype differs: local 'bfloat16', peer 'float16' (local is the prefill" in (
            answer.reason
        )

    def test_unreadable_fingerprint_is_a_protocol_error(self, prefiller: Prefiller) -> None:
        hello = Hello(version=PROTOCOL_VERSION, fingerprint=msgspec.Raw(b"\xc0"))
        with pytest.raises(RemoteProtocolError):
            prefiller.say(hello)

    @pytest.mark.parametrize(
        "message",
        [
            ReleaseAck(claim_id=1, production=1, valid=True),
            Gone(claim_id=1, reason="x"),
        ],
    )
    def test_message_for_somebody_else_is_a_protocol_error(
        self, prefiller: Prefiller, message: AnyMessage
    ) -> None:
        with pytest.raises(RemoteProtocolError, match="is not for a prefill server"):
            prefiller.say(message)


class TestClaims:
    def test_claim_is_granted_as_often_as_it_is_asked(self, prefiller: Prefiller) -> None:
        ticket = prefiller.ticket()
        grant = Grant(claim_id=1, block_ids=((4, 5, 6),))
        assert prefiller.claim(ticket) == prefiller.claim(ticket) == [grant]

    @pytest.mark.parametrize(
        "changes", [{"secret": "guess"}, {"production": 7}, {"prompt_hash": "other"}], ids=str
    )
    def test_claim_without_proof_is_gone(
        self, prefiller: Prefiller, changes: dict[str, Any]
    ) -> None:
        (answer,) = prefiller.claim(prefiller.ticket(), **changes)
        assert isinstance(answer, Gone)
        assert prefiller.step() == []

    @pytest.mark.parametrize("make", ["claim", "drop", "renew", "release"])
    def test_message_of_another_session_is_unknown_and_changes_nothing(
        self, prefiller: Prefiller, make: str
    ) -> None:
        ticket = prefiller.ticket()
        other = prefiller.welcome.session + 1
        messages: dict[str, AnyMessage] = {
            "claim": Claim(session=other, claim_id=1, production=1, secret="s", prompt_hash="h"),
            "drop": Drop(session=other, claim_id=1, production=1, secret=ticket.secret),
            "renew": Renew(session=other, claim_ids=(1,)),
            "release": Release(
                session=other, claim_id=1, rank=0, production=1, secret=ticket.secret
            ),
        }
        prefiller.claim(ticket)
        assert prefiller.say(messages[make]) == [Unknown(session=other)]
        assert prefiller.step() == []

    def test_drop_with_a_guessed_secret_ends_nothing(self, prefiller: Prefiller) -> None:
        ticket = prefiller.ticket()
        message = Drop(session=prefiller.welcome.session, claim_id=1, production=1, secret="guess")
        assert prefiller.say(message) == []
        assert prefiller.step() == []
        assert prefiller.claim(ticket)


class TestRelease:
    def test_held_blocks_are_confirmed_as_often_as_it_is_asked(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock, num_ranks=2)
        ticket = prefiller.ticket()
        prefiller.claim(ticket)
        for _ in range(3):
            assert prefiller.release(ticket, rank=0) == confirmed(True)
        assert prefiller.step() == []

    @pytest.mark.parametrize(
        ("changes", "production"), [({"secret": "guess"}, 1), ({"production": 7}, 7)], ids=str
    )
    def test_release_without_proof_is_refused_and_ends_nothing(
        self, prefiller: Prefiller, changes: dict[str, Any], production: int
    ) -> None:
        ticket = prefiller.ticket()
        prefiller.claim(ticket)
        answers = prefiller.release(ticket, **changes)
        assert answers == confirmed(False, production=production)
        assert prefiller.step() == []

    def test_release_after_the_end_is_refused(self, prefiller: Prefiller) -> None:
        ticket = prefiller.ticket()
        prefiller.claim(ticket)
        prefiller.drop(ticket)
        assert prefiller.release(ticket) == confirmed(False)
        prefiller.step()
        assert prefiller.release(ticket) == confirmed(False)

    def test_expired_lease_is_confirmed_until_its_blocks_are_given_back(
        self, prefiller: Prefiller
    ) -> None:
        """The deadline frees nothing by itself: what D has read is still what P has computed."""
        ticket = prefiller.ticket()
        prefiller.claim(ticket)
        prefiller.clock.advance(LEASE_S)
        assert prefiller.release(ticket) == confirmed(True)
        other = prefiller.ticket("other", (7, 8, 9))
        prefiller.claim(other, 2)
        prefiller.clock.advance(LEASE_S)
        prefiller.step()
        assert prefiller.release(other, 2) == confirmed(False, 2, 2)


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
        """What is confirmed has not been given back, or D would have read foreign blocks."""
        ticket, blocks = data.draw(st.sampled_from(self.tickets))
        (answer,) = self.prefiller.release(ticket, claim_id, rank)
        assert isinstance(answer, ReleaseAck)
        if answer.valid:
            assert all(self.prefiller.pool.ref_counts(blocks))

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
        assert len(pool.in_use) == self.prefiller.producer._leases.num_held_blocks

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

"""``Producer``: which finished prompts are held, what a D is answered, when a lease ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fakes.builders import make_endpoint, make_fingerprint
from fakes.clock import FakeClock
from fakes.requests import make_request

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
    Renew,
    Unknown,
    Welcome,
    raw_fingerprint,
)
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.metadata import StepMessage
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.params import Ticket, read_ticket
from vllm_llmdd_connector.scheduler.producer import Producer

PROMPT = list(range(40))
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
LEASE_S = ConnectorConfig().lease_s


class Prefiller:
    """A ``Producer`` of 100 blocks of 16 tokens, and a D scheduler's side of the talk with it."""

    def __init__(self, clock: FakeClock, num_ranks: int = 1, **options: Any) -> None:
        self.stats = TransferStats()
        self.clock = clock
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
        self.producer.set_identity(make_fingerprint(), (make_endpoint(),))
        (welcome,) = self.say(Hello(version=PROTOCOL_VERSION, fingerprint=FINGERPRINT))
        assert isinstance(welcome, Welcome)
        self.welcome = welcome

    def finish(
        self, request_id: str = "p", blocks: tuple[int, ...] = (4, 5, 6), **changes: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        fields = {"status": "FINISHED_LENGTH_CAPPED", "params": dict(PREFILL), "prompt": PROMPT}
        request = make_request(request_id, **{**fields, **changes})
        return self.producer.request_finished(request, [blocks])

    def ticket(self, request_id: str = "p", blocks: tuple[int, ...] = (4, 5, 6)) -> Ticket:
        is_held, params = self.finish(request_id, blocks)
        assert is_held
        assert params is not None
        return read_ticket(params)

    def say(self, message: AnyMessage) -> list[Message]:
        answers: list[Message] = []
        self.producer.handle(message, answers.append)
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

    def step(self) -> StepMessage:
        step = StepMessage()
        self.producer.fill(step)
        return step

    def counts(self) -> dict[str, int]:
        stats = self.stats.take()
        return {} if stats is None else stats.data["counts"]


FINGERPRINT = raw_fingerprint(make_fingerprint())


@pytest.fixture
def prefiller(clock: FakeClock) -> Prefiller:
    return Prefiller(clock)


class TestHandOver:
    @pytest.mark.parametrize("status", ["FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"])
    def test_finished_prompt_is_held_and_its_ticket_returned(
        self, prefiller: Prefiller, status: str
    ) -> None:
        is_held, params = prefiller.finish(status=status)
        assert is_held
        assert params is not None
        ticket = read_ticket(params)
        assert ticket.address == ("127.0.0.1", 4000)
        assert (ticket.instance, ticket.transfer_id, ticket.num_tokens) == ("instance-p", "p", 40)
        assert params["remote_block_ids"] == [[4, 5, 6]]
        assert params["remote_engine_id"] == "engine-p"
        (hold,) = prefiller.step().holds
        assert (hold.production, hold.request_id, hold.secret) == (1, "p", ticket.secret)
        assert hold.block_ids == ()
        assert prefiller.step().is_empty

    def test_blocks_behind_the_prompt_are_not_named(self, prefiller: Prefiller) -> None:
        _, params = prefiller.finish(blocks=(4, 5, 6, 7, 8))
        assert params is not None
        assert params["remote_block_ids"] == [[4, 5, 6]]

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
        assert prefiller.finish(**changes) == (False, None)
        assert prefiller.producer.num_leases == 0
        assert prefiller.step().is_empty

    def test_leases_beyond_the_cap_are_not_opened_but_counted(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock, max_leased_fraction=0.05)
        prefiller.ticket("first")
        assert prefiller.finish("second", (7, 8, 9)) == (False, None)
        assert prefiller.counts() == {"leases_opened": 1, "leases_over_cap": 1}

    def test_blocks_of_a_common_prefix_count_once_towards_the_cap(self, clock: FakeClock) -> None:
        """Each lease used to count a shared system prompt's blocks as its own."""
        prefiller = Prefiller(clock, max_leased_fraction=0.05)
        for number, last_block in enumerate((7, 8, 9)):
            assert prefiller.finish(f"p{number}", (4, 5, last_block))[0]
        assert not prefiller.finish("p3", (4, 5, 10))[0]

    def test_only_lease_may_exceed_the_cap(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock, max_leased_fraction=0.01)
        assert prefiller.finish("first")[0]

    def test_ended_lease_counts_until_vllm_has_freed_its_blocks(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock, max_leased_fraction=0.05)
        prefiller.drop(prefiller.ticket("first"))
        assert prefiller.step().ended == [1]
        assert not prefiller.finish("second", (7, 8, 9))[0]
        prefiller.producer.on_sent({"first"})
        assert prefiller.finish("third")[0]

    def test_blocks_for_digests_ride_along_only_when_asked_for(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock, kv_digest="/somewhere")
        prefiller.ticket()
        assert prefiller.step().holds[0].block_ids == ((4, 5, 6),)


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
            Release(cluster_id=1, claim_id=1, production=1, secret="s"),
            Gone(claim_id=1, reason="x"),
        ],
    )
    def test_message_for_somebody_else_is_a_protocol_error(
        self, prefiller: Prefiller, message: AnyMessage
    ) -> None:
        with pytest.raises(RemoteProtocolError, match="is not for a prefill scheduler"):
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
        assert prefiller.step().ended == []

    @pytest.mark.parametrize("make", ["claim", "drop", "renew"])
    def test_message_of_another_session_is_unknown_and_changes_nothing(
        self, prefiller: Prefiller, make: str
    ) -> None:
        ticket = prefiller.ticket()
        other = prefiller.welcome.session + 1
        messages: dict[str, AnyMessage] = {
            "claim": Claim(session=other, claim_id=1, production=1, secret="s", prompt_hash="h"),
            "drop": Drop(session=other, claim_id=1, production=1, secret=ticket.secret),
            "renew": Renew(session=other, claim_ids=(1,)),
        }
        assert prefiller.say(messages[make]) == [Unknown(session=other)]
        assert prefiller.step().ended == []

    def test_drop_with_a_guessed_secret_ends_nothing(self, prefiller: Prefiller) -> None:
        ticket = prefiller.ticket()
        message = Drop(session=prefiller.welcome.session, claim_id=1, production=1, secret="guess")
        assert prefiller.say(message) == []
        assert prefiller.step().ended == []
        assert prefiller.claim(ticket)


class TestEnd:
    def test_release_by_all_ranks_ends_the_lease_once(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock, num_ranks=2)
        prefiller.claim(prefiller.ticket())
        prefiller.step()
        prefiller.producer.on_released({1: 1})
        assert prefiller.step().ended == []
        prefiller.producer.on_released({1: 1})
        assert prefiller.step().ended == [1]
        assert prefiller.step().ended == []
        assert prefiller.counts() == {"leases_opened": 1, "leases_released": 1}

    def test_lease_opened_and_dropped_between_two_steps_is_held_and_ended_in_one(
        self, prefiller: Prefiller
    ) -> None:
        prefiller.drop(prefiller.ticket())
        step = prefiller.step()
        assert [hold.production for hold in step.holds] == step.ended == [1]

    def test_unclaimed_lease_expires_and_is_counted(self, prefiller: Prefiller) -> None:
        prefiller.ticket()
        prefiller.clock.advance(LEASE_S - 0.001)
        assert prefiller.step().ended == []
        prefiller.clock.advance(0.001)
        assert prefiller.step().ended == [1]
        assert prefiller.counts()["leases_expired"] == 1

    def test_renewed_lease_lives_and_the_other_one_expires(self, prefiller: Prefiller) -> None:
        prefiller.claim(prefiller.ticket("first"), 1)
        prefiller.claim(prefiller.ticket("second"), 2)
        prefiller.clock.advance(LEASE_S / 2)
        assert prefiller.renew(1) == []
        prefiller.clock.advance(LEASE_S / 2)
        assert prefiller.step().ended == [2]

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

    def test_sent_requests_are_forgotten_and_strangers_ignored(self, prefiller: Prefiller) -> None:
        prefiller.drop(prefiller.ticket())
        prefiller.step()
        prefiller.producer.on_sent({"p", "stranger"})
        assert prefiller.producer.num_leases == 0
        prefiller.producer.on_released({1: 1})

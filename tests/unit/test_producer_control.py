"""``ProducerControl``: what a D is answered."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fakes.builders import make_endpoint, make_fingerprint
from fakes.clock import FakeClock
from fakes.prefiller import FINGERPRINT, LEASE_S, Prefiller, confirmed

from vllm_llmdd_connector.control.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Claim,
    Drop,
    Gone,
    Grant,
    Hello,
    Reject,
    Release,
    ReleaseAck,
    Renew,
    Unknown,
    raw_fingerprint,
)
from vllm_llmdd_connector.errors import RemoteProtocolError


@pytest.fixture
def prefiller(clock: FakeClock) -> Prefiller:
    return Prefiller(clock)


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
        grant = Grant(claim_id=1, production=1, secret=ticket.secret, block_ids=((4, 5, 6),))
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

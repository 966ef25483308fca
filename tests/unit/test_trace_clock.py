"""How far P's clock is from D's, from the handshake's round trip."""

from __future__ import annotations

import pytest
from fakes.builders import INSTANCE, make_fingerprint, make_ticket, make_welcome
from hypothesis import given
from hypothesis import strategies as st

from vllm_llmdd_connector.control.messages import Hello, decode, encode
from vllm_llmdd_connector.control.session import ClientSession
from vllm_llmdd_connector.deadlines import RESEND_S, Deadlines
from vllm_llmdd_connector.trace.clock import estimate

SECONDS = st.floats(0, 1e6)
WAYS = st.floats(0, 10)


@given(sent=SECONDS, there=WAYS, back=WAYS, offset=st.floats(-1e6, 1e6))
def test_truth_lies_within_the_error(sent: float, there: float, back: float, offset: float) -> None:
    found = estimate(sent, sent + there + offset, sent + there + back)
    assert found.error_s >= 0
    assert abs(found.offset_s - offset) <= found.error_s + 1e-6


@given(sent=SECONDS, way=WAYS, offset=st.floats(-1e6, 1e6))
def test_equal_ways_give_the_offset_itself(sent: float, way: float, offset: float) -> None:
    found = estimate(sent, sent + way + offset, sent + 2 * way)
    assert found.offset_s == pytest.approx(offset, abs=1e-6)


class TestSession:
    def open(self) -> tuple[ClientSession, Hello]:
        session = ClientSession(("127.0.0.1", 4000), make_fingerprint(), True, Deadlines())
        (hello,) = session.claim(1, make_ticket(), 100.0, 10.0).send
        assert isinstance(hello, Hello)
        return session, hello

    def test_hello_carries_d_s_clock(self) -> None:
        _, hello = self.open()
        assert decode(encode(hello)) == hello
        assert hello.sent_s == 10.0

    def test_offset_is_of_the_round_trip(self) -> None:
        session, hello = self.open()
        welcome = make_welcome(hello_sent_s=hello.sent_s, clock_s=510.1)
        session.on_message(welcome, 10.4)
        assert session.clock_offset is not None
        assert session.clock_offset.offset_s == pytest.approx(499.9)
        assert session.clock_offset.error_s == pytest.approx(0.2)
        assert session.instance == INSTANCE

    def test_late_answer_to_the_first_hello_counts_from_the_first(self) -> None:
        session, first = self.open()
        (again,) = session.tick(10.0 + RESEND_S).send
        assert isinstance(again, Hello)
        assert again.sent_s == 10.0 + RESEND_S
        session.on_message(make_welcome(hello_sent_s=first.sent_s, clock_s=11.0), 12.0)
        assert session.clock_offset is not None
        assert session.clock_offset.error_s == pytest.approx(1.0)

    def test_p_without_a_clock_is_no_worse_otherwise(self) -> None:
        session, _ = self.open()
        reaction = session.on_message(make_welcome(), 10.5)
        assert session.clock_offset is None
        assert len(reaction.send) == 1

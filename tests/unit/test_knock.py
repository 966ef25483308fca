"""P's knocks at D's: real sockets, and a D that is not there, or not any more."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from fakes.clock import wait_for
from fakes.threads import falls_asleep, named_thread

from vllm_llmdd_connector.control.channel import Server
from vllm_llmdd_connector.control.knock import Knocker
from vllm_llmdd_connector.control.messages import AnyMessage, Knock

HOST = "127.0.0.1"


def knock(transfer_id: str) -> Knock:
    return Knock(transfer_id=transfer_id, host=HOST, port=7100)


class Door:
    """A D's control server that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[AnyMessage] = []
        self.server = Server("door", HOST, 0, lambda: None)
        self.server.start(lambda message, reply: self.heard.append(message))
        self.address = (HOST, self.server.port)


@pytest.fixture
def knocker() -> Iterator[Knocker]:
    made = Knocker()
    yield made
    made.close()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.server.close()


def test_knocks_arrive_in_order_and_the_thread_sleeps_in_between(
    knocker: Knocker, door: Door
) -> None:
    failed: list[str] = []
    messages = [knock(f"t{number}") for number in range(100)]
    for message in messages:
        knocker.knock(door.address, message, lambda: failed.append("any"))
    wait_for(lambda: len(door.heard) == 100, "all knocks")
    assert door.heard == messages
    assert failed == []
    assert falls_asleep(named_thread("llmdd-knock"))


def test_a_d_that_is_not_there_is_reported_and_holds_back_no_other(
    knocker: Knocker, door: Door
) -> None:
    with socket.create_server((HOST, 0)) as probe:
        nobody = (HOST, probe.getsockname()[1])
    failed: list[str] = []
    knocker.knock(nobody, knock("lost"), lambda: failed.append("lost"))
    knocker.knock(door.address, knock("found"), lambda: failed.append("found"))
    wait_for(lambda: failed == ["lost"], "the report")
    wait_for(lambda: door.heard == [knock("found")], "the other knock")


def test_a_d_that_ends_is_reported_and_a_new_one_at_its_address_is_found(
    knocker: Knocker, door: Door
) -> None:
    failed: list[str] = []
    knocker.knock(door.address, knock("first"), lambda: failed.append("first"))
    wait_for(lambda: door.heard, "the knock")
    door.server.close()
    wait_for(lambda: failed == ["first"], "the report")
    heard: list[AnyMessage] = []
    again = Server("again", HOST, door.address[1], lambda: None)
    again.start(lambda message, reply: heard.append(message))
    try:
        knocker.knock(door.address, knock("second"), lambda: failed.append("second"))
        wait_for(lambda: heard == [knock("second")], "the knock at the new one")
        assert failed == ["first"]
    finally:
        again.close()


def test_what_is_no_address_is_reported(knocker: Knocker) -> None:
    failed: list[str] = []
    knocker.knock(("no address", 1), knock("t"), lambda: failed.append("t"))
    wait_for(lambda: failed == ["t"], "the report")


def test_a_knocker_that_never_knocked_has_no_thread_and_closes_twice() -> None:
    made = Knocker()
    made.close()
    made.close()
    with pytest.raises(ValueError):
        named_thread("llmdd-knock")

"""Wire format: every message survives, and nothing but ``RemoteProtocolError`` comes of junk."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fakes.builders import make_endpoint, make_fingerprint, make_gone, make_grant, make_welcome
from hypothesis import given
from hypothesis import strategies as st

from vllm_llmdd_connector.control.messages import (
    MAX_CACHES,
    MAX_GROUPS,
    MAX_MESSAGE_BYTES,
    MAX_RENEWED_CLAIMS,
    Admitted,
    Announce,
    AnyMessage,
    AskSums,
    BlockSpan,
    CacheToken,
    Cancel,
    CancelAck,
    CancelAll,
    Claim,
    Done,
    Drop,
    Failed,
    GroupSums,
    Hello,
    Knock,
    NoSums,
    Queued,
    Reject,
    Release,
    ReleaseAck,
    Renew,
    Reserve,
    Sums,
    Unknown,
    Void,
    decode,
    encode,
    raw_fingerprint,
    read_fingerprint,
)
from vllm_llmdd_connector.errors import RemoteProtocolError

BIG = 2**63 - 1
ANNOUNCE = Announce(
    session=1,
    claim_id=BIG,
    transfer_id="t",
    num_tokens=2**31 - 1,
    prompt_hash="h",
    takes_push=True,
    has_blocks=False,
)
RESERVE = Reserve(
    to_cluster=1,
    cluster_id=2**48 - 1,
    transfer_id="t",
    reservation=BIG,
    spans=(BlockSpan(first=0, count=3), BlockSpan(first=2, count=0)),
    tokens=(CacheToken(model_id=0, token=BIG),),
    blocks=((5, 2**31 - 1, 6), ()),
    link_number=BIG,
)
SUMS = (GroupSums(count=2, sums=b"\0\xff" * 8), GroupSums(count=0, sums=b""))
MESSAGES: list[AnyMessage] = [
    make_welcome(),
    make_grant(BIG, ((1, 2), (), (0, 3))),
    make_gone(1),
    Reject(reason="dtype differs"),
    Unknown(session=BIG),
    Knock(transfer_id="t", host="10.0.0.1", port=65535),
    Claim(session=1, claim_id=BIG, production=1, secret="s", prompt_hash="h"),
    Renew(session=1, claim_ids=(1, 2)),
    Drop(session=1, claim_id=2, production=3, secret="s"),
    Release(session=BIG, claim_id=2, rank=2**16 - 1, production=3, secret="s"),
    ReleaseAck(claim_id=2, production=3, valid=False),
    ANNOUNCE,
    Queued(claim_id=BIG),
    Admitted(claim_id=BIG),
    RESERVE,
    Cancel(to_cluster=1, transfer_id="t", reservation=BIG),
    CancelAll(to_cluster=1, cluster_id=2**48 - 1, link_number=BIG),
    CancelAck(transfer_id="t", reservation=BIG),
    Done(transfer_id="t", reservation=BIG, production=7, sums=SUMS),
    Void(transfer_id="t", reservation=BIG),
    Failed(transfer_id="t", reservation=BIG, reason="torn", link_lost=True),
    AskSums(to_cluster=1, production=7, secret="s", number=BIG, spans=RESERVE.spans),
    Sums(number=BIG, groups=SUMS),
    NoSums(number=BIG, reason="expired"),
]
json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def decodes(frame: bytes) -> AnyMessage | None:
    """The message, or None where ``decode`` refuses; any other exception is the test's failure."""
    try:
        return decode(frame)
    except RemoteProtocolError:
        return None


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_survives_the_wire(message: AnyMessage) -> None:
    assert decode(encode(message)) == message


def test_every_message_of_the_union_is_tried_here() -> None:
    tried = {type(message) for message in MESSAGES} | {Hello}
    assert tried == set(AnyMessage.__args__)


def test_hello_carries_the_fingerprint_unread() -> None:
    fingerprint = make_fingerprint()
    hello = decode(encode(Hello(version=1, fingerprint=raw_fingerprint(fingerprint))))
    assert isinstance(hello, Hello)
    assert read_fingerprint(hello.fingerprint) == fingerprint


def test_hello_of_another_version_can_be_read_up_to_its_version() -> None:
    foreign = msgspec.msgpack.encode({"type": "Hello", "version": 9, "fingerprint": [1, {"x": 2}]})
    hello = decode(foreign)
    assert isinstance(hello, Hello)
    assert hello.version == 9
    with pytest.raises(RemoteProtocolError, match="fingerprint cannot be read"):
        read_fingerprint(hello.fingerprint)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_a_message(frame: bytes) -> None:
    decodes(frame)


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_message_is_refused_or_a_message(message: AnyMessage, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    decodes(bytes(frame[: data.draw(st.integers(0, len(frame)))]))


@given(st.sampled_from(MESSAGES), st.data())
def test_fields_of_any_type_are_refused_or_fit(message: AnyMessage, data: st.DataObject) -> None:
    fields = msgspec.to_builtins(message)
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(json_like)
    decoded = decodes(msgspec.msgpack.encode(fields))
    if decoded is not None:
        assert decode(encode(decoded)) == decoded


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        decode(b"\x91" * 100_000)


def test_too_long_frame_is_refused_unread() -> None:
    with pytest.raises(RemoteProtocolError, match=f"at most {MAX_MESSAGE_BYTES} are read"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


def test_too_many_renewals_in_one_message_are_refused() -> None:
    frame = encode(Renew(session=1, claim_ids=tuple(range(MAX_RENEWED_CLAIMS + 1))))
    assert decodes(frame) is None


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_endpoint_with_an_impossible_port_is_refused(port: int) -> None:
    assert decodes(encode(make_welcome(workers=(make_endpoint(engine_port=port),)))) is None


@pytest.mark.parametrize("port", [-1, 65536])
def test_endpoint_may_take_no_reservations_but_names_no_impossible_port(port: int) -> None:
    silent = make_welcome(workers=(make_endpoint(control_port=0),))
    assert decodes(encode(silent)) == silent
    assert decodes(encode(make_welcome(workers=(make_endpoint(control_port=port),)))) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer_id": ""},
        {"transfer_id": "t" * 513},
        {"num_tokens": -1},
        {"num_tokens": 2**31},
    ],
    ids=str,
)
def test_announcement_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    assert decodes(encode(msgspec.structs.replace(ANNOUNCE, **changes))) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer_id": ""},
        {"transfer_id": "t" * 513},
        {"cluster_id": 0},
        {"cluster_id": 2**48},
        {"spans": (BlockSpan(first=-1, count=1),)},
        {"spans": (BlockSpan(first=0, count=-1),)},
        {"spans": (BlockSpan(first=0, count=2**31),)},
        {"spans": (BlockSpan(first=2**31, count=1),)},
        {"spans": (BlockSpan(first=0, count=1),) * (MAX_GROUPS + 1)},
        {"tokens": (CacheToken(model_id=0, token=0),)},
        {"tokens": (CacheToken(model_id=0, token=2**63),)},
        {"tokens": (CacheToken(model_id=-1, token=1),)},
        {"tokens": (CacheToken(model_id=0, token=1),) * (MAX_CACHES + 1)},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_reservation_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    assert decodes(encode(msgspec.structs.replace(RESERVE, **changes))) is None


@pytest.mark.parametrize("transfer_id", ["", "t" * 513])
def test_cancel_of_an_impossible_transfer_is_refused(transfer_id: str) -> None:
    assert decodes(encode(Cancel(to_cluster=1, transfer_id=transfer_id, reservation=1))) is None


@pytest.mark.parametrize("rank", [-1, 2**16])
def test_release_of_an_impossible_rank_is_refused(rank: int) -> None:
    release = Release(session=1, claim_id=2, rank=rank, production=3, secret="s")
    assert decodes(encode(release)) is None

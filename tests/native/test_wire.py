"""Decoding: what is well formed comes back unchanged, anything else is refused."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native import wire
from vllm_llmdd_connector.datadist._engine import EngineError, testing

GOOD = {
    wire.HELLO: wire.hello(1, 2, remote=True),
    wire.WELCOME: wire.welcome(1, b"/tmp/x", remote=False),
    wire.REJECT: wire.outcome(5, b"why"),
    wire.INTRODUCE: wire.introduce(b"t" * 16, b"n" * 16, 4096),
    wire.VERDICT: wire.outcome(0),
    wire.RESOLVE: wire.ref(2, 0, 7),
    wire.RESOLVED: wire.resolved([4096, 8192]),
    wire.FINISH: wire.finish(wire.ref(0, 5), 1, 0, 4),
    wire.PUSH: wire.push(
        wire.ref(2), 64, [4096], [(0, 1, 2), (5, 6, 7)], dst_addrs=(8192, 0), token=9
    ),
    wire.FAILURE: wire.outcome(5, b"why"),
    wire.STAGE: wire.stage(b"t" * 16, b"agent"),
    wire.FETCH: wire.fetch(3, [(4096, 64), (8192, 1)]),
}
KINDS = sorted(GOOD)
OWN = testing.WIRE_VERSION


@pytest.mark.parametrize("kind", KINDS)
def test_good_message_comes_back_unchanged(kind: int) -> None:
    assert testing.recode(kind, GOOD[kind]) == GOOD[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_every_shorter_or_longer_message_is_refused(kind: int) -> None:
    good = GOOD[kind]
    for size in range(len(good)):
        with pytest.raises(EngineError):
            testing.recode(kind, good[:size])
    with pytest.raises(EngineError, match="too many"):
        testing.recode(kind, good + b"\0")


@given(kind=st.sampled_from(KINDS), payload=st.binary(max_size=200))
def test_random_bytes_are_refused_or_well_formed(kind: int, payload: bytes) -> None:
    try:
        again = testing.recode(kind, payload)
    except EngineError:
        return
    assert testing.recode(kind, again) == again


@given(kind=st.sampled_from(KINDS), data=st.data())
def test_changed_bytes_are_refused_or_well_formed(kind: int, data: st.DataObject) -> None:
    changed = bytearray(GOOD[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        again = testing.recode(kind, bytes(changed))
    except EngineError:
        return
    assert testing.recode(kind, again) == again


@pytest.mark.parametrize(
    "payload",
    [
        wire.resolved([4096], rows=0),
        wire.resolved([4096], row=16),
        wire.resolved([4096], stride=0),
        wire.resolved([4096], rows=2**40, stride=2**40),
    ],
)
def test_cache_that_cannot_exist_is_refused(payload: bytes) -> None:
    with pytest.raises(EngineError, match="cannot exist"):
        testing.recode(wire.RESOLVED, payload)


@pytest.mark.parametrize(
    "payload",
    [
        wire.fetch(0, []),
        wire.fetch(0, [(4096, 0)]),
        wire.fetch(0, [(4096, wire.SLOT_BYTES + 1)]),
        wire.fetch(0, [(4096, wire.SLOT_BYTES), (4096, 1)]),
        wire.fetch(0, [(4096, 2**64 - 1), (4096, 2)]),
    ],
)
def test_fetch_that_fits_no_slot_is_refused(payload: bytes) -> None:
    with pytest.raises(EngineError, match="slot"):
        testing.recode(wire.FETCH, payload)


@pytest.mark.parametrize(
    "payload",
    [
        wire.stage(bytes(16), b"", slots=0),
        wire.stage(bytes(16), b"", slots=2**16 + 1),
        wire.stage(bytes(16), b"", addr=2**64 - 1),
    ],
)
def test_staging_memory_that_cannot_exist_is_refused(payload: bytes) -> None:
    with pytest.raises(EngineError, match="staging memory"):
        testing.recode(wire.STAGE, payload)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (wire.HELLO, wire.hello(1, 2, remote=True, transport=9)),
        (wire.WELCOME, wire.welcome(1, b"", remote=True, transport=9)),
    ],
)
def test_unknown_transport_is_refused(kind: int, payload: bytes) -> None:
    with pytest.raises(EngineError, match="unknown transport 9"):
        testing.recode(kind, payload)


class TestHeader:
    def test_fields(self) -> None:
        data = wire.frame(wire.PUSH, b"xyz", 77)[:24]
        assert testing.decode_header(data, 100) == (wire.PUSH, 3, 77)

    def test_other_magic(self) -> None:
        with pytest.raises(EngineError, match="not from an LLM-DataDist engine"):
            testing.decode_header(wire.frame(1, magic=1), 100)

    def test_other_version_names_both(self) -> None:
        with pytest.raises(EngineError, match=f"local {OWN}, peer has {OWN + 1}"):
            testing.decode_header(wire.frame(1, version=OWN + 1), 100)

    def test_oversized_payload(self) -> None:
        with pytest.raises(EngineError, match="over the limit of 100"):
            testing.decode_header(wire.frame(1, size=101), 100)


@pytest.mark.parametrize("size", [0, 1, 31, 55, 56, 63, 64, 65, 200])
def test_hmac_is_the_standard_one(size: int) -> None:
    key, message = "k" * size, bytes(range(size))
    assert testing.hmac_sha256(key, message) == hmac.digest(key.encode(), message, "sha256")

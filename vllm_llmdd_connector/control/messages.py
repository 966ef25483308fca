"""Every message of the control plane, and the only encoder and decoder of them.

D opens both kinds of conversation, always with P's scheduler:

* D's scheduler says ``Hello``, answered by ``Welcome`` or ``Reject``; then ``Claim``, answered by
  ``Grant`` or ``Gone``, ``Renew``, answered by ``Gone`` for each claim that is over, and ``Drop``.
* Each worker rank of D says ``Release`` when it has read its blocks, answered by ``ReleaseAck``.

A message of a session that the receiver does not know (it was restarted at the same address, and
ZMQ reconnects silently) is answered by ``Unknown``. All of it is idempotent: a claim, a release and
a drop may arrive any number of times.

Version history of the wire: 1, the first.
"""

from typing import Annotated

import msgspec

from vllm_llmdd_connector.control.fingerprint import Fingerprint
from vllm_llmdd_connector.errors import RemoteProtocolError

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 4 << 20
MAX_RENEWED_CLAIMS = 1024

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; the tag on the wire is the class name."""


class WorkerEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engine of one worker rank of P can be reached."""

    cluster_id: Annotated[int, msgspec.Meta(gt=0, lt=1 << 48)]
    """LLM-DataDist cluster of the rank."""
    host: str
    engine_port: Port
    """What ``link_clusters`` dials."""


class Hello(Message, frozen=True, kw_only=True):
    version: int
    fingerprint: msgspec.Raw
    """Read by ``read_fingerprint`` only after the versions agreed: other versions may differ in
    it."""


class Welcome(Message, frozen=True, kw_only=True):
    session: int
    instance: str
    """P's process start; a ticket of another instance is void."""
    workers: tuple[WorkerEndpoint, ...]
    """By tensor parallel rank."""
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    """How long P holds blocks without a sign of life; D renews several times in this span."""


class Reject(Message, frozen=True, kw_only=True):
    reason: str
    """One sentence with the field and both values."""


class Unknown(Message, frozen=True, kw_only=True):
    session: int


class Claim(Message, frozen=True, kw_only=True):
    session: int
    claim_id: int
    """Drawn by D for one request; names it in everything that follows."""
    production: int
    secret: str
    prompt_hash: str


class Grant(Message, frozen=True, kw_only=True):
    claim_id: int
    block_ids: tuple[tuple[int, ...], ...]
    """P's blocks of the prompt per KV cache group, from position 0; 0 where P dropped a block."""


class Gone(Message, frozen=True, kw_only=True):
    claim_id: int
    reason: str


class Renew(Message, frozen=True, kw_only=True):
    session: int
    claim_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_RENEWED_CLAIMS)]


class Drop(Message, frozen=True, kw_only=True):
    """D needs nothing (more) of this claim: a full local hit, an abort, a local prefill, a
    failure."""

    session: int
    claim_id: int
    production: int
    secret: str


class Release(Message, frozen=True, kw_only=True):
    """One rank of D has read the blocks and asks whether P held them until now."""

    session: int
    claim_id: int
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    """Tensor parallel rank of the reader; a claim is over when all ranks have released it."""
    production: int
    secret: str


class ReleaseAck(Message, frozen=True, kw_only=True):
    claim_id: int
    production: int
    valid: bool
    """Whether the blocks were still held, and so during the whole read."""


AnyMessage = (
    Hello | Welcome | Reject | Unknown | Claim | Grant | Gone | Renew | Drop | Release | ReleaseAck
)


def raw_fingerprint(fingerprint: Fingerprint) -> msgspec.Raw:
    """``fingerprint`` as ``Hello`` carries it."""
    return msgspec.Raw(_encoder.encode(fingerprint))


def read_fingerprint(raw: msgspec.Raw) -> Fingerprint:
    """The fingerprint inside a ``Hello`` of our protocol version.

    Raises:
        RemoteProtocolError: it is malformed.
    """
    try:
        return msgspec.msgpack.decode(raw, type=Fingerprint)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"fingerprint cannot be read: {error}") from None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """The bytes of one message, one ZMQ frame."""
    return _encoder.encode(message)


def decode(frame: bytes) -> AnyMessage:
    """The message in one ZMQ frame.

    Raises:
        RemoteProtocolError: too large, not msgpack, an unknown message or a field of a wrong type.
    """
    if len(frame) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(
            f"control message has {len(frame)} bytes, at most {MAX_MESSAGE_BYTES} are read"
        )
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"control message cannot be read: {error}") from None

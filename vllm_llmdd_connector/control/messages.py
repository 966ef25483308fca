"""Every message of the control plane, and the only encoder and decoder of them.

D opens every conversation, except that a P to which a metaserver has sent a D's prompt first says
``Knock`` to D's scheduler, which has no answer. With P's scheduler:

* D's scheduler says ``Hello``, answered by ``Welcome`` or ``Reject``. For a finished prefill it
  then says ``Claim``, answered by ``Grant`` or ``Gone``. For one that still has to be computed it
  says ``Announce``, answered by ``Queued`` and ``Admitted``, or by ``Grant`` when P was faster, or
  by ``Gone``; and ``Announce`` again once it has blocks. ``Renew`` is answered by ``Gone`` for each
  claim that is over. ``Drop`` has no answer.
* Each worker rank of D says ``Release`` when it has its blocks, answered by ``ReleaseAck``.

With P's worker of the same rank, for a push: D's worker says ``Reserve``, answered by ``Done``,
``Void`` or ``Failed``, and ``Cancel`` or ``CancelAll``, answered by ``CancelAck``. With option
``integrity`` it also says ``AskSums`` after a pull, answered by ``Sums`` or ``NoSums``.

A message of a session that the receiver does not know (it was restarted at the same address, and
ZMQ reconnects silently) is answered by ``Unknown``. All of it is idempotent: every message may
arrive any number of times.

Version history of the wire: 1, the first.
"""

from typing import Annotated

import msgspec

from vllm_llmdd_connector.control.fingerprint import Fingerprint
from vllm_llmdd_connector.errors import RemoteProtocolError

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 4 << 20
"""What a dialling side reads: ``Grant`` names every block of a prompt."""
MAX_REQUEST_BYTES = 1 << 20
"""What a listening side reads. ZeroMQ may hold a thousand messages of a connection in memory."""
MAX_RENEWED_CLAIMS = 1024

MAX_GROUPS = 256
MAX_CACHES = 4096

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Reason = Annotated[str, msgspec.Meta(max_length=4096)]
"""A sentence for the other side's log."""
NOT_HELD = "the prefill server no longer holds these blocks (released or expired)"
"""The reason for whoever asks for a lease that has ended."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; the tag on the wire is the class name."""


class WorkerEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engine of one worker rank of P can be reached."""

    cluster_id: Annotated[int, msgspec.Meta(gt=0, lt=1 << 48)]
    """LLM-DataDist cluster of the rank."""
    host: str
    engine_port: Port
    """What ``link_clusters`` dials."""
    control_port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    """Where the rank takes ``Reserve``; 0 when it takes none."""
    link_secret: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """What a link to the rank's engine over NIXL must prove to know."""


class Hello(Message, frozen=True, kw_only=True):
    version: int
    fingerprint: msgspec.Raw
    """Read by ``read_fingerprint`` only after the versions agreed: other versions may differ in
    it."""
    sent_s: float = 0.0
    """D's monotonic clock; the answer returns it."""


class Welcome(Message, frozen=True, kw_only=True):
    session: int
    instance: str
    """P's process start; a ticket of another instance is void."""
    workers: tuple[WorkerEndpoint, ...]
    """By tensor parallel rank."""
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    """How long P holds blocks without a sign of life; D renews several times in this span."""
    hello_sent_s: float | None = None
    """``Hello.sent_s``: with several on the way, the one that this answers."""
    clock_s: float | None = None
    """P's monotonic clock. With ``hello_sent_s`` it tells D how far the clocks are apart, which
    only traces need."""


class Reject(Message, frozen=True, kw_only=True):
    reason: Reason
    """One sentence with the field and both values."""


class Unknown(Message, frozen=True, kw_only=True):
    session: int


class Knock(Message, frozen=True, kw_only=True):
    """P has the prompt that D asked a metaserver to have prefilled; D is to announce it there."""

    transfer_id: Text
    """Drawn by D, so only those know it that its post has reached."""
    host: Text
    """P's control address; D checks it as one that a request names."""
    port: Port


class Claim(Message, frozen=True, kw_only=True):
    session: int
    claim_id: int
    """Drawn by D for one request; names it in everything that follows."""
    production: int
    secret: str
    prompt_hash: str


class Announce(Message, frozen=True, kw_only=True):
    """D has, or will have, a request for a prompt that P is to prefill under this transfer id."""

    session: int
    claim_id: int
    transfer_id: Text
    """Drawn by the proxy for both legs; only they know it, so it is the secret too."""
    num_tokens: Count
    prompt_hash: str
    takes_push: bool
    """Whether D can reserve blocks for a push; else it waits for ``Grant``."""
    has_blocks: bool
    """D's scheduler has allocated the blocks: whatever P computes now can leave at once."""


class Queued(Message, frozen=True, kw_only=True):
    """P has the request; it waits for its turn there."""

    claim_id: int


class Admitted(Message, frozen=True, kw_only=True):
    """P is about to compute the prompt: D is to allocate blocks and to reserve them."""

    claim_id: int


class Grant(Message, frozen=True, kw_only=True):
    claim_id: int
    production: int
    secret: str
    block_ids: tuple[tuple[Count, ...], ...]
    """P's blocks of the prompt per KV cache group, from position 0; 0 where P dropped a block."""


class Gone(Message, frozen=True, kw_only=True):
    claim_id: int
    reason: Reason


class Renew(Message, frozen=True, kw_only=True):
    session: int
    claim_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_RENEWED_CLAIMS)]


class Drop(Message, frozen=True, kw_only=True):
    """D needs nothing (more) of this claim: a full local hit, an abort, a local prefill, a
    failure."""

    session: int
    claim_id: int
    production: int
    """0, with a transfer id as the secret: whichever there is of that transfer."""
    secret: str


class Release(Message, frozen=True, kw_only=True):
    """One rank of D has its blocks and asks whether P held its own until now."""

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


class CacheToken(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's reservation of one cache of D."""

    model_id: Count
    token: Annotated[int, msgspec.Meta(gt=0, le=(1 << 63) - 1)]


class BlockSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one KV cache group that D wants, by their positions in the prompt."""

    first: Count
    count: Count


class Reserve(Message, frozen=True, kw_only=True):
    """One rank of D has reserved blocks and asks for their content, layer by layer."""

    to_cluster: int
    """P's rank. Another one at the same address has nothing of it."""
    cluster_id: Annotated[int, msgspec.Meta(gt=0, lt=1 << 48)]
    """D's rank, which has linked P's."""
    transfer_id: Text
    reservation: int
    """Drawn by D for this attempt."""
    spans: Annotated[tuple[BlockSpan, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    """By KV cache group."""
    tokens: Annotated[tuple[CacheToken, ...], msgspec.Meta(max_length=MAX_CACHES)] = ()
    """Where D's engine has reservations."""
    blocks: Annotated[tuple[tuple[Count, ...], ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    """Where it has none: D's own blocks by KV cache group, one for each position of its span."""
    link_number: int
    """Of the link that it is for; D counts upwards."""


class Cancel(Message, frozen=True, kw_only=True):
    """Nothing more of a reservation is wanted."""

    to_cluster: int
    transfer_id: Text
    reservation: int


class CancelAll(Message, frozen=True, kw_only=True):
    """Nothing more is wanted of all that this rank of D has reserved for earlier links, also where
    it arrives later: on another connection that is gone by now."""

    to_cluster: int
    cluster_id: Annotated[int, msgspec.Meta(gt=0, lt=1 << 48)]
    link_number: int
    """Of the link that D is about to make."""


class CancelAck(Message, frozen=True, kw_only=True):
    """P writes nothing of it, and will not.

    Where D's engine has reservations, D is safe without it and does not wait for it.
    """

    transfer_id: str = ""
    reservation: int = 0
    """0: of ``CancelAll``."""


class GroupSums(msgspec.Struct, frozen=True, kw_only=True):
    """Checksums of one KV cache group's span."""

    count: Count
    """Of how many blocks of the span they are, or are a sample: all, or all but a last one that is
    not full and to which P still writes."""
    sums: bytes
    """8 bytes each, little-endian, by position; see ``worker/checksum.py``."""


class Done(Message, frozen=True, kw_only=True):
    """D has copied every layer of every block, and P held them all the time."""

    transfer_id: str
    reservation: int
    production: int
    sums: Annotated[tuple[GroupSums, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
    """By KV cache group, with option ``integrity``: of the blocks chosen by ``reservation``."""


class Void(Message, frozen=True, kw_only=True):
    """P has lost what it had computed and computes the prompt anew: D is to reserve again.

    Where D's engine has no reservations, P writes nothing of this one any more, as after
    ``CancelAck``.
    """

    transfer_id: str
    reservation: int


class Failed(Message, frozen=True, kw_only=True):
    """The blocks will not come. As after ``Void``, P writes nothing of them any more."""

    transfer_id: str
    reservation: int
    reason: Reason
    link_lost: bool = False
    """A call over the link has failed: D is to drop the link, and to make it anew."""


class AskSums(Message, frozen=True, kw_only=True):
    """One rank of D has pulled blocks of a lease, which it has not released, and asks what their
    checksums are at P."""

    to_cluster: int
    """P's rank. Another one at the same address has nothing of it."""
    production: int
    secret: str
    number: int
    """Drawn by D: names the answer, and chooses the blocks of a sample."""
    spans: Annotated[tuple[BlockSpan, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    """By KV cache group."""


class Sums(Message, frozen=True, kw_only=True):
    """Says nothing about whether the lease lived; ``ReleaseAck`` does."""

    number: int
    groups: Annotated[tuple[GroupSums, ...], msgspec.Meta(max_length=MAX_GROUPS)]


class NoSums(Message, frozen=True, kw_only=True):
    """There are none to be had."""

    number: int
    reason: Reason


AnyMessage = (
    Hello
    | Welcome
    | Reject
    | Unknown
    | Knock
    | Claim
    | Announce
    | Queued
    | Admitted
    | Grant
    | Gone
    | Renew
    | Drop
    | Release
    | ReleaseAck
    | Reserve
    | Cancel
    | CancelAll
    | CancelAck
    | Done
    | Void
    | Failed
    | AskSums
    | Sums
    | NoSums
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

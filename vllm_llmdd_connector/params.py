"""``kv_transfer_params``: the only place that knows the proxies' keys.

A request's params are written by whoever can reach the API server, so every field is checked here
and nothing is believed before P's own answer on the control channel. Unknown keys are ignored and
nulls are tolerated, because proxies send both.

Three flows are understood. In the sequential one the prefill leg asks with ``do_remote_decode`` and
its response carries six keys that proxies know, plus ``llmdd`` for our own fields; the proxy hands
all of it to the decode leg unchanged. In the concurrent one the proxy sends both legs at once, with
one ``transfer_id`` in both and P's control address in the decode leg. In the decode-first one the
decode leg names a ``metaserver``; D posts there the params of the prefill leg, with its own control
address and a transfer id that it draws.
"""

import hashlib
import re
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_llmdd_connector.errors import RemoteProtocolError

if TYPE_CHECKING:
    from vllm.v1.request import Request

PARAMS_VERSION = 1
MAX_TEXT = 512


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What D needs to claim a finished prefill at P."""

    host: str
    """P's control address, an IPv4 literal; untrusted until it passed the allow-list."""
    port: int
    instance: str
    """P's process start; another one at the same address never had these blocks."""
    transfer_id: str
    """P's request id."""
    production: int
    """P's number for this finished prompt."""
    secret: str
    """Proof that the bearer was given P's answer."""
    num_tokens: int
    """Prompt length in tokens whose KV P holds."""
    prompt_hash: str
    """See ``prompt_hash``."""

    @property
    def address(self) -> tuple[str, int]:
        return (self.host, self.port)


class Appointment(msgspec.Struct, frozen=True, kw_only=True):
    """What D needs to be sent a prefill that P has still to compute."""

    host: str
    """P's control address, an IPv4 literal; untrusted until it passed the allow-list."""
    port: int
    """0, with no host, while it is not known which P it will be."""
    transfer_id: str
    num_tokens: int
    """Length of D's own prompt in tokens, which P's has to equal."""
    prompt_hash: str
    """Of D's own prompt; see ``prompt_hash``."""

    @property
    def address(self) -> tuple[str, int]:
        return (self.host, self.port)

    @property
    def production(self) -> int:
        """0: whichever P has of this transfer."""
        return 0

    @property
    def secret(self) -> str:
        return self.transfer_id


AnyTicket = Ticket | Appointment


def wants_remote_decode(params: dict[str, Any] | None) -> bool:
    """Whether a request is the prefill leg: its KV will be fetched by a D."""
    return isinstance(params, dict) and params.get("do_remote_decode") is True


def wants_remote_prefill(params: dict[str, Any] | None) -> bool:
    """Whether a request is the decode leg of a prompt that a P has prefilled."""
    return isinstance(params, dict) and params.get("do_remote_prefill") is True


def response_params(
    ticket: Ticket, engine_id: str, block_ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The params that P's response carries: the six common keys and our own under ``llmdd``."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(ids) for ids in block_ids],
        "remote_engine_id": engine_id,
        "remote_host": ticket.host,
        "remote_port": ticket.port,
        "llmdd": {
            "v": PARAMS_VERSION,
            "instance": ticket.instance,
            "transfer_id": ticket.transfer_id,
            "production": ticket.production,
            "secret": ticket.secret,
            "num_tokens": ticket.num_tokens,
            "prompt_hash": ticket.prompt_hash,
        },
    }


def read_ticket(params: dict[str, Any]) -> Ticket:
    """Check the decode leg's params.

    Raises:
        RemoteProtocolError: a field is missing or malformed; the message names it.
    """
    inner = params.get("llmdd")
    if not isinstance(inner, dict):
        raise RemoteProtocolError(
            "kv_transfer_params has no 'llmdd' object; hand on the prefill server's unchanged"
        )
    version = _integer(inner, "v", 1, 2**31)
    if version != PARAMS_VERSION:
        raise RemoteProtocolError(
            f"kv_transfer_params.llmdd.v is {version}, this server speaks {PARAMS_VERSION}; "
            "run one version of the connector on both sides"
        )
    return Ticket(
        host=_text(params, "remote_host"),
        port=_integer(params, "remote_port", 1, 65535),
        instance=_text(inner, "instance"),
        transfer_id=_text(inner, "transfer_id"),
        production=_integer(inner, "production", 1, 2**53),
        secret=_text(inner, "secret"),
        num_tokens=_integer(inner, "num_tokens", 1, 2**31),
        prompt_hash=_text(inner, "prompt_hash"),
    )


def transfer_id_of(params: dict[str, Any]) -> str | None:
    """The transfer id of a leg of the concurrent flow; None in the sequential one.

    Raises:
        RemoteProtocolError: there is one that cannot be used.
    """
    return None if params.get("transfer_id") is None else _text(params, "transfer_id")


def read_appointment(
    params: dict[str, Any], transfer_id: str, num_tokens: int, prompt_id: str
) -> Appointment:
    """Check the decode leg's params of the concurrent flow.

    Raises:
        RemoteProtocolError: a field is missing or malformed; the message names it.
    """
    return Appointment(
        host=_text(params, "remote_host"),
        port=_integer(params, "remote_port", 1, 65535),
        transfer_id=transfer_id,
        num_tokens=num_tokens,
        prompt_hash=prompt_id,
    )


def metaserver_of(params: dict[str, Any]) -> str | None:
    """Where D is to ask for its prefill; None in the flows that name the P or the transfer.

    Raises:
        RemoteProtocolError: there is one that cannot be used.
    """
    if params.get("metaserver") is None or isinstance(params.get("llmdd"), dict):
        return None
    return _text(params, "metaserver")


def metaserver_post(
    request_id: str,
    transfer_id: str,
    engine_id: str,
    address: tuple[str, int],
    block_sizes: Sequence[int],
    num_ranks: int,
) -> dict[str, Any]:
    """What D posts: the prefill leg's params, in the keys that layer-wise proxies know.

    No blocks: P is told of them by ``Reserve``, and this is sent before vLLM has allocated any.
    """
    return {
        "token_ids": [],
        "request_id": external_id(request_id),
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[] for _ in block_sizes],
        "remote_block_size": list(block_sizes),
        "remote_engine_id": engine_id,
        "remote_host": address[0],
        "remote_port": address[1],
        "remote_tp_size": num_ranks,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_cached_tokens": 0,
        "transfer_id": transfer_id,
        "llmdd": {"v": PARAMS_VERSION},
    }


def caller_of(params: dict[str, Any]) -> tuple[str, int] | None:
    """The control address of the D whose post the prefill leg is made of; None in other flows.

    Raises:
        RemoteProtocolError: there is one that cannot be used.
    """
    if params.get("remote_host") is None or params.get("transfer_id") is None:
        return None
    return _text(params, "remote_host"), _integer(params, "remote_port", 1, 65535)


def child_params(params: dict[str, Any], request_id: str) -> dict[str, Any]:
    """The params of one prompt of a prefill leg with several, each of which a D request posted.

    The ids are D's; P's equal them where the proxy hands on its request id, and end in the same
    number of the prompt where it does not.

    Raises:
        RemoteProtocolError: none is for this request.
    """
    children = params.get("batch_kv_transfer_params")
    if children is None:
        return params
    own = external_id(request_id)
    if isinstance(children, dict):
        number = own.rpartition("-")[2]
        numbered = [key for key in children if str(key).rpartition("-")[2] == number]
        key = own if own in children else numbered[0] if len(numbered) == 1 else None
        if key is not None and isinstance(children[key], dict):
            return dict(children[key])
    raise RemoteProtocolError(
        f"batch_kv_transfer_params has no object for {_shown(own)}: no D has asked for this prompt"
    )


def external_id(request_id: str) -> str:
    """The id that the API gave; vLLM's engine appends 8 random hex digits to it."""
    return _RANDOM_SUFFIX.sub("", request_id)


def is_child(request_id: str) -> bool:
    """Whether it is one of several choices (n > 1), which vLLM names <number>_<parent>."""
    return _CHILD_PREFIX.match(request_id) is not None


_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
_CHILD_PREFIX = re.compile(r"[0-9]+_")


def _text(fields: dict[str, Any], key: str) -> str:
    value = fields.get(key)
    # Printable: neither a surrogate, which no message can carry, nor a line end for our log.
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
        raise RemoteProtocolError(
            f"kv_transfer_params field {key!r} is {_shown(value)}, "
            f"expected text of 1 to {MAX_TEXT} printable characters"
        )
    return value


def _integer(fields: dict[str, Any], key: str, low: int, high: int) -> int:
    """An integer in [low, high]; routers may have made it a float or a digit string."""
    value = fields.get(key)
    is_whole = isinstance(value, float) and value.is_integer()
    is_digits = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20
    if is_whole or is_digits:
        value = int(value)  # type: ignore[arg-type]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RemoteProtocolError(
            f"kv_transfer_params field {key!r} is {_shown(value)}, "
            f"expected an integer in [{low}, {high}]"
        )
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def prompt_hash(
    token_ids: Sequence[int], lora_name: str | None, media_hashes: Sequence[str]
) -> str:
    """Identity of what a prompt's KV depends on beside the model: tokens, adapter, media; 32 hex
    digits."""
    hasher = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16)
    for part in (lora_name or "", *media_hashes):
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(4, "little"))
        hasher.update(encoded)
    return hasher.hexdigest()


def request_prompt_hash(request: "Request") -> str | None:
    """``prompt_hash`` of a vLLM request; None for a prompt of embeddings, which has no identity
    here."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return None
    lora = request.lora_request
    media = [_media_identity(feature) for feature in request.mm_features or ()]
    return prompt_hash(request.prompt_token_ids, lora.lora_name if lora else None, media)


def _media_identity(feature: Any) -> str:
    position = feature.mm_position
    return f"{feature.modality}:{feature.identifier}:{position.offset}:{position.length}"

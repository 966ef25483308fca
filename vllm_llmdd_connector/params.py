"""``kv_transfer_params``: the only place that knows the proxies' keys.

A request's params are written by whoever can reach the API server, so every field is checked here
and nothing is believed before P's own answer on the control channel. Unknown keys are ignored and
nulls are tolerated, because proxies send both.

Two flows are understood. In the sequential one the prefill leg asks with ``do_remote_decode`` and
its response carries six keys that proxies know, plus ``llmdd`` for our own fields; the proxy hands
all of it to the decode leg unchanged. In the concurrent one the proxy sends both legs at once, with
one ``transfer_id`` in both and P's control address in the decode leg.
"""

import hashlib
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
    """P's control address, an IP literal; untrusted until it passed the allow-list."""
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
    """P's control address, an IP literal; untrusted until it passed the allow-list."""
    port: int
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

"""What D's request brings of its prefill, read and checked against the request itself."""

from typing import TYPE_CHECKING, Any

from vllm_llmdd_connector.config import is_allowed_peer
from vllm_llmdd_connector.control.metaserver import check_metaserver
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.ids import new_transfer_id
from vllm_llmdd_connector.params import (
    AnyTicket,
    Appointment,
    is_child,
    metaserver_of,
    read_appointment,
    read_ticket,
    request_prompt_hash,
    transfer_id_of,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request


def ticket_of(params: dict[str, Any], request: "Request") -> AnyTicket:
    """The sequential flow's ticket, or an appointment: the concurrent flow's, whose P is named, or
    the decode-first flow's, whose P is not known yet.

    Raises:
        RemoteProtocolError: there is none that can be used.
    """
    if metaserver_of(params) is not None:
        return _open_appointment(request)
    transfer_id = transfer_id_of(params)
    if transfer_id is None or isinstance(params.get("llmdd"), dict):
        return read_ticket(params)
    return read_appointment(params, transfer_id, request.num_prompt_tokens, _prompt_id(request))


def check_ticket(ticket: AnyTicket, request: "Request", allowed_peers: tuple[str, ...]) -> None:
    """Refuse a ticket that is not for this prompt, or whose host may not be dialled.

    Raises:
        RemoteProtocolError: so it is.
    """
    if ticket.port and not is_allowed_peer(ticket.host, allowed_peers):
        raise RemoteProtocolError(
            f"kv_transfer_params names the prefill server {ticket.host}, which is not in "
            f"allowed_peers {list(allowed_peers)}; add it there if it is yours"
        )
    if ticket.num_tokens != request.num_prompt_tokens:
        raise RemoteProtocolError(
            f"the prompt has {request.num_prompt_tokens} tokens here, {ticket.num_tokens} at "
            "the prefill server (one of several prompts or choices of a request?)"
        )
    if ticket.prompt_hash != request_prompt_hash(request):
        raise RemoteProtocolError(
            "the prompt differs from the one that was prefilled "
            "(one of several prompts or choices of a request?)"
        )


def checked_metaserver(
    params: dict[str, Any], request: "Request", allowed_peers: tuple[str, ...]
) -> str | None:
    """The URL to ask for a prefill, None in the other flows.

    Raises:
        RemoteProtocolError: it may not be asked, or not for this request.
    """
    url = metaserver_of(params)
    if url is None:
        return None
    if is_child(request.request_id):
        raise RemoteProtocolError(
            "one of several choices (n > 1); a metaserver knows only the request itself"
        )
    check_metaserver(url, allowed_peers)
    return url


def _open_appointment(request: "Request") -> Appointment:
    return Appointment(
        host="",
        port=0,
        transfer_id=new_transfer_id(),
        num_tokens=request.num_prompt_tokens,
        prompt_hash=_prompt_id(request),
    )


def _prompt_id(request: "Request") -> str:
    prompt_id = request_prompt_hash(request)
    if prompt_id is None:
        raise RemoteProtocolError("a prompt of embeddings cannot be prefilled elsewhere")
    return prompt_id

"""The states of D's requests that came with a ticket.

One that names a metaserver begins as ``SUMMONING``: the P that will prefill it gets in touch.
Others name their P and begin as ``CLAIMING``.
"""

from enum import Enum

from vllm_llmdd_connector.states import Transitions


class RequestState(Enum):
    SUMMONING = "summoning"
    CLAIMING = "claiming"
    MATCHED = "matched"
    RECEIVING = "receiving"
    READY = "ready"
    FAILED = "failed"
    LOCAL = "local"


class RequestEvent(Enum):
    KNOCKED = "a P knocked"
    OFFERED = "P granted, or is about to compute it"
    ALLOCATED = "vLLM allocated blocks for it"
    NOT_NEEDED = "vLLM allocated blocks, none for remote tokens"
    REFUSED = "refused, lost, or too late"
    RECEIVED = "all ranks have reported it"
    RANK_FAILED = "a rank failed"


REQUEST: Transitions[RequestState, RequestEvent] = {
    RequestState.SUMMONING: {
        RequestEvent.KNOCKED: RequestState.CLAIMING,
        RequestEvent.REFUSED: RequestState.LOCAL,
        RequestEvent.NOT_NEEDED: RequestState.LOCAL,
    },
    RequestState.CLAIMING: {
        RequestEvent.OFFERED: RequestState.MATCHED,
        RequestEvent.REFUSED: RequestState.LOCAL,
        RequestEvent.NOT_NEEDED: RequestState.LOCAL,
    },
    RequestState.MATCHED: {
        RequestEvent.ALLOCATED: RequestState.RECEIVING,
        RequestEvent.REFUSED: RequestState.LOCAL,
        RequestEvent.NOT_NEEDED: RequestState.LOCAL,
    },
    RequestState.RECEIVING: {
        RequestEvent.RECEIVED: RequestState.READY,
        RequestEvent.RANK_FAILED: RequestState.FAILED,
    },
}

"""The states of D's session with one P address."""

from enum import Enum

from vllm_llmdd_connector.states import Transitions


class SessionState(Enum):
    OPENING = "opening"
    READY = "ready"
    REJECTED = "rejected"
    CLOSED = "closed"


class SessionEvent(Enum):
    WELCOMED = "`Welcome`"
    REFUSED = "`Reject`, or a `Welcome` that does not fit"
    FORSAKEN = "nobody waits for its answer any more"
    RESTARTED = "`Unknown`, or `Welcome` of another process: P was restarted"
    LOST = "the connection is refused or lost"


SESSION: Transitions[SessionState, SessionEvent] = {
    SessionState.OPENING: {
        SessionEvent.WELCOMED: SessionState.READY,
        SessionEvent.REFUSED: SessionState.REJECTED,
        SessionEvent.FORSAKEN: SessionState.CLOSED,
        SessionEvent.LOST: SessionState.CLOSED,
    },
    SessionState.READY: {
        SessionEvent.RESTARTED: SessionState.OPENING,
        SessionEvent.LOST: SessionState.CLOSED,
    },
}

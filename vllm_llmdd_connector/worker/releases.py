"""D's worker: tells P that blocks are not needed any more, and learns whether P held them.

A pull counts only when P confirms. A push was confirmed by ``Done``; its release only lets P use
the blocks again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from vllm_llmdd_connector.control.channel import Dialer
from vllm_llmdd_connector.control.messages import Release, ReleaseAck
from vllm_llmdd_connector.deadlines import RESEND_S


class Answer(Enum):
    """What P says of the blocks that were read."""

    HELD = "held"
    GIVEN_UP = "given up"
    RESTARTED = "restarted"
    """P does not know the session: another process has taken its address."""
    NONE = "none"
    """Nothing, in time."""


@dataclass(slots=True)
class PendingRelease:
    """One release without an answer so far."""

    message: Release
    deadline_s: float
    on_answer: Callable[[Answer], None]
    sent_s: float = 0.0


class Releases:
    """All unanswered releases of one peer thread."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingRelease] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, release: PendingRelease, dialer: Dialer, now_s: float) -> None:
        self._pending[release.message.claim_id] = release
        self._send(release, dialer, now_s)

    def on_ack(self, ack: ReleaseAck) -> None:
        release = self._pending.get(ack.claim_id)
        if release is not None and release.message.production == ack.production:
            del self._pending[ack.claim_id]
            release.on_answer(Answer.HELD if ack.valid else Answer.GIVEN_UP)

    def end_session(self, session: int) -> None:
        """P does not know this session any more: it was restarted."""
        for claim_id, release in list(self._pending.items()):
            if release.message.session == session:
                del self._pending[claim_id]
                release.on_answer(Answer.RESTARTED)

    def check(self, dialer: Dialer, now_s: float) -> None:
        """Repeat what may have been lost; give up what is too late."""
        for claim_id, release in list(self._pending.items()):
            if now_s >= release.deadline_s:
                del self._pending[claim_id]
                release.on_answer(Answer.NONE)
            elif now_s - release.sent_s >= RESEND_S:
                self._send(release, dialer, now_s)

    def next_event_s(self) -> float:
        """When ``check`` has something to do."""
        return min(
            (min(r.deadline_s, r.sent_s + RESEND_S) for r in self._pending.values()),
            default=math.inf,
        )

    @staticmethod
    def _send(release: PendingRelease, dialer: Dialer, now_s: float) -> None:
        release.sent_s = now_s
        dialer.send([release.message])

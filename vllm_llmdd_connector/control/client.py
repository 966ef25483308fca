"""D's scheduler side of the control plane: one thread that owns all sessions with P engines.

The scheduling thread only posts claims and drops and collects outcomes; it never waits here.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from vllm_llmdd_connector.control.channel import Dialer, Sleeper, new_context
from vllm_llmdd_connector.control.fingerprint import Fingerprint
from vllm_llmdd_connector.control.keys import KeySet
from vllm_llmdd_connector.control.messages import Welcome
from vllm_llmdd_connector.control.session import (
    ClientSession,
    Outcome,
    Reaction,
    Refused,
)
from vllm_llmdd_connector.control.session_state import SessionState
from vllm_llmdd_connector.deadlines import DROP_LINGER_S, Deadlines
from vllm_llmdd_connector.errors import LinkError
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.params import AnyTicket
from vllm_llmdd_connector.trace.recorder import NO_TRACE, Trace

logger = get_logger(__name__)

_MAX_REPORTED = 1024
_Command = Callable[[float], None]


class ControlClient:
    """Sessions by P address, opened on first use and dropped when they end."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        clock: Callable[[], float],
        count_junk: Callable[[int], None],
        takes_push: bool,
        deadlines: Deadlines,
        keys: KeySet | None = None,
        trace: Trace = NO_TRACE,
    ) -> None:
        self._trace = trace
        self._deadlines = deadlines
        self._keys = keys
        self._fingerprint = fingerprint
        self._takes_push = takes_push
        self._clock = clock
        self._count_junk = count_junk
        self._sessions: dict[tuple[str, int], tuple[ClientSession, Dialer]] = {}
        self._commands: deque[_Command] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._sleeper = Sleeper()
        self._reported: set[tuple[tuple[str, int], str]] = set()
        self._stopping = False
        self._context = new_context()
        self._thread = threading.Thread(target=self._run, name="llmdd-control", daemon=True)
        self._thread.start()

    def claim(self, claim_id: int, ticket: AnyTicket, deadline_s: float) -> None:
        """Ask P for the ticket's blocks; an outcome follows."""
        self._post(lambda now_s: self._do_claim(claim_id, ticket, deadline_s, now_s))

    def has_blocks(self, claim_id: int, ticket: AnyTicket) -> None:
        """Tell P that an announced request has its blocks here."""
        self._post(lambda now_s: self._do_has_blocks(claim_id, ticket, now_s))

    def drop(self, claim_id: int, ticket: AnyTicket, deadline_s: float) -> None:
        """Tell P that nothing (more) is needed of a claim."""
        self._post(lambda now_s: self._do_drop(claim_id, ticket, deadline_s, now_s))

    def finish(self, claim_id: int, ticket: AnyTicket) -> None:
        """Stop renewing a claim that all ranks have released."""
        self._post(lambda now_s: self._do_finish(claim_id, ticket))

    def take_outcomes(self) -> list[Outcome]:
        """The outcomes since the last call; does not wait."""
        taken: list[Outcome] = []
        while self._outcomes:
            taken.append(self._outcomes.popleft())
        return taken

    def close(self) -> None:
        """Stop the thread and close all connections; idempotent.

        What was asked before is still sent: a P that hears of drops frees its blocks at once.
        """
        if self._stopping:
            return
        self._stopping = True
        self._sleeper.wake()
        self._thread.join()
        for _, dialer in self._sessions.values():
            dialer.close(DROP_LINGER_S)
        self._context.term()
        self._sleeper.close()

    def _post(self, command: _Command) -> None:
        if not self._stopping:
            self._commands.append(command)
            self._sleeper.wake()

    def _run(self) -> None:
        while not self._stopping:
            self._wait()
            now_s = self._clock()
            self._obey(now_s)
            for session, dialer in list(self._sessions.values()):
                self._guarded(partial(self._serve, session, dialer), now_s)
        self._obey(self._clock())

    def _obey(self, now_s: float) -> None:
        while self._commands:
            self._guarded(self._commands.popleft(), now_s)

    def _guarded(self, action: _Command, now_s: float) -> None:
        """What nobody foresaw ends neither this thread nor other sessions; claims have
        deadlines."""
        try:
            action(now_s)
        except Exception:
            logger.exception("control thread: internal error, going on")

    def _wait(self) -> None:
        events_s = [session.next_event_s() for session, _ in self._sessions.values()]
        due_s = min((event_s for event_s in events_s if event_s is not None), default=None)
        timeout_ms = None
        if due_s is not None:
            timeout_ms = max(0, int((due_s - self._clock()) * 1000) + 1)
        self._sleeper.sleep(timeout_ms)

    def _serve(self, session: ClientSession, dialer: Dialer, now_s: float) -> None:
        messages, num_junk = dialer.receive()
        if num_junk:
            self._count_junk(num_junk)
        if messages:
            # They may have come after the poll: a clock read before that would make the round
            # trip shorter than it was.
            now_s = self._clock()
        for message in messages:
            self._react(session, dialer, session.on_message(message, now_s))
            if isinstance(message, Welcome):
                self._record_clock(session)
        if session.is_over:
            return
        if dialer.was_lost():
            self._react(session, dialer, session.on_lost(dialer.loss))
        else:
            self._react(session, dialer, session.tick(now_s))

    def _record_clock(self, session: ClientSession) -> None:
        offset = session.clock_offset
        if offset is not None:
            self._trace.event(
                "clock",
                instance=session.instance,
                address=list(session.address),
                offset_s=offset.offset_s,
                error_s=offset.error_s,
            )

    def _do_claim(self, claim_id: int, ticket: AnyTicket, deadline_s: float, now_s: float) -> None:
        try:
            session, dialer = self._open(ticket.address)
        except LinkError as error:
            self._outcomes.append(Refused(claim_id, "connection", str(error)))
            return
        self._react(session, dialer, session.claim(claim_id, ticket, deadline_s, now_s))

    def _do_drop(self, claim_id: int, ticket: AnyTicket, deadline_s: float, now_s: float) -> None:
        try:
            session, dialer = self._open(ticket.address)
        except LinkError as error:
            logger.debug("claim %x: P is not told that it is dropped: %s", claim_id, error)
            return
        self._react(session, dialer, session.drop(claim_id, ticket, deadline_s, now_s))

    def _do_has_blocks(self, claim_id: int, ticket: AnyTicket, now_s: float) -> None:
        known = self._sessions.get(ticket.address)
        if known is not None:
            session, dialer = known
            self._react(session, dialer, session.has_blocks(claim_id, now_s))

    def _do_finish(self, claim_id: int, ticket: AnyTicket) -> None:
        known = self._sessions.get(ticket.address)
        if known is not None:
            known[0].finish(claim_id)

    def _open(self, address: tuple[str, int]) -> tuple[ClientSession, Dialer]:
        known = self._sessions.get(address)
        if known is None:
            session = ClientSession(address, self._fingerprint, self._takes_push, self._deadlines)
            dialer = Dialer(self._context, *address, self._keys)
            self._sleeper.watch(dialer.socket, dialer.monitor)
            known = (session, dialer)
            self._sessions[address] = known
            logger.debug("session %s:%d: opening", *address)
        return known

    def _react(self, session: ClientSession, dialer: Dialer, reaction: Reaction) -> None:
        # Outcomes first: whatever happens to the messages, a claim has its answer.
        self._outcomes.extend(reaction.outcomes)
        dialer.send(reaction.send)
        if session.is_over and session.address in self._sessions:
            self._log_end(session)
            del self._sessions[session.address]
            self._sleeper.ignore(dialer.socket, dialer.monitor)
            dialer.close()

    def _log_end(self, session: ClientSession) -> None:
        """A refusal is an error the first time; every request to that peer would repeat it."""
        end = (session.address, session.end_reason)
        is_news = session.state is SessionState.REJECTED and end not in self._reported
        if is_news and len(self._reported) < _MAX_REPORTED:
            self._reported.add(end)
        level = logging.ERROR if is_news else logging.DEBUG
        logger.log(level, "session %s:%d: ended: %s", *session.address, session.end_reason)

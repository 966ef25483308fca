"""P's answers to D's, on the control thread: who may talk, and what becomes of each claim."""

from collections.abc import Callable

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.fingerprint import Fingerprint, first_difference
from vllm_llmdd_connector.control.messages import (
    PROTOCOL_VERSION,
    Announce,
    AnyMessage,
    Claim,
    Drop,
    Gone,
    Grant,
    Hello,
    Message,
    Reject,
    Release,
    ReleaseAck,
    Renew,
    Unknown,
    Welcome,
    WorkerEndpoint,
    read_fingerprint,
)
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.ids import new_claim_id
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.scheduler.handover import Handover, HandoverState
from vllm_llmdd_connector.scheduler.lease import Lease
from vllm_llmdd_connector.scheduler.producer import Producer

logger = get_logger(__name__)

MAX_LOGGED = 1024
"""Kinds of refusals that are logged, each once; all are counted."""

Reply = Callable[[Message], None]
SessionMessage = Announce | Claim | Renew | Drop | Release


class ProducerControl:
    """The control channel's handler of one P engine."""

    def __init__(
        self,
        config: ConnectorConfig,
        instance: str,
        producer: Producer,
        fingerprint: Fingerprint,
        workers: tuple[WorkerEndpoint, ...],
        clock: Callable[[], float],
        stats: TransferStats,
    ) -> None:
        self._config = config
        self._instance = instance
        self._producer = producer
        self._fingerprint = fingerprint
        self._workers = workers
        self._clock = clock
        self._stats = stats
        self._session = new_claim_id()
        self._logged_refusals: set[str] = set()

    def handle(self, message: AnyMessage, reply: Reply) -> None:
        """Answer one message of a D."""
        match message:
            case Hello():
                reply(self._on_hello(message))
            case (
                Announce(session=session)
                | Claim(session=session)
                | Renew(session=session)
                | Drop(session=session)
                | Release(session=session)
            ):
                if session != self._session:
                    reply(Unknown(session=session))
                else:
                    with self._producer.lock:
                        self._on_session_message(message, reply)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a prefill server")

    def _on_hello(self, message: Hello) -> Message:
        problem: str | None
        if message.version != PROTOCOL_VERSION:
            problem = (
                f"protocol version differs: prefill server {PROTOCOL_VERSION}, decode server "
                f"{message.version}; install one version of the connector on both"
            )
        else:
            problem = first_difference(self._fingerprint, read_fingerprint(message.fingerprint))
            if problem is not None:
                problem = (
                    f"{problem} (local is the prefill server, peer the decode server); start both "
                    "with the same model, KV cache options and integrity"
                )
        if problem is None:
            return Welcome(
                session=self._session,
                instance=self._instance,
                workers=self._workers,
                lease_s=self._config.lease_s,
                hello_sent_s=message.sent_s,
                clock_s=self._clock(),
            )
        self._stats.count_failure("handshake")
        if problem not in self._logged_refusals and len(self._logged_refusals) < MAX_LOGGED:
            self._logged_refusals.add(problem)
            logger.error("a decode server was refused: %s", problem)
        return Reject(reason=problem)

    def _on_session_message(self, message: SessionMessage, reply: Reply) -> None:
        now_s = self._clock()
        match message:
            case Announce():
                self._announced(message, reply, now_s)
            case Claim():
                reply(self._claimed(message, now_s))
            case Renew():
                for claim_id in message.claim_ids:
                    self._renewed(claim_id, reply, now_s)
            case Drop():
                self._dropped(message)
            case Release():
                reply(self._released(message))

    def _announced(self, message: Announce, reply: Reply, now_s: float) -> None:
        handover = self._producer.handovers.announce(message, reply, now_s)
        if handover is None or message.claim_id not in handover.suitors:
            return
        lease = handover.lease
        if lease is None:
            return
        self._producer.leases.attach(lease, message.claim_id, now_s)
        if handover.state is HandoverState.COMPUTED and not self._is_pushed(message, handover):
            reply(_grant(message.claim_id, lease))

    def _is_pushed(self, message: Announce, handover: Handover) -> bool:
        return self._producer.handovers.can_push and message.takes_push

    def _claimed(self, message: Claim, now_s: float) -> Message:
        result = self._producer.leases.claim(
            message.production, message.secret, message.prompt_hash, message.claim_id, now_s
        )
        if isinstance(result, str):
            return Gone(claim_id=message.claim_id, reason=result)
        return _grant(message.claim_id, result)

    def _renewed(self, claim_id: int, reply: Reply, now_s: float) -> None:
        # A pushed claim is in both tables from its lease's start on.
        known = self._producer.handovers.renew(claim_id, now_s)
        held = self._producer.leases.renew(claim_id, now_s)
        if not known and not held:
            reply(Gone(claim_id=claim_id, reason="the lease has ended"))

    def _dropped(self, message: Drop) -> None:
        production = message.production
        if not production:
            handover = self._producer.handovers.drop(message.secret, message.claim_id)
            if handover is None or handover.lease is None:
                return
            production = handover.lease.production
        self._producer.leases.drop(production, message.secret, message.claim_id)

    def _released(self, message: Release) -> Message:
        leases = self._producer.leases
        is_held = leases.release(message.production, message.secret, message.claim_id, message.rank)
        if not is_held:
            self._note_pushed(message)
        elif not leases.has_claim(message.claim_id):
            # All ranks have it: should the prompt be preempted, this D needs no lease again.
            self._producer.handovers.drop(message.secret, message.claim_id)
        return ReleaseAck(claim_id=message.claim_id, production=message.production, valid=is_held)

    def _note_pushed(self, message: Release) -> None:
        """A rank was perhaps sent all it wants before there was a lease, or before a preemption.

        It will not ask for the next computation, so a lease of that does not wait for it. The
        answer stays that this production is not held: a push was confirmed by its ``Done``, and a
        pull from an ended lease must not pass for one of a later request with the same transfer id.
        """
        leases = self._producer.leases
        handover = self._producer.handovers.release(
            message.secret, message.claim_id, message.rank, leases.num_ranks
        )
        if handover is not None and handover.lease is not None:
            leases.release(
                handover.lease.production, message.secret, message.claim_id, message.rank
            )


def _grant(claim_id: int, lease: Lease) -> Grant:
    return Grant(
        claim_id=claim_id,
        production=lease.production,
        secret=lease.secret,
        block_ids=lease.block_ids,
    )

"""D's requests that have asked a metaserver for a prefill, until a P gets in touch.

The scheduling thread asks and collects; posts are answered on the metaserver client's thread and
P's knock on the control server's. Either may be first, and either may come for a request that is
over: its P is told at once, because otherwise it would hold the blocks until their lease ends.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_llmdd_connector.config import ConnectorConfig, is_allowed_peer
from vllm_llmdd_connector.control.messages import Knock
from vllm_llmdd_connector.control.metaserver import OnAnswer
from vllm_llmdd_connector.ids import new_claim_id
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.params import AnyTicket, Appointment

logger = get_logger(__name__)

MAX_ENDED = 4096
"""Transfers whose late P is still told that nobody waits; of older ones P's lease expires."""

MAX_FOREIGN = 64
"""Hosts outside of the allow-list whose knock is logged, each once."""


class Poster(Protocol):
    """What is needed of ``MetaserverClient``."""

    def post(self, key: str, url: str, body: dict[str, Any], on_answer: OnAnswer) -> None: ...
    def cancel(self, key: str) -> None: ...


class Dropper(Protocol):
    """What is needed of ``ControlClient``; called from the control server's thread too."""

    def drop(self, claim_id: int, ticket: AnyTicket, deadline_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Knocked:
    """A P has the prompt. Its address has passed the allow-list."""

    request_id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The metaserver has answered; ``failure`` is empty when P has finished."""

    request_id: str
    failure: str


class SummonsTable:
    """Transfers that wait for a P, by the id that D has drawn."""

    def __init__(
        self,
        config: ConnectorConfig,
        poster: Poster,
        control: Dropper,
        make_post: Callable[[str, str], dict[str, Any]],
        clock: Callable[[], float],
    ) -> None:
        """``make_post`` makes what is posted for a request id and a transfer id."""
        self._config = config
        self._make_post = make_post
        self._poster = poster
        self._control = control
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, str] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._events: deque[Knocked | Answered] = deque()
        self._foreign: set[str] = set()

    def ask(self, request_id: str, transfer_id: str, url: str) -> None:
        """Ask for the request's prefill; events follow until ``end``."""
        with self._lock:
            self._waiting[transfer_id] = request_id
        self._poster.post(
            transfer_id,
            url,
            self._make_post(request_id, transfer_id),
            lambda failure: self._events.append(Answered(request_id, failure)),
        )

    def end(self, transfer_id: str) -> None:
        """The request is over here; a P that knocks from now on is told so."""
        with self._lock:
            if self._waiting.pop(transfer_id, None) is None:
                return
            self._ended[transfer_id] = None
            while len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
        self._poster.cancel(transfer_id)

    def take_events(self) -> list[Knocked | Answered]:
        """What has happened since the last call; does not wait."""
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def on_knock(self, message: Knock) -> None:
        """A P says that it has the prompt; control server's thread."""
        if not is_allowed_peer(message.host, self._config.allowed_peers):
            # No address from the network is dialled unchecked, and no request fails by it: the
            # true P may still come, and each request has its deadline.
            self._warn_once(message)
            return
        with self._lock:
            request_id = self._waiting.get(message.transfer_id)
            is_late = message.transfer_id in self._ended
        if request_id is not None:
            self._events.append(Knocked(request_id, message.host, message.port))
        elif is_late:
            self.send_away(message.transfer_id, message.host, message.port)

    def _warn_once(self, message: Knock) -> None:
        """Whoever reaches the port can knock as often as it likes."""
        if message.host in self._foreign or len(self._foreign) >= MAX_FOREIGN:
            return
        self._foreign.add(message.host)
        logger.warning(
            "transfer %r: prefill server %r is not in allowed_peers %s; add it if it is yours",
            message.transfer_id,
            message.host,
            list(self._config.allowed_peers),
        )

    def send_away(self, transfer_id: str, host: str, port: int) -> None:
        """Tell a P that has knocked that it is not waited for."""
        nothing = Appointment(
            host=host,
            port=port,
            transfer_id=transfer_id,
            num_tokens=0,
            prompt_hash="",
        )
        deadline_s = self._clock() + self._config.first_contact_timeout_s
        self._control.drop(new_claim_id(), nothing, deadline_s)

"""P's prefill legs that are made of a D's post to a metaserver: D is told where its prompt is.

Called on the scheduling thread, before and after ``Producer`` has seen the request.
"""

from typing import TYPE_CHECKING

from vllm_llmdd_connector.config import ConnectorConfig, is_allowed_peer
from vllm_llmdd_connector.control.keys import KeySet
from vllm_llmdd_connector.control.knock import Address, Knocker
from vllm_llmdd_connector.control.messages import Knock
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.params import (
    caller_of,
    child_params,
    transfer_id_of,
    wants_remote_decode,
)
from vllm_llmdd_connector.scheduler.producer import Producer

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = get_logger(__name__)


class Callers:
    """The D's that have asked for prefills of one P engine."""

    def __init__(
        self,
        config: ConnectorConfig,
        control_port: int,
        producer: Producer,
        stats: TransferStats,
        keys: KeySet | None = None,
    ) -> None:
        self._config = config
        self._control_port = control_port
        self._producer = producer
        self._stats = stats
        self._knocker = Knocker(keys)

    def on_new_request(self, request: "Request") -> None:
        """Hand the request to the producer, and tell the D that waits for it."""
        caller = self._checked_caller(request)
        self._producer.on_new_request(request)
        if caller is None or getattr(request, "abort_immediately", False):
            return
        assert request.kv_transfer_params is not None
        transfer_id = transfer_id_of(request.kv_transfer_params)
        assert transfer_id is not None
        message = Knock(transfer_id=transfer_id, host=self._config.host, port=self._control_port)
        self._knocker.knock(caller, message, lambda: self._expect_nobody(transfer_id))

    def _expect_nobody(self, transfer_id: str) -> None:
        """The D is not there: hold nothing for it; knocker's thread."""
        with self._producer.lock:
            self._producer.handovers.drop(transfer_id, 0)

    def close(self) -> None:
        self._knocker.close()

    def _checked_caller(self, request: "Request") -> Address | None:
        """The D to tell. A request that names one P may not dial is computed for nobody."""
        params = request.kv_transfer_params
        if not wants_remote_decode(params):
            return None
        assert params is not None
        try:
            request.kv_transfer_params = params = child_params(params, request.request_id)
            transfer_id_of(params)
            caller = caller_of(params)
            if caller is not None and not is_allowed_peer(caller[0], self._config.allowed_peers):
                raise RemoteProtocolError(
                    f"kv_transfer_params names the decode server {caller[0]}, which is not in "
                    f"allowed_peers {list(self._config.allowed_peers)}; add it there if it is yours"
                )
        except RemoteProtocolError as error:
            request.kv_transfer_params = {**params, "do_remote_decode": False}
            self._stats.count("not_handed_over")
            logger.warning("request %s: not handed over: %s", request.request_id, error)
            return None
        return caller

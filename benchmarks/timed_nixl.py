"""vLLM's NIXL connectors, with the times that the traces of this project's connector have.

Loaded by the servers of the benchmarks' arms (`kv_connector_module_path`). The classes keep vLLM's
names, which some of its checks go by. Each process appends JSON lines to a file of its own in the
folder `times_dir` of the extra config:

* `computed`, P's worker: the last layer hook of a forward, where `trace_dir` has its own;
* `arrival`, D's worker: it tells vLLM that a request's blocks are all there;
* `decode`, D's scheduler: the first step that has the request.

Times are of the monotonic clock, which processes of one host share. The connector moves its thread,
which is the one that computes, to the last core of its memory node, whatever processor the server
was given; it is put back, so that P and D compute on the same processors in all arms.
"""

import json
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import nixl

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput


class _Timed(nixl.NixlBaseConnector):
    """What both of vLLM's connectors get."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: "KVConnectorRole",
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        processors = os.sched_getaffinity(0)
        super().__init__(vllm_config, role, kv_cache_config)
        os.sched_setaffinity(0, processors)
        folder = Path(self.kv_transfer_config.get_from_extra_config("times_dir", ""))
        folder.mkdir(parents=True, exist_ok=True)
        self._is_producer = self.kv_transfer_config.kv_role == "kv_producer"
        self._times = (folder / f"{uuid.uuid4()}.jsonl").open("w", buffering=1)
        self._computed_ns = 0
        self._arrived: set[str] = set()

    def _note(self, name: str, at_ns: int, request: str = "") -> None:
        print(json.dumps({"name": name, "at_ns": at_ns, "request": request}), file=self._times)

    # Worker

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        super().save_kv_layer(*args, **kwargs)
        self._computed_ns = time.monotonic_ns()

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self._is_producer and self._computed_ns:
            self._note("computed", self._computed_ns)
        self._computed_ns = 0

    def get_transfer_results(self, finished_req_ids: set[str]) -> "KVConnectorTransferResults":
        results = super().get_transfer_results(finished_req_ids)
        for request in results.finished_recving:
            self._note("arrival", time.monotonic_ns(), request)
        return results

    # Scheduler

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        super().update_connector_output(connector_output)
        self._arrived.update(connector_output.finished_recving or ())

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> "KVConnectorMetadata":
        for request in self._arrived & scheduler_output.num_scheduled_tokens.keys():
            self._note("decode", time.monotonic_ns(), request)
            self._arrived.discard(request)
        return super().build_connector_meta(scheduler_output)


class NixlConnector(_Timed, nixl.NixlPullConnector):
    """D reads the blocks when P has answered."""


class NixlPushConnector(_Timed, nixl.NixlPushConnector):
    """P writes the blocks when its request has ended and D has said where to."""

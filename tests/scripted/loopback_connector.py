"""The smallest connector that moves KV between two engines of one process.

It exists to test the harness: what goes wrong with it in place is a fault of the harness. Blocks
are copied in ``start_load_kv``; the peer's tensors are found in a table of this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

BlockIds = tuple[list[int], ...]

_tensors: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
_released: dict[tuple[str, int], set[str]] = {}


@dataclass
class Load:
    """Copy these blocks of a peer's request into these of ours, group by group."""

    request_id: str
    peer: str
    peer_request_id: str
    sources: BlockIds
    destinations: BlockIds


@dataclass
class StepMetadata(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    rank: int


class LoopbackConnector(KVConnectorBase_V1, SupportsHMA):
    """Both roles in one class; the producer keeps blocks until the consumer copied them.

    ``hooks`` lists the calls of this instance in order, for tests of the call order. Setting
    ``fail_loads`` on a worker-side instance makes it report loads as failed.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.engine_id: str = vllm_config.kv_transfer_config.engine_id
        self.groups = kv_cache_config.kv_cache_groups
        self.hooks: list[str] = []
        self.fail_loads = False
        self.handshakes: dict[int, KVConnectorHandshakeMetadata] = {}
        self._new_loads: list[Load] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        if role is KVConnectorRole.WORKER:
            self.rank = get_tensor_model_parallel_rank()

    # Scheduler side.

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self.handshakes = metadata

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        count = len(request.prompt_token_ids or ()) - num_computed_tokens
        return count, count > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False
        local = request.num_prompt_tokens - num_external_tokens
        sources, destinations = [], []
        for group, theirs, ours in zip(
            self.groups, params["remote_block_ids"], blocks.get_block_ids(), strict=True
        ):
            first = local // group.kv_cache_spec.block_size
            pairs = [(s, d) for s, d in zip(theirs[first:], ours[first:], strict=False) if s and d]
            sources.append([source for source, _ in pairs])
            destinations.append([destination for _, destination in pairs])
        self._new_loads.append(
            Load(
                request.request_id if num_external_tokens else "",
                params["remote_engine_id"],
                params["remote_request_id"],
                tuple(sources),
                tuple(destinations),
            )
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        loads, self._new_loads = self._new_loads, []
        return StepMetadata(loads)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or request.status.name != "FINISHED_LENGTH_CAPPED":
            return False, None
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": [list(ids) for ids in block_ids],
        }

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.hooks.append("register_kv_caches")
        _tensors[self.engine_id, self.rank] = kv_caches
        _released[self.engine_id, self.rank] = set()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return Handshake(self.rank)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.hooks.append("handle_preemptions")

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self.hooks.append("bind_connector_metadata")
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        self.hooks.append("clear_connector_metadata")
        super().clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.hooks.append("start_load_kv")
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        for load in metadata.loads:
            self._load(load)

    def _load(self, load: Load) -> None:
        _released[load.peer, self.rank].add(load.peer_request_id)
        if not load.request_id:
            return
        if self.fail_loads:
            self._failed.add(load.request_id)
            self._bad_blocks.update(block for ids in load.destinations for block in ids)
            return
        ours, theirs = _tensors[self.engine_id, self.rank], _tensors[load.peer, self.rank]
        for group, sources, destinations in zip(
            self.groups, load.sources, load.destinations, strict=True
        ):
            for name in group.layer_names:
                ours[name][destinations] = theirs[name][sources]
        self._received.add(load.request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.hooks.append(f"wait_for_layer_load {layer_name}")

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self.hooks.append(f"save_kv_layer {layer_name}")

    def wait_for_save(self) -> None:
        self.hooks.append("wait_for_save")

    def _poll(self) -> tuple[set[str], set[str], set[str]]:
        sent = _released[self.engine_id, self.rank]
        results = set(sent), self._received | self._failed, self._failed
        sent.clear()
        self._received, self._failed = set(), set()
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        self.hooks.append("get_finished")
        sent, received, _ = self._poll()
        return sent, received

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        self.hooks.append("get_transfer_results")
        sent, received, failed = self._poll()
        self._bad_blocks.clear()
        return base.KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        self.hooks.append("get_block_ids_with_load_errors")
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            _tensors.pop((self.engine_id, self.rank), None)

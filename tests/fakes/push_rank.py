"""Worker ranks with four layers for pushes over the vendor's names, and a P that computes on order.

With layout ``pairs`` a layer is a K and a V tensor on an NPU that is host memory here; with
``single`` it is one tensor in host memory.
"""

from __future__ import annotations

import hashlib
import sys
from types import SimpleNamespace
from typing import Any, Literal

import torch

from fakes.clock import wait_for
from fakes.fake_npu import FakeNpu
from fakes.rank import NO_LAYERS, FullAttentionSpec, Rank
from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.metadata import PrefillChunk, WorkerReport
from vllm_llmdd_connector.worker.push import Pusher
from vllm_llmdd_connector.worker.worker import WorkerConnector

Layout = Literal["pairs", "single"]
NUM_BLOCKS = 32
BLOCK_LEN = 4096
BLOCK_TOKENS = 16
LAYERS = tuple(f"layer{number}" for number in range(4))
_ALIGNMENT = 2 << 20


class NpuDevice(SimpleNamespace):
    type = "npu"
    index = 0

    def __str__(self) -> str:
        return "npu:0"


class NpuTensor:
    """Blocks of bytes that claim to lie on an NPU."""

    device = NpuDevice()

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)


def aligned(number: int) -> list[torch.Tensor]:
    """Zeroed tensors of blocks, each at the vendor's alignment."""
    memory = torch.zeros((number + 1) * _ALIGNMENT, dtype=torch.uint8)
    first = -memory.data_ptr() % _ALIGNMENT
    starts = range(first, first + number * _ALIGNMENT, _ALIGNMENT)
    size = NUM_BLOCKS * BLOCK_LEN
    return [memory[start : start + size].view(NUM_BLOCKS, BLOCK_LEN) for start in starts]


class PushRank(Rank):
    """One worker; ``tensors`` holds its memory, by layer."""

    def __init__(self, kv_role: str, layout: Layout, **options: Any) -> None:
        transfer = SimpleNamespace(
            engine_id=kv_role,
            kv_role=kv_role,
            is_kv_producer=kv_role == "kv_producer",
            is_kv_consumer=kv_role == "kv_consumer",
        )
        group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=list(LAYERS))
        vllm_config: Any = SimpleNamespace(
            kv_transfer_config=transfer, compilation_config=NO_LAYERS
        )
        cache_config: Any = SimpleNamespace(kv_cache_groups=[group], num_blocks=NUM_BLOCKS)
        config = ConnectorConfig(**options)
        self.worker = WorkerConnector(vllm_config, cache_config, config, 0)
        memory = aligned(2 * len(LAYERS))
        per_layer = 2 if layout == "pairs" else 1
        self.tensors = {
            layer: memory[number * per_layer : (number + 1) * per_layer]
            for number, layer in enumerate(LAYERS)
        }
        if layout == "pairs":
            npu = FakeNpu()
            npu.done.set()
            sys.modules["torch_npu"] = npu
        self.worker.register_kv_caches(
            {
                layer: tuple(map(NpuTensor, tensors)) if layout == "pairs" else tensors[0]
                for layer, tensors in self.tensors.items()
            }
        )
        self.received = set()
        self.failed = set()
        self.report = WorkerReport()

    def fill(self, block: int, value: int) -> None:
        for tensors in self.tensors.values():
            for tensor in tensors:
                tensor[block] = value

    def digests(self, *blocks: int) -> dict[str, list[str]]:
        """By layer: one for each block, over all of the layer's tensors."""
        return {
            layer: [
                hashlib.sha1(b"".join(t[block].numpy().tobytes() for t in tensors)).hexdigest()
                for block in blocks
            ]
            for layer, tensors in self.tensors.items()
        }


class Prompt:
    """One prompt at P: its blocks, computed layer by layer when the test says so."""

    def __init__(self, rank: PushRank, transfer_id: str, blocks: list[int]) -> None:
        self.rank = rank
        self.transfer_id = transfer_id
        self.blocks = blocks
        self.production = 0
        self._known = 0

    def chunk(self, num_blocks: int, production: int) -> PrefillChunk:
        """A step that computes up to this many blocks."""
        if production != self.production:
            self.production, self._known = production, 0
        new = tuple(self.blocks[self._known : num_blocks])
        self._known = num_blocks
        num_tokens = len(self.blocks) * BLOCK_TOKENS
        return PrefillChunk(
            self.transfer_id, production, num_tokens, (new,), num_blocks * BLOCK_TOKENS
        )

    def compute(self, layer: str, first: int = 0, last: int | None = None) -> None:
        """Write the layer's KV: bytes that tell layer, block and production."""
        for block in self.blocks[first:last]:
            for number, tensor in enumerate(self.rank.tensors[layer]):
                seed = f"{self.transfer_id} {layer} {number} {block} {self.production}"
                start = int.from_bytes(hashlib.sha1(seed.encode()).digest()[:4], "little")
                tensor[block] = (torch.arange(BLOCK_LEN) * 31 + start).to(torch.uint8)

    def run_layer(self, layer: str, first: int = 0, last: int | None = None) -> None:
        self.compute(layer, first, last)
        self.rank.worker.layer_computed(layer)


def pusher_of(rank: PushRank) -> Pusher:
    pusher = rank.worker._pusher
    assert pusher is not None
    return pusher


def known(rank: PushRank, number: int) -> None:
    """P's worker has taken this many reservations that are not over."""
    pusher = pusher_of(rank)

    def count() -> int:
        with pusher._lock:
            tables = [
                *pusher._plan._parked.values(),
                *(prefill.reservations for prefill in pusher._plan._by_transfer.values()),
            ]
            return sum(not r.is_over for table in tables for r in table.values())

    wait_for(lambda: count() == number, f"{number} reservations")


def idle(rank: PushRank) -> None:
    """P's worker writes nothing and has nothing to write."""
    wait_for(lambda: pusher_of(rank).num_under_way == 0, "the pushes' ends")

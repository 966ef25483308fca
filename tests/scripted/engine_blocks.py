"""The blocks of an engine: who holds them and whether their bytes are right."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from engine_spec import EngineSpec
from fake_worker import FakeWorker
from kv_reference import KVModel, Words

BlockIds = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Mismatch:
    """A block whose bytes are not those of its tokens."""

    rank: int
    layer: int
    index: int
    block_id: int


class EngineBlocks:
    """The part of an engine that looks at its pool and its KV caches."""

    spec: EngineSpec
    scheduler: Any
    workers: list[FakeWorker]

    @property
    def model(self) -> KVModel:
        """The arithmetic that all right KV and tokens follow."""
        return self.spec.model

    def free_blocks(self) -> int:
        """Blocks of the pool that no request and no lease holds.

        An idle engine is not stepped, so the connector gets its next chance to free what is over
        with the next request; that hook is called here.
        """
        if self.scheduler.connector is not None and self.spec.role != "kv_consumer":
            self.scheduler.connector.on_new_request(
                SimpleNamespace(request_id="nobody", kv_transfer_params=None)
            )
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    @contextmanager
    def hold_blocks(self, count: int | None = None) -> Iterator[None]:
        """Keep free blocks (all by default) from the scheduler, which then has to preempt."""
        pool = self.scheduler.kv_cache_manager.block_pool
        held = pool.get_new_blocks(self.free_blocks() if count is None else count)
        try:
            yield
        finally:
            pool.free_blocks(reversed(held))

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Block table of a live request, one list per KV cache group."""
        ids: tuple[list[int], ...] = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return ids

    def layer_group(self, layer: int) -> int:
        """KV cache group of a layer."""
        name = self.spec.layer_names()[layer]
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        return next(i for i, group in enumerate(groups) if name in group.layer_names)

    def block_words(self, layer: int, block_id: int, rank: int = 0) -> Words:
        """A writable view of a block: ``(head, position, word)``."""
        return self.workers[rank].block_words(layer, block_id)

    def expected_block(self, layer: int, tokens: Sequence[int], index: int, rank: int = 0) -> Words:
        """Right content of block ``index`` of a sequence, for the filled positions."""
        heads = self.workers[rank].heads
        return self.model.block(layer, tokens, index, self.spec.block_size, heads)

    def mismatches(
        self, block_ids: BlockIds, tokens: Sequence[int], start: int = 0
    ) -> list[Mismatch]:
        """Blocks from position ``start`` on that do not hold the KV of ``tokens``.

        Entries that are vLLM's null block (outside a sliding window) are passed over.
        """
        null = self.scheduler.kv_cache_manager.block_pool.null_block.block_id
        size, wrong = self.spec.block_size, []
        for rank in range(self.spec.tp_size):
            for layer in range(self.model.num_layers):
                table = block_ids[self.layer_group(layer)]
                for index in range(start // size, -(-len(tokens) // size)):
                    if table[index] == null:
                        continue
                    expected = self.expected_block(layer, tokens, index, rank)
                    actual = self.block_words(layer, table[index], rank)[:, : expected.shape[1]]
                    if not np.array_equal(actual, expected):
                        wrong.append(Mismatch(rank, layer, index, table[index]))
        return wrong

    def request_mismatches(self, request_id: str) -> list[Mismatch]:
        """The same for what vLLM believes is computed of a live request."""
        request = self.scheduler.requests[request_id]
        tokens = list(request.all_token_ids)[: request.num_computed_tokens]
        return self.mismatches(self.block_ids(request_id), tokens)

    def digest(self, block_ids: BlockIds) -> str:
        """Digest of the whole blocks of a table, in order, over ranks and layers."""
        digest = hashlib.blake2b(digest_size=16)
        for rank in range(self.spec.tp_size):
            for layer in range(self.model.num_layers):
                for block_id in block_ids[self.layer_group(layer)]:
                    digest.update(self.block_words(layer, block_id, rank).tobytes())
        return digest.hexdigest()

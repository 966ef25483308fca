"""One tensor-parallel rank: real KV tensors, the real worker-side connector, a scripted forward.

vLLM's own mixin calls the connector's hooks, so their order is the version's own. What is ours is
everything between: the batch state, the forward, and the KV written by it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from batch_state import BatchState, Chunk
from engine_spec import EngineSpec
from kv_reference import Words
from kv_tensors import allocate, as_words
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin


class _Group:
    """Stands in for vLLM's process groups, which are globals of a process."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.rank_in_group = self.local_rank = rank
        self.world_size = size
        self.ranks = list(range(size))
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return value


@dataclass
class StepResult:
    """What a rank knows after launching a step; ``compute`` does the device's share of it."""

    connector_output: KVConnectorOutput | None
    req_ids: list[str]
    compute: Callable[[], dict[str, int]]
    """Digest of each request that samples a token."""


class FakeWorker:
    """The methods that vLLM's executor calls on a worker, for one rank."""

    def __init__(self, spec: EngineSpec, config: VllmConfig, rank: int) -> None:
        self.spec = spec
        self.config = config
        self.rank = rank
        self.model = spec.model
        self.heads = slice(rank * spec.heads_per_rank, (rank + 1) * spec.heads_per_rank)
        self.connector: Any = None
        self.kv_caches: dict[str, torch.Tensor] = {}
        self.states = BatchState()
        self.use_layer_hooks = True
        """False leaves the hooks of the layers out, as the replay of a full device graph does."""
        self.before_layer: Callable[[int], None] = lambda layer: None
        """Called inside a forward, before the layer of this number is computed."""
        self._unwritten: list[frozenset[int]] = []
        """Addresses of the blocks that the running forward has still to write, by layer."""
        self._words: list[Words] = []
        self._group_of_layer: list[int] = []
        self._groups = (_Group(rank, spec.tp_size), _Group(0, 1))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this rank the one that vLLM's process-wide globals describe."""
        previous = (
            kv_transfer_state._KV_CONNECTOR_AGENT,
            parallel_state._TP,
            parallel_state._PP,
        )
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        parallel_state._TP, parallel_state._PP = self._groups
        try:
            yield
        finally:
            self.connector = kv_transfer_state._KV_CONNECTOR_AGENT
            (
                kv_transfer_state._KV_CONNECTOR_AGENT,
                parallel_state._TP,
                parallel_state._PP,
            ) = previous

    # What the engine core asks for at start-up.

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.spec.kv_cache_specs()

    def determine_available_memory(self) -> int:
        return 1 << 30

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBHNC"]

    def set_kv_cache_layout(self, name: str) -> None:
        self.config.cache_config.kv_cache_layout = name

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        config = kv_cache_configs[self.rank]
        self.config.cache_config.num_gpu_blocks = config.num_blocks
        kv_transfer_state.ensure_kv_transfer_initialized(self.config, config)
        self.connector = kv_transfer_state._KV_CONNECTOR_AGENT
        memory = getattr(self.connector, "get_mem_pool_context", nullcontext)()
        with memory or nullcontext():
            self.kv_caches = allocate(config, self.config, self.spec.separate_storage)
        names = self.spec.layer_names()
        self._words = [as_words(self.kv_caches[name]) for name in names]
        self._group_of_layer = [
            next(i for i, group in enumerate(config.kv_cache_groups) if name in group.layer_names)
            for name in names
        ]
        self.config.compilation_config.static_forward_context = {
            name: SimpleNamespace(kv_cache=self.kv_caches[name]) for name in names
        }
        if self.connector is not None:
            self.connector.register_kv_caches(self.kv_caches)
            self.connector.set_host_xfer_buffer_ops(copy_kv_blocks)

    def compile_or_warm_up_model(self) -> SimpleNamespace:
        return SimpleNamespace(language_model=0.0, encoder=0.0)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        metadata = self.connector.get_handshake_metadata() if self.connector else None
        return None if metadata is None else {(0, self.rank): _over_the_wire(metadata)}

    def shutdown(self) -> None:
        kv_transfer_state.ensure_kv_transfer_shutdown()

    # A step.

    def launch(self, scheduler_output: SchedulerOutput) -> StepResult:
        """Run the connector's hooks of one step around the launch of its forward."""
        output: SchedulerOutput = _over_the_wire(scheduler_output)
        if self.connector is not None:
            self.connector.handle_preemptions(output.kv_connector_metadata)
        chunks = self.states.update(output)
        self._zero(output.new_block_ids_to_zero or [])
        if not chunks:
            connector_output = self._without_forward(output)
            return StepResult(_over_the_wire(connector_output), [], dict)
        metadata = {name: SimpleNamespace() for name in self.kv_caches}
        with (
            set_forward_context(
                metadata,
                self.config,
                num_tokens=output.total_num_scheduled_tokens,
                slot_mapping={},
            ),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as kv_output,
        ):
            compute = self._forward(chunks)
        return StepResult(
            _over_the_wire(kv_output), [chunk.request.req_id for chunk in chunks], compute
        )

    def _without_forward(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        if self.connector is None:
            return None
        result = KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.config)
        connector_output: KVConnectorOutput | None = result.kv_connector_output
        return connector_output

    def _forward(self, chunks: list[Chunk]) -> Callable[[], dict[str, int]]:
        """Go through the layers; with a lagging device they compute later, after all hooks."""
        late: list[int] = []
        self._unwritten = [self._addresses(layer, chunks) for layer in range(len(self._words))]

        def attention(layer: int, layer_name: str) -> None:
            self.before_layer(layer)
            if self.spec.device_lag:
                late.append(layer)
            else:
                self._write_layer(layer, chunks)

        hooked = maybe_transfer_kv_layer(attention) if self.use_layer_hooks else attention
        for layer, name in enumerate(self.spec.layer_names()):
            hooked(layer, name)

        def compute() -> dict[str, int]:
            for layer in late:
                self._write_layer(layer, chunks)
            return {c.request.req_id: self._digest(c) for c in chunks if c.samples}

        return compute

    def _write_layer(self, layer: int, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            tokens = chunk.request.tokens[chunk.start : chunk.start + chunk.count]
            assert len(tokens) == chunk.count, f"{chunk.request.req_id}: token not known yet"
            if chunk.start:
                before = self._read(layer, chunk, chunk.start - 1, chunk.start)[0, 0]
                state = self.model.state_in(layer, self.heads.start, before)
                states = self.model.states(tokens, state)
            else:
                states = self.model.states(tokens)
            blocks, offsets = self._slots(layer, chunk, chunk.start, chunk.start + chunk.count)
            words = self.model.words(layer, states, self.heads)
            self._words[layer][blocks, :, offsets, :] = words
        self._unwritten[layer] = frozenset()

    def _addresses(self, layer: int, chunks: list[Chunk]) -> frozenset[int]:
        """Of the blocks in which this layer writes positions of prompts."""
        words = self._words[layer]
        base, stride = words.ctypes.data, words.strides[0]
        found: set[int] = set()
        for chunk in chunks:
            end = min(chunk.start + chunk.count, chunk.request.num_prompt_tokens)
            blocks, _ = self._slots(layer, chunk, chunk.start, max(chunk.start, end))
            found.update(base + stride * int(block) for block in blocks)
        return frozenset(found)

    def _digest(self, chunk: Chunk) -> int:
        end, total = chunk.start + chunk.count, 0
        for layer in range(self.model.num_layers):
            first = self.model.first_visible(layer, end - 1)
            words = self._read(layer, chunk, first, end)
            total += self.model.digest(layer, first, words, self.heads)
        return total

    def _slots(self, layer: int, chunk: Chunk, start: int, end: int) -> tuple[Any, Any]:
        positions = np.arange(start, end)
        table = np.asarray(chunk.block_ids[self._group_of_layer[layer]])
        return table[positions // self.spec.block_size], positions % self.spec.block_size

    def _read(self, layer: int, chunk: Chunk, start: int, end: int) -> Words:
        blocks, offsets = self._slots(layer, chunk, start, end)
        return self._words[layer][blocks, :, offsets, :]

    def _zero(self, block_ids: list[int]) -> None:
        for words in self._words:
            words[block_ids] = 0

    # For tests.

    def is_unwritten(self, address: int, length: int) -> bool:
        """Whether the running forward has still to write into these bytes; from any thread."""
        return any(
            address <= start < address + length for layer in self._unwritten for start in layer
        )

    def block_words(self, layer: int, block_id: int) -> Words:
        """A view of one block of one layer: ``(head, position, word)``; writable."""
        words: Words = self._words[layer][block_id]
        return words


def _over_the_wire(value: Any) -> Any:
    """Copy as the message between the engine core and a worker process does."""
    return pickle.loads(pickle.dumps(value))

"""P's worker with ``trace_dir``: when each layer of each step was computed. Main thread.

Exists only while tracing is on. A step costs one list entry per layer while it runs and is handed
to the recorder as a whole when it has ended.
"""

import time
from collections.abc import Sequence
from typing import Any

from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.metadata import PrefillChunk
from vllm_llmdd_connector.trace.recorder import Trace


def cache_facts(plans: Sequence[CachePlan]) -> list[dict[str, Any]]:
    """What a trace says of the caches: ``computed`` names layers, ``sent`` regions."""
    return [
        {
            "cache": plan.model_id,
            "block_len": plan.block_len,
            "regions": [[region.name, *region.layers] for region in plan.regions],
        }
        for plan in plans
    ]


class StepTrace:
    """Records the steps that compute prompts for a D."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._step = 0
        self._is_running = False
        self._begin_ns = 0
        self._layers: dict[str, int] = {}
        self._chunks: list[PrefillChunk] = []

    def begin(self, chunks: Sequence[PrefillChunk]) -> None:
        """A forward is about to compute these parts of prompts."""
        if self._is_running:
            self.end()
        self._step += 1
        self._is_running = True
        self._chunks = list(chunks)
        self._layers = {}
        self._begin_ns = time.monotonic_ns()

    def layer_computed(self, layer_name: str) -> None:
        """Before anything may send the layer, so that nothing is sent before it is computed. The
        first hook that reports a layer counts."""
        if self._is_running:
            self._layers.setdefault(layer_name, time.monotonic_ns())

    def end(self) -> None:
        """The forward has ended, and with it every layer that no hook reported."""
        if not self._is_running:
            return
        self._is_running = False
        chunks = [
            {
                "transfer": chunk.transfer_id,
                "production": chunk.production,
                "num_tokens": chunk.num_tokens,
                "end_token": chunk.end_token,
            }
            for chunk in self._chunks
        ]
        self._trace.span(
            "step", self._begin_ns, time.monotonic_ns(), step=self._step, chunks=chunks
        )
        for layer, at_ns in self._layers.items():
            self._trace.event("computed", at_ns, step=self._step, layer=layer)
        self._layers = {}

"""A ``LayerSynchronizer`` whose marks live in the engine. An extension of the vendor's API."""

from __future__ import annotations

from vllm_llmdd_connector.datadist import _engine
from vllm_llmdd_connector.datadist.checks import check_uint32, check_uint64
from vllm_llmdd_connector.datadist.transfer_config import LayerSynchronizer

__all__ = ["NativeLayerSynchronizer"]


class NativeLayerSynchronizer(LayerSynchronizer):
    """The producer marks layers, in any order and from any thread; transfers wait for the marks.

    A transfer runs no Python for it, unless a subclass overrides ``synchronize_layer``. It belongs
    to the step in which it was started: after ``reset`` it still sends what was marked then, and
    ends with ``LLM_PARAM_INVALID`` at a layer that was not.
    """

    def __init__(self, num_layers: int) -> None:
        check_uint32("num_layers", num_layers)
        self._marks = _engine.LayerMarks(num_layers)
        # Called for each layer of a forward pass, so without a frame of Python.
        self.mark = self._marks.mark

    def mark_all(self) -> None:
        """All layers of this step may be sent."""
        self._marks.mark_all()

    def reset(self) -> None:
        """Begin the next step, with no layer marked."""
        self._marks.reset()

    def abort(self) -> None:
        """Nothing more of this step may be sent, whether marked or not."""
        self._marks.abort()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        check_uint64("layer_index", layer_index)
        if timeout_in_millis is not None:
            check_uint32("timeout_in_millis", timeout_in_millis)
        return self._marks.wait(layer_index, timeout_in_millis)

    def gate(self) -> _engine.LayerMarks | None:
        """What the engine waits on by itself; ``None`` when it has to ask in Python."""
        ours = NativeLayerSynchronizer.synchronize_layer
        return self._marks if type(self).synchronize_layer is ours else None

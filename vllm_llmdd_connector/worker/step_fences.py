"""P's worker on an engine without reservations: what is computed, as points in the device's work.

vLLM's hooks run ahead of the device: they mark a layer when its kernels are queued. A mark is
therefore a fence, behind which the layer's KV is in the cache; in host memory it is None, and the
KV is there already. Marked on the main thread, with the condition's lock; read by those that send.
"""

import threading
from collections.abc import Callable

from vllm_llmdd_connector.worker.backend import Fence


class StepFences:
    """What is computed of one cache in one step; each region is marked once."""

    def __init__(self, num_regions: int) -> None:
        self._fences: list[Fence | None] = [None] * num_regions
        self._is_marked = [False] * num_regions

    def mark(self, region: int, fence: Fence | None) -> None:
        if not self._is_marked[region]:
            self._fences[region] = fence
            self._is_marked[region] = True

    def is_marked(self, regions: range) -> bool:
        return all(self._is_marked[regions.start : regions.stop])

    def fence(self, regions: range) -> Fence | None:
        """Behind which these regions, which are marked, are computed: the device works in order."""
        return self._fences[regions.stop - 1]


class FencedMarks:
    """The marks of one cache, as ``LayerEvents`` sets them; another ``step`` after each reset."""

    def __init__(self, num_regions: int, fences: "Fences") -> None:
        self._num_regions = num_regions
        self._fences = fences
        self.step = StepFences(num_regions)

    def mark(self, layer_index: int) -> None:
        self.step.mark(layer_index, self._fences.latest)

    def mark_all(self) -> None:
        for region in range(self._num_regions):
            self.mark(region)

    def reset(self) -> None:
        self.step = StepFences(self._num_regions)


class Fences:
    """Records one fence for each hook, however many regions the hook marks."""

    def __init__(self, record: Callable[[], Fence | None], changed: threading.Condition) -> None:
        self._record = record
        self._changed = changed
        self.latest: Fence | None = None
        self._ended: Fence | None = None

    def new_marks(self, num_regions: int) -> FencedMarks:
        return FencedMarks(num_regions, self)

    def around(self, mark: Callable[[], None]) -> None:
        """Set these marks behind what the device has been told until now."""
        self.latest = self._record()
        with self._changed:
            mark()
            self._changed.notify_all()

    def end_step(self) -> None:
        """The latest fence is behind the step's last kernel."""
        self._ended = self.latest

    def ended_step(self, num_regions: int) -> StepFences:
        """For blocks of steps that have ended: vLLM may be further than the device there, too."""
        step = StepFences(num_regions)
        for region in range(num_regions):
            step.mark(region, self._ended)
        return step

"""P's worker: which layers of the running step are computed, for the transfers that wait for them.

One synchronizer per cache holds a mark per region; the first of vLLM's hooks that reports a layer
sets it, and later ones of that step say nothing. In a step without prompts to push a hook costs one
lookup in an empty dict.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from vllm_llmdd_connector.layout.kv_layout import CachePlan

_Mark = Callable[[], None]


class Synchronizer(Protocol):
    """The engine's ``NativeLayerSynchronizer``, or ``FencedMarks``."""

    def mark(self, layer_index: int) -> None: ...
    def mark_all(self) -> None: ...
    def reset(self) -> None: ...


class LayerEvents:
    """Marks of all caches; main thread, except ``synchronizer``."""

    def __init__(
        self,
        plans: Sequence[CachePlan],
        create: Callable[[int], Any],
        around: Callable[[_Mark], None] | None = None,
    ) -> None:
        """``create`` makes a synchronizer for a number of regions; ``around`` is given what sets
        the marks of one hook, to set them."""
        self._around = around
        self._live: dict[int, Synchronizer] = {}
        self._settled: dict[int, Synchronizer] = {}
        self._joined: list[_JoinedRegion] = []
        self._marks = self._marks_by_layer(plans, create)
        self._active: dict[str, _Mark] = {}
        self.generation = 0
        """Number of the last step that was begun."""
        self.is_running = False

    def _marks_by_layer(
        self, plans: Sequence[CachePlan], create: Callable[[int], Any]
    ) -> dict[str, _Mark]:
        marks: dict[str, list[_Mark]] = defaultdict(list)
        for plan in plans:
            live, settled = create(len(plan.regions)), create(len(plan.regions))
            settled.mark_all()
            self._live[plan.model_id], self._settled[plan.model_id] = live, settled
            for index, region in enumerate(plan.regions):
                mark = partial(live.mark, index)
                if len(region.layers) > 1:
                    joined = _JoinedRegion(region.layers, mark)
                    self._joined.append(joined)
                    for layer in region.layers:
                        marks[layer].append(partial(joined.computed, layer))
                else:
                    marks[region.layers[0]].append(mark)
        return {layer: self._hook(_all(parts)) for layer, parts in marks.items()}

    def _hook(self, mark: _Mark) -> _Mark:
        return mark if self._around is None else partial(self._around, mark)

    def begin(self) -> None:
        """A step with prompts to push begins: no layer is computed."""
        for synchronizer in self._live.values():
            synchronizer.reset()
        for joined in self._joined:
            joined.reset()
        self.generation += 1
        self.is_running = True
        self._active = dict(self._marks)

    def computed(self, layer_name: str) -> None:
        """vLLM's layer hook: the layer's KV of this step is in the cache."""
        mark = self._active.pop(layer_name, None)
        if mark is not None:
            mark()

    def end(self) -> None:
        """The forward is over: layers that no hook reported count as computed too."""
        if not self.is_running:
            return
        self._hook(self._mark_rest)()
        self._active = {}
        self.is_running = False

    def is_live(self, generation: int) -> bool:
        """Whether this step is the running one."""
        return self.is_running and generation == self.generation

    def synchronizer(self, model_id: int, generation: int) -> Any:
        """What a transfer waits on for layers of step ``generation``, running or ended."""
        return (self._live if self.is_live(generation) else self._settled)[model_id]

    def _mark_rest(self) -> None:
        for synchronizer in self._live.values():
            synchronizer.mark_all()


class _JoinedRegion:
    """A region of several layers, which side by side fill its rows."""

    def __init__(self, layers: tuple[str, ...], mark: _Mark) -> None:
        self._layers = frozenset(layers)
        self._mark = mark
        self._missing = set(layers)

    def reset(self) -> None:
        self._missing = set(self._layers)

    def computed(self, layer: str) -> None:
        self._missing.discard(layer)
        if not self._missing:
            self._mark()


def _all(marks: list[_Mark]) -> _Mark:
    if len(marks) == 1:
        return marks[0]

    def mark_each() -> None:
        for mark in marks:
            mark()

    return mark_each

"""What each engine step computes of the prompts that a D may have pushed to it. Pure.

Follows the block tables of P's handed-over requests through vLLM's step outputs, because the
workers have to know the blocks of a step before it runs, in which the scheduler side cannot be
asked. Costs nothing while there are no such requests.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_llmdd_connector.metadata import PrefillChunk
from vllm_llmdd_connector.scheduler.block_map import prompt_blocks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

BlockIds = Sequence[Sequence[int]]


@dataclass(slots=True)
class Prefill:
    """One request while it is followed."""

    request_id: str
    transfer_id: str
    num_tokens: int
    count_preemptions: Callable[[], int]
    """vLLM's own count for the request."""
    num_final: tuple[int, ...] = ()
    """With ``integrity`` only: see ``block_map.final_blocks``."""
    num_preemptions: int = 0
    """The count when it was last looked at."""
    production: int = 0
    """0 until it is first scheduled, and after a preemption until it is resumed."""
    block_ids: list[list[int]] = field(default_factory=list)
    num_told: list[int] = field(default_factory=list)
    """Blocks per group that the workers know."""
    is_computed: bool = False
    """The last chunk has been scheduled."""

    def prompt_block_ids(self, block_sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return prompt_blocks(self.block_ids, block_sizes, self.num_tokens)


@dataclass(slots=True)
class StepPrefills:
    """What one step means for the followed requests."""

    chunks: list[PrefillChunk] = field(default_factory=list)
    completed: list[Prefill] = field(default_factory=list)
    """Their last prompt token is computed by this step."""
    voided: list[tuple[Prefill, int]] = field(default_factory=list)
    """Preempted, with the production that is lost."""


class PrefillSteps:
    """All followed requests of one engine."""

    def __init__(
        self, block_sizes: Sequence[int], select_groups: Callable[[BlockIds], BlockIds]
    ) -> None:
        self._block_sizes = tuple(block_sizes)
        self._select_groups = select_groups
        self._prefills: dict[str, Prefill] = {}
        self._begun: dict[str, Prefill] = {}
        """Those of them that have a production."""

    def follow(
        self,
        request_id: str,
        transfer_id: str,
        num_tokens: int,
        count_preemptions: Callable[[], int] = lambda: 0,
        num_final: tuple[int, ...] = (),
    ) -> None:
        """From before the request is first scheduled until ``forget``."""
        prefill = Prefill(request_id, transfer_id, num_tokens, count_preemptions, num_final)
        self._prefills[request_id] = prefill

    def forget(self, request_id: str) -> Prefill | None:
        self._begun.pop(request_id, None)
        return self._prefills.pop(request_id, None)

    def observe(
        self, output: "SchedulerOutput", new_production: Callable[[], int]
    ) -> StepPrefills | None:
        """Take in one step; None if it has nothing to do with these requests."""
        if not self._prefills:
            return None
        step = StepPrefills()
        for prefill in self._preempted(output):
            step.voided.append((prefill, prefill.production))
            prefill.production = 0
            prefill.is_computed = False
            del self._begun[prefill.request_id]
        for prefill, block_ids, num_computed in self._scheduled(output):
            if not prefill.production:
                prefill.production = new_production()
                prefill.num_preemptions = prefill.count_preemptions()
                self._begun[prefill.request_id] = prefill
                prefill.block_ids = [[] for _ in self._block_sizes]
                prefill.num_told = [0] * len(self._block_sizes)
            for ids, new in zip(prefill.block_ids, block_ids, strict=True):
                ids.extend(new)
            if not prefill.is_computed:
                end = num_computed + output.num_scheduled_tokens[prefill.request_id]
                self._advance(prefill, min(end, prefill.num_tokens), step)
        return step

    def _preempted(self, output: "SchedulerOutput") -> list[Prefill]:
        """Those that have lost what was computed of them.

        ``preempted_req_ids`` alone does not tell: before vLLM 0.30 it leaves out the requests that
        ``reset_prefix_cache`` preempts between two steps, whose blocks others get at once.
        """
        named = output.preempted_req_ids or ()
        return [
            prefill
            for prefill in self._begun.values()
            if prefill.request_id in named or prefill.count_preemptions() != prefill.num_preemptions
        ]

    def _scheduled(self, output: "SchedulerOutput") -> Iterator[tuple[Prefill, BlockIds, int]]:
        """The followed requests of the step, with the blocks that are new and the tokens before
        it."""
        for new in output.scheduled_new_reqs:
            prefill = self._prefills.get(new.req_id)
            if prefill is not None:
                yield prefill, self._select_groups(new.block_ids), new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            prefill = self._prefills.get(request_id)
            if prefill is not None and not prefill.is_computed:
                block_ids = cached.new_block_ids[index]
                selected: BlockIds = [[] for _ in self._block_sizes]
                if block_ids is not None:
                    selected = self._select_groups(block_ids)
                yield prefill, selected, cached.num_computed_tokens[index]

    def _advance(self, prefill: Prefill, end_token: int, step: StepPrefills) -> None:
        known = prefill.prompt_block_ids(self._block_sizes)
        step.chunks.append(
            PrefillChunk(
                transfer_id=prefill.transfer_id,
                production=prefill.production,
                num_tokens=prefill.num_tokens,
                block_ids=tuple(
                    ids[told:] for ids, told in zip(known, prefill.num_told, strict=True)
                ),
                end_token=end_token,
                num_final=prefill.num_final,
            )
        )
        prefill.num_told = [len(ids) for ids in known]
        if end_token >= prefill.num_tokens:
            prefill.is_computed = True
            step.completed.append(prefill)

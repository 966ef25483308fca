"""P's worker: checksums of what it pushes, computed layer by layer beside the transfers."""

from collections.abc import Callable, Iterator, Sequence

from vllm_llmdd_connector.control.messages import GroupSums
from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.worker.checksum import Policy, chosen, pack
from vllm_llmdd_connector.worker.layer_events import LayerEvents
from vllm_llmdd_connector.worker.push_plan import Order, Reservation
from vllm_llmdd_connector.worker.step_fences import Fences, StepFences
from vllm_llmdd_connector.worker.sum_thread import SumJob, SumThread


class PushSums:
    """Of one ``Pusher``, which calls it with its lock."""

    def __init__(self, plans: Sequence[CachePlan], policy: Policy, thread: SumThread) -> None:
        self._plans = list(plans)
        self._policy = policy
        self._thread = thread
        # In host memory a layer is there when its hook is called, so marks need no fence.
        self._fences = Fences(lambda: None, thread.changed)
        self.events = LayerEvents(plans, self._fences.new_marks, self._fences.around)

    def start(self, order: Order, on_end: Callable[[], None]) -> int:
        """Sum an order's blocks as they are computed; ``on_end`` is called for each of the returned
        number of parts."""
        jobs = list(self._jobs(order, on_end))
        self._thread.add(jobs)
        return len(jobs)

    def result(self, reservation: Reservation) -> tuple[GroupSums, ...]:
        """Of a reservation whose parts have all ended, by KV cache group."""
        return tuple(
            GroupSums(
                count=self._num_final(reservation, group),
                sums=pack(
                    reservation.sums[group, position]
                    for position in self._chosen(reservation, group)
                ),
            )
            for group in range(len(reservation.message.spans))
        )

    def _jobs(self, order: Order, on_end: Callable[[], None]) -> Iterator[SumJob]:
        reservation, group = order.reservation, order.group_index
        first = reservation.message.spans[group].first
        wanted = set(self._chosen(reservation, group))
        blocks = {
            (group, first + position): block
            for position, block in zip(order.dst_positions, order.src_blocks, strict=True)
            if first + position in wanted
        }
        if not blocks:
            return
        for plan in self._plans:
            if plan.group_index == group:
                yield SumJob(
                    plan,
                    blocks,
                    reservation.sums,
                    self._step(plan, order.generation),
                    lambda: reservation.is_over,
                    on_end,
                )

    def _step(self, plan: CachePlan, generation: int) -> StepFences:
        if self.events.is_live(generation):
            step: StepFences = self.events.synchronizer(plan.model_id, generation).step
            return step
        return self._fences.ended_step(len(plan.regions))

    def _chosen(self, reservation: Reservation, group: int) -> list[int]:
        message = reservation.message
        count = self._num_final(reservation, group)
        return chosen(self._policy, message.reservation, message.spans[group].first, count)

    @staticmethod
    def _num_final(reservation: Reservation, group: int) -> int:
        """Blocks of the span that P will not write to any more."""
        span = reservation.message.spans[group]
        return min(span.count, max(0, reservation.num_final[group] - span.first))

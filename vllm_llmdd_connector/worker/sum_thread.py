"""P's worker: the thread that computes checksums, for pushes and for pulls.

Jobs take turns region by region, so none waits for another's last layer; a push's region has its
turn once it is computed. The forward only notes that a layer is there, and whoever gives a job up
waits for nothing: a job that is over is dropped before its next block.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.worker.checksum import BlockReader, Place
from vllm_llmdd_connector.worker.step_fences import StepFences

logger = get_logger(__name__)


@dataclass(slots=True, eq=False)
class SumJob:
    """Blocks of one cache."""

    plan: CachePlan
    blocks: dict[Place, int]
    """P's block ids."""
    sums: dict[Place, int]
    """Where the result goes; jobs of several caches share it."""
    step: StepFences
    """Which regions are computed."""
    is_over: Callable[[], bool]
    """Whether nobody wants the result any more."""
    on_end: Callable[[], None]
    """Called without a lock when every region is summed; never for a job that is over."""
    next_region: int = 0

    @property
    def is_ready(self) -> bool:
        return self.step.is_marked(range(self.next_region, self.next_region + 1))


class SumThread:
    """All jobs of one worker rank. The thread is started with the first one."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader
        self.changed = threading.Condition()
        """To be notified when regions are marked as computed."""
        self._jobs: deque[SumJob] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def add(self, jobs: Iterable[SumJob]) -> None:
        """Any thread; waits for nothing but others' calls of this."""
        with self.changed:
            self._jobs.extend(jobs)
            if self._thread is None and not self._stopping:
                self._thread = self._started()
            self.changed.notify_all()

    def _started(self) -> threading.Thread | None:
        """None when no thread is to be had: the jobs wait for the next one's, D for its limit."""
        thread = threading.Thread(target=self._run, name="llmdd-sums", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.error("checksums have to wait: no thread to compute them with: %s", error)
            return None
        return thread

    def close(self) -> None:
        """End the thread after the block that it reads; idempotent."""
        with self.changed:
            self._stopping = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            try:
                self._sum_region(job)
            except Exception:
                # Its D has a deadline; the others' sums go on.
                logger.exception("checksums of cache %d failed", job.plan.model_id)

    def _next(self) -> SumJob | None:
        """Takes out the job whose turn it is; None when the thread is to end."""
        with self.changed:
            while not self._stopping:
                self._jobs = deque(job for job in self._jobs if not job.is_over())
                for job in self._jobs:
                    if job.is_ready:
                        self._jobs.remove(job)
                        return job
                self.changed.wait()
        return None

    def _sum_region(self, job: SumJob) -> None:
        def must_end() -> bool:
            return self._stopping or job.is_over()

        if not self._reader.add(job.plan, job.next_region, job.blocks, job.sums, must_end):
            return
        job.next_region += 1
        if job.next_region == len(job.plan.regions):
            job.on_end()
            return
        with self.changed:
            self._jobs.append(job)

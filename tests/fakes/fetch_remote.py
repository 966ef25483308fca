"""What a process with a D rank of two layers does at a test's word; see ``ForkedProcess``."""

from __future__ import annotations

from typing import Any

from fakes.clock import wait_for
from fakes.rank import Rank, run
from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.datadist import _engine
from vllm_llmdd_connector.metadata import Job


class FetchRemote:
    """Its methods are those of the process."""

    endpoint: WorkerEndpoint | None = None
    """Nobody dials a D."""

    def __init__(self, fill: int, options: dict[str, Any]) -> None:
        self._rank = Rank("kv_consumer", fill, **options)

    def slow_down(self, bytes_per_second: int) -> None:
        """This process copies what it pulls, and what is pushed into it."""
        _engine.testing.set_copy_rate(bytes_per_second)

    def start(self, job: Job) -> None:
        self._rank.step(jobs=[job])

    def wait(self, request_id: str) -> str:
        """Until it is reported; the reason of its failure, or an empty text."""
        run(self._rank, request_id)
        return self._rank.report.failed.get(request_id, "")

    def wait_for_first_byte(self, block: int, value: int) -> None:
        """Until a copy into this block has begun."""
        wait_for(lambda: self._rank.caches["a"][block, 0] == value, "the copy's first byte")

    def clear(self) -> None:
        for cache in self._rank.caches.values():
            cache[:] = 0

    def holds(self, block: int, value: int) -> bool:
        """Whether this is every byte of a block."""
        return self._rank.holds(block, value)

    def close(self) -> None:
        self._rank.worker.shutdown()

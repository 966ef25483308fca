"""A D rank in a process of its own, on the vendor's names, obeying the test over a pipe."""

from __future__ import annotations

import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from fakes.rank_process import RankProcess, serve
from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.metadata import Job


class DecodeProcess(RankProcess):
    """The test's end. Methods are those of ``Remote`` below; ``open`` comes first."""

    module = "fakes.decode_process"

    def __init__(self) -> None:
        super().__init__(0)


class Remote:
    """What the other process does."""

    endpoint: WorkerEndpoint | None = None
    """Nobody dials a D."""

    def __init__(self, fill: int, options: dict[str, Any]) -> None:
        self._rank: Any = None
        self._violations: list[str] = []
        threading.excepthook = lambda args: self._violations.append(repr(args.exc_value))

    def open(self, layout: str, **options: Any) -> None:
        """A new rank, its memory zeroed."""
        from fakes.push_rank import PushRank

        self.close()
        self._rank = PushRank("kv_consumer", layout, **options)  # type: ignore[arg-type]

    def slow_down(self, bytes_per_second: int) -> None:
        """This process copies what is pushed into it."""
        from vllm_llmdd_connector.datadist import _engine

        _engine.testing.set_copy_rate(bytes_per_second)

    def step(self, jobs: list[Job], cancels: dict[str, str]) -> None:
        self._rank.step(jobs=jobs, cancels=cancels)

    def wait(self, *request_ids: str) -> tuple[set[str], dict[str, str]]:
        """Until these are reported; then all that were, and the failed ones' reasons."""
        from fakes.rank import run

        run(self._rank, *request_ids)
        return self._rank.received, self._rank.report.failed

    def reported(self) -> set[str]:
        """After another step."""
        self._rank.step()
        return set(self._rank.reported)

    def fill(self, blocks: list[int], value: int) -> None:
        for block in blocks:
            self._rank.fill(block, value)

    def abort_and_fill(self, request_id: str, blocks: list[int], value: int) -> None:
        """Abort it, and write into its blocks as soon as vLLM may."""
        from fakes.rank import run

        self._rank.step(cancels={request_id: ""})
        run(self._rank, request_id)
        self.fill(blocks, value)

    def holds(self, blocks: list[int], value: int) -> bool:
        """Whether every byte of these blocks is this one."""
        return all(
            bool((tensor[blocks] == value).all())
            for tensors in self._rank.tensors.values()
            for tensor in tensors
        )

    def digests(self, *blocks: int) -> dict[str, list[str]]:
        digests: dict[str, list[str]] = self._rank.digests(*blocks)
        return digests

    def num_threads(self) -> int:
        return len(self._rank.worker._peers)

    def violations(self) -> list[str]:
        return self._violations

    def close(self) -> None:
        if self._rank is not None:
            self._rank.worker.shutdown()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), Remote)

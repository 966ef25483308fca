"""A P in a process of its own, obeying the test over a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from vllm_llmdd_connector.control.messages import AskSums, Message, WorkerEndpoint
from vllm_llmdd_connector.metadata import PullJob

TESTS = Path(__file__).resolve().parents[1]
VENDOR = TESTS / "vendor"
ANSWER_S = 90.0


class Caller:
    """The test's end of a pipe to ``serve``."""

    _pipe: Connection

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._pipe.send((name, args, kwargs))
        return self._result()

    def _result(self, within_s: float = ANSWER_S) -> Any:
        assert self._pipe.poll(within_s), "the rank's process does not answer"
        succeeded, value = self._pipe.recv()
        assert succeeded, value
        return value


class RankProcess(Caller):
    """The test's end. Methods are those of ``Remote`` below."""

    module = "fakes.rank_process"

    def __init__(self, fill: int, **options: Any) -> None:
        self._pipe, theirs = Pipe()
        path = [str(VENDOR), str(TESTS), *filter(None, sys.path)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        theirs.close()
        self._pipe.send((fill, options))
        self.endpoint: WorkerEndpoint = self._result()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Returns when the process has stopped."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process in order, if it still runs."""
        if self._process.poll() is None:
            self.resume()
            self._pipe.close()
            assert self._process.wait(ANSWER_S) == 0
        self._pipe.close()


class Remote:
    """What the other process does."""

    def __init__(self, fill: int, options: dict[str, Any]) -> None:
        self._open(fill, options)

    def _open(self, fill: int, options: dict[str, Any]) -> None:
        from fakes.rank import Prefill, Rank

        rank = Rank("kv_producer", fill, **options)
        options.pop("block_bytes", None)
        self.p = Prefill(rank, **options)
        self.endpoint = self.p.rank.endpoint

    def reopen(self, fill: int, options: dict[str, Any]) -> WorkerEndpoint:
        """Another rank in this process, which the test's end has to be told of."""
        self.close()
        self._open(fill, options)
        return self.endpoint

    def hold(self, claim_id: int) -> PullJob:
        """An order to fetch a prompt's blocks 1 and 2 into blocks 5 and 4."""
        job = self.p.hold(claim_id)
        self.p.step()
        return job

    def push(self, number: int) -> None:
        self.p.push(number)

    def control_port(self) -> int:
        """Of the scheduler side."""
        return self.p.server.port

    def flip_before_answer(self, layer: str, block: int, offset: int) -> None:
        """One bit of P's memory changes before the next question for checksums is looked at."""
        sums = self.p.rank.worker._lease_sums
        assert sums is not None
        handle = sums.handle

        def flipped(message: AskSums, reply: Callable[[Message], None]) -> None:
            sums.handle = handle  # type: ignore[method-assign]
            self.p.rank.caches[layer][block, offset] ^= 1
            handle(message, reply)

        sums.handle = flipped  # type: ignore[method-assign]

    def mute_sums(self) -> None:
        """No checksum is ever ready."""
        thread = self.p.rank.worker._sum_thread
        assert thread is not None
        thread._sum_region = lambda job: None  # type: ignore[method-assign]

    def num_leases(self) -> int:
        """Leases that no release has ended."""
        self.p.producer.free_ended()
        return self.p.producer.num_leases

    def close(self) -> None:
        self.p.close()


def serve(pipe: Connection, make: Callable[..., Any]) -> None:
    """Obey until the test closes its end."""
    try:
        remote = make(*pipe.recv())
        pipe.send((True, remote.endpoint))
    except Exception as error:
        pipe.send((False, repr(error)))
        raise
    while True:
        try:
            name, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, getattr(remote, name)(*args, **kwargs)))
        except Exception as error:
            pipe.send((False, repr(error)))
    remote.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), Remote)

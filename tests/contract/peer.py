"""A helper process that runs one `Cluster` and obeys the test over a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from contract.engines import VENDOR_PATH

_ANSWER_S = 30.0
# Until then more memory may be registered.
_TRAFFIC = frozenset(
    {
        *("check_link_status", "finalize", "link", "link_members", "pull_blocks", "pull_cache"),
        *("push_blocks", "push_cache", "switch_role", "transfer", "unlink"),
    }
)


class Peer:
    """The test's end. Attribute access gives the methods of the `Cluster` in the other process.

    The process is reused by later tests: `create` gives it a new cluster, `release` ends it.
    """

    cluster_id: int
    listen_port: int

    def __init__(self, *wrapper: str) -> None:
        """`wrapper` is a command that runs the rest of its arguments in its place."""
        self._pipe, theirs = Pipe()
        self.before_traffic: Callable[[], None] | None = None
        tests = str(Path(__file__).resolve().parents[1])
        self._process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "contract.peer", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([VENDOR_PATH, tests, *filter(None, sys.path)]),
            },
        )
        theirs.close()

    def create(self, cluster_id: int, **options: Any) -> None:
        self.cluster_id = cluster_id
        self.before_traffic = None
        self.call("create", cluster_id, **options)
        self.listen_port = self.call("port")

    def release(self) -> bool:
        """Whether the process can be used again."""
        if self._process.poll() is not None:
            return False
        self.before_traffic = None
        self.resume()  # a failed test may have left it stopped
        self.call("discard")
        return True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.call(name, *args, **kwargs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.start(name, *args, **kwargs)
        return self.result()

    def start(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Begin a call; `result` waits for it."""
        if name in _TRAFFIC:
            self.connect()
        self._pipe.send((name, args, kwargs))

    def result(self) -> Any:
        assert self._pipe.poll(_ANSWER_S), "the helper process does not answer"
        succeeded, value = self._pipe.recv()
        if not succeeded:
            raise value
        return value

    def connect(self) -> None:
        """Make the links that were put off until there is traffic."""
        if self.before_traffic is not None:
            self.before_traffic()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Returns when the process has stopped."""
        self.connect()
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.connect()
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process in order, if it still runs; its exit code must then be 0."""
        if self._process.poll() is None:
            self._pipe.close()
            assert self._process.wait(_ANSWER_S) == 0
        self._pipe.close()


def _serve(pipe: Connection) -> None:
    from contract.cluster import Cluster
    from contract.first_cluster import FirstCluster

    cluster: Cluster | None = None
    while True:
        try:
            name, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            if name == "create":
                cluster = (FirstCluster if "role" in kwargs else Cluster)(*args, **kwargs)
                answer: Any = None
            else:
                answer = getattr(cluster, name)(*args, **kwargs)
            pipe.send((True, answer))
        except Exception as error:
            pipe.send((False, error))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))

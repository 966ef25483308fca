"""A process of a benchmark that obeys calls over a pipe: `serve` there, `Process` here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any


def serve(pipe: Connection, make: Callable[..., Any]) -> None:
    """Obey a Process; `make` is called with what it was given to start."""
    worker: Any = None
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if name == "start":
                worker = make(*arguments)
            pipe.send((True, None if name == "start" else getattr(worker, name)(*arguments)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


class Process:
    """The coordinator's end of a worker, which `command` runs when it is told its pipe."""

    def __init__(
        self,
        command: Sequence[str],
        *start: Any,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [*command, "--worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=sys.stderr,
            env={**os.environ, **(environment or {})},
        )
        theirs.close()
        self.call("start", *start)

    def call(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self.end()

    def begin(self, name: str, *arguments: Any) -> None:
        """A call whose `end` is waited for later."""
        self._pipe.send((name, arguments))

    def end(self) -> Any:
        succeeded, answer = self._pipe.recv()
        if not succeeded:
            raise RuntimeError(answer)
        return answer

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self._pipe.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

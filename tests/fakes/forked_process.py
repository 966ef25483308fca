"""As ``RankProcess``, forked from a process that has imported all: for tests that kill many."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from fakes.rank_process import ANSWER_S, Caller, serve
from vllm_llmdd_connector.control.messages import WorkerEndpoint

_START_S = 300.0
"""The first one imports vLLM."""


@contextmanager
def _fork_server() -> Iterator[Any]:
    """The server is started with the first process, and finds these modules by ``PYTHONPATH``."""
    path = [str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(dict.fromkeys(path))):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fakes.rank"])
        yield context


class ForkedProcess(Caller):
    """The test's end. ``make`` is a class as ``rank_process.Remote``, whose methods it calls."""

    def __init__(self, make: Callable[..., Any], fill: int, **options: Any) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        with _fork_server() as server:
            self._process = server.Process(target=serve, args=(theirs, make), daemon=True)
            self._process.start()
        self._is_over = False
        theirs.close()
        self._pipe.send((fill, options))
        self.endpoint: WorkerEndpoint = self._result(_START_S)

    def kill(self) -> None:
        """Nothing of it is left here, either."""
        self._process.kill()
        self._process.join()
        self._forget()

    def close(self) -> None:
        """End the process in order, if it still runs."""
        if self._is_over:
            return
        self._pipe.close()
        self._process.join(ANSWER_S)
        assert self._process.exitcode == 0
        self._forget()

    def _forget(self) -> None:
        self._is_over = True
        self._pipe.close()
        self._process.close()

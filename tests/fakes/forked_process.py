"""As ``RankProcess``, forked from a process that has imported all: for tests that kill many."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes.rank_process import serve
from vllm_llmdd_connector.control.messages import WorkerEndpoint

_START_S, _ANSWER_S = 600.0, 90.0
"""The first one imports vLLM."""


def _fork_server() -> Any:
    path = [str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fakes.rank"])
    return context


class ForkedProcess:
    """The test's end. ``make`` is a class as ``rank_process.Remote``, whose methods it calls."""

    def __init__(self, make: Callable[..., Any], fill: int, **options: Any) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = _fork_server().Process(target=serve, args=(theirs, make), daemon=True)
        self._process.start()
        self._is_over = False
        theirs.close()
        self._pipe.send((fill, options))
        self.endpoint: WorkerEndpoint = self._result(_START_S)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._pipe.send((name, args, kwargs))
        return self._result(_ANSWER_S)

    def _result(self, within_s: float) -> Any:
        assert self._pipe.poll(within_s), "the rank's process does not answer"
        succeeded, value = self._pipe.recv()
        assert succeeded, value
        return value

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
        self._process.join(_ANSWER_S)
        assert self._process.exitcode == 0
        self._forget()

    def _forget(self) -> None:
        self._is_over = True
        self._pipe.close()
        self._process.close()

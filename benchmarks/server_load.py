"""Servers under load: a closed loop of some requests at a time, by `vllm bench serve`.

The client needs ten seconds to load, so one process runs it again and again. It also prepares its
prompts before it asks anything, and some servers spin meanwhile: their processor time is sampled
all along, and what counts is from the first request to the last answer. The client's clock and ours
are the same, the monotonic one.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from worker_process import Process, serve

if TYPE_CHECKING:
    from server_arms import Arm

_SAMPLE_S = 0.05
_LOG_TAIL = 2000


class LoadError(Exception):
    """A client failed, or some of its requests did."""


@dataclass(frozen=True)
class Load:
    """What one client asks for."""

    concurrency: int
    requests: int
    tokens: int
    output_tokens: int

    def words(self, url: str, model: Path, result: Path, seed: int) -> list[str]:
        """The client's command line."""
        options = {
            "backend": "openai",
            "base-url": url,
            "model": model,
            "dataset-name": "random",
            "random-input-len": self.tokens,
            "random-output-len": self.output_tokens,
            "num-prompts": self.requests,
            "max-concurrency": self.concurrency,
            "seed": seed,
            "temperature": 0,
            "request-id-prefix": f"load-{uuid.uuid4()}-",
            "result-dir": result.parent,
            "result-filename": result.name,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [*words, "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]


@dataclass(frozen=True)
class LoadSample:
    """One run of the client."""

    requests_per_s: float
    cpu_s_per_request: float
    first_token_ms: list[float]
    """Of each request."""
    inter_token_ms: list[float]
    """Between the parts of each answer that came one after the other."""


@dataclass
class CpuLog:
    """Samples a growing number of processor seconds in a thread, while it is entered."""

    read_s: Callable[[], float]
    _times_s: list[float] = field(default_factory=list)
    _used_s: list[float] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> CpuLog:
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def add(self, time_s: float, used_s: float) -> None:
        self._times_s.append(time_s)
        self._used_s.append(used_s)

    def used_s(self, begin_s: float, end_s: float) -> float:
        """Between two times of the monotonic clock; to the next sample of each."""
        return self._at(end_s) - self._at(begin_s)

    def _at(self, time_s: float) -> float:
        return self._used_s[min(bisect.bisect_left(self._times_s, time_s), len(self._used_s) - 1)]

    def _sample(self) -> None:
        while True:
            self.add(time.monotonic(), self.read_s())
            if self._ended.wait(_SAMPLE_S):
                return


def read_result(result: Mapping[str, Any], load: Load, log: CpuLog) -> LoadSample:
    """What a client's result file says; LoadError where requests failed or answers are short."""
    if result["completed"] != load.requests:
        errors = next((error for error in result["errors"] if error), "")
        raise LoadError(f"{result['completed']} of {load.requests} requests succeeded: {errors}")
    wanted = load.requests * load.output_tokens
    if result["total_output_tokens"] != wanted:
        raise LoadError(f"{result['total_output_tokens']} of {wanted} tokens came")
    ends = [
        start + first + sum(gaps)
        for start, first, gaps in zip(
            result["start_times"], result["ttfts"], result["itls"], strict=True
        )
    ]
    begin, end = min(result["start_times"]), max(ends)
    return LoadSample(
        requests_per_s=load.requests / (end - begin),
        cpu_s_per_request=log.used_s(begin, end) / load.requests,
        first_token_ms=[1000 * first for first in result["ttfts"]],
        inter_token_ms=[1000 * gap for gaps in result["itls"] for gap in gaps],
    )


class Client:
    """The other process: vLLM's client, loaded once."""

    def __init__(self, log: str) -> None:
        from vllm.benchmarks.serve import add_cli_args, main
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        self._log, self._main = Path(log), main
        self._parser = FlexibleArgumentParser()
        add_cli_args(self._parser)

    def run(self, words: list[str]) -> None:
        with self._log.open("w") as log, contextlib.redirect_stdout(log):
            self._main(self._parser.parse_args(words))


class LoadClient:
    """Our end of the client."""

    def __init__(self, process: Process, folder: Path, log: Path) -> None:
        self._process, self._folder, self._log = process, folder, log

    def run(self, arm: Arm, load: Load, model: Path, seed: int) -> LoadSample:
        """One run against an arm; LoadError with the end of the client's log when it fails."""
        result = self._folder / f"load-{uuid.uuid4()}.json"
        words = load.words(arm.url, model, result, seed)
        with arm.turn(), CpuLog(arm.cpu_s) as cpu:
            try:
                self._process.call("run", words)
            except (RuntimeError, EOFError) as error:
                tail = self._log.read_text(errors="replace")[-_LOG_TAIL:]
                raise LoadError(f"{arm.name}: vllm bench serve: {error!r}. {tail}") from error
        try:
            return read_result(json.loads(result.read_text()), load, cpu)
        except LoadError as error:
            raise LoadError(f"{arm.name}, {load.concurrency} at a time: {error}") from error


@contextlib.contextmanager
def load_client(folder: Path) -> Iterator[LoadClient]:
    """It is ended on exit."""
    log = folder / "load.log"
    log.touch()
    process = Process(
        (sys.executable, str(Path(__file__).resolve())),
        str(log),
        environment={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    try:
        yield LoadClient(process, folder, log)
    finally:
        process.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[2])), Client)

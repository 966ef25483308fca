"""Servers under load: a closed loop of some requests at a time, by `vllm bench serve`.

The client is a process that needs seconds to load, and some servers spin while nothing is asked. So
the servers' processor time is sampled all along, and what counts is from the first request to the
last answer; the client's clock and ours are the same, the monotonic one.
"""

from __future__ import annotations

import bisect
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

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

    def command(self, url: str, model: Path, result: Path, seed: int) -> list[str]:
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
        vllm = str(Path(sys.executable).with_name("vllm"))
        flags = ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
        return [vllm, "bench", "serve", *words, *flags]


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


def run_load(arm: Arm, load: Load, model: Path, folder: Path, seed: int) -> LoadSample:
    """One client's run against an arm; LoadError with the end of its log when it fails."""
    result, output = folder / f"load-{uuid.uuid4()}.json", folder / "load.log"
    command = load.command(arm.url, model, result, seed)
    with arm.turn(), CpuLog(arm.cpu_s) as log, output.open("wb") as sink:
        code = _wait(command, sink.fileno())
    if code != 0 or not result.exists():
        tail = output.read_text(errors="replace")[-_LOG_TAIL:]
        raise LoadError(f"{arm.name}: vllm bench serve ended with status {code}. {tail}")
    try:
        return read_result(json.loads(result.read_text()), load, log)
    except LoadError as error:
        raise LoadError(f"{arm.name}, {load.concurrency} at a time: {error}") from error


def _wait(command: Sequence[str], sink: int) -> int:
    """Run a command; it ends with this process's wait, whatever the reason."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with subprocess.Popen(command, stdout=sink, stderr=sink, env=environment) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise

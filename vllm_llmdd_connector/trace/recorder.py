"""Option ``trace_dir``: one process's events, written as a Chrome trace while they happen.

Any thread records; a thread of the recorder's own writes. Between the two lies a ring, so that a
slow disk costs events (the oldest, and they are counted) and neither memory nor time. The file is
the array form of Chrome's trace format, in which the closing bracket may be missing: a process may
be killed at any moment. When the file has reached its bound, what follows is counted as dropped.
"""

import contextlib
import json
import os
import re
import threading
import time
from collections import deque
from itertools import count
from pathlib import Path
from typing import IO, Any, Protocol

from vllm_llmdd_connector.errors import ConfigError
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.trace.clock import clock_domain

logger = get_logger(__name__)

FORMAT = 1
"""Of the events' arguments; ``reader`` refuses another."""
MAX_WAITING = 65_536
"""Events of the ring."""
MAX_FILE_BYTES = 256 << 20
COLLECT_S = 0.2
"""Events are written this long after the first of them: a killed process loses no more."""


class Trace(Protocol):
    """Where events go. Times are nanoseconds of the monotonic clock; the default is now."""

    def event(self, name: str, at_ns: int | None = None, **args: Any) -> None: ...
    def span(self, name: str, begin_ns: int, end_ns: int, **args: Any) -> None: ...


class NoTrace:
    """Tracing is off."""

    def event(self, name: str, at_ns: int | None = None, **args: Any) -> None:
        pass

    def span(self, name: str, begin_ns: int, end_ns: int, **args: Any) -> None:
        pass


NO_TRACE = NoTrace()

_Entry = tuple[str, int, int | None, dict[str, Any]]


class Recorder:
    """Writes one file until ``close``."""

    def __init__(
        self,
        folder: str,
        role: str,
        engine_id: str,
        process: str,
        *,
        max_waiting: int = MAX_WAITING,
        max_file_bytes: int = MAX_FILE_BYTES,
        **facts: Any,
    ) -> None:
        """``process``: ``scheduler`` or ``rank N``; ``facts`` go to the file's first event.

        Raises:
            ConfigError: the folder cannot be written.
        """
        self._entries: deque[_Entry] = deque(maxlen=max_waiting)
        self._max_file_bytes = max_file_bytes
        self._changed = threading.Condition()
        self._num_dropped = 0
        self._num_told = 0
        self._is_closed = False
        self._pid = os.getpid()
        # vLLM may have scheduler and workers in one process: a viewer keeps them apart by this.
        self._lane = 0 if process == "scheduler" else 1 + int(process.rpartition(" ")[2])
        self._span_ids = count(1)
        self.path, self._file = _create(folder, role, engine_id, process)
        self._num_bytes = 0
        self._write(self._head(role, engine_id, process, facts))
        self._thread = threading.Thread(target=self._run, name="llmdd-trace", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Events that are not in the file and will not be."""
        return self._num_dropped

    def event(self, name: str, at_ns: int | None = None, **args: Any) -> None:
        """Something happened at a moment."""
        self._add((name, time.monotonic_ns() if at_ns is None else at_ns, None, args))

    def span(self, name: str, begin_ns: int, end_ns: int, **args: Any) -> None:
        """Something took from one moment to another."""
        self._add((name, begin_ns, end_ns, args))

    def close(self) -> None:
        """Write what is left and end the array; idempotent. Later events are dropped."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        with contextlib.suppress(OSError), self._file:
            self._write_all(is_last=True)
            self._file.write(b"\n]\n")

    def _add(self, entry: _Entry) -> None:
        with self._changed:
            if self._is_closed:
                self._num_dropped += 1
                return
            if len(self._entries) == self._entries.maxlen:
                self._num_dropped += 1
            self._entries.append(entry)
            if len(self._entries) == 1:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._entries or self._is_closed)
                if self._is_closed:
                    return
                self._changed.wait_for(lambda: self._is_closed, COLLECT_S)
            try:
                self._write_all()
            except Exception:
                logger.exception("trace %s: nothing more is written", self.path)
                self._max_file_bytes = 0
                return

    def _write_all(self, is_last: bool = False) -> None:
        with self._changed:
            entries = list(self._entries)
            self._entries.clear()
            if self._num_bytes >= self._max_file_bytes:
                self._num_dropped += len(entries)
                entries = []
            num_dropped = self._num_dropped
        lines = [line for entry in entries for line in self._lines(entry)]
        if num_dropped != self._num_told and (entries or is_last):
            # A file may have several of these: the last one counts.
            self._num_told = num_dropped
            lines.append(self._line("i", "dropped", time.monotonic_ns(), {"number": num_dropped}))
        self._write(lines)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        """One write for whole events: a kill leaves none of them in halves."""
        text = ",\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
        if not text:
            return
        data = ((",\n" if self._num_bytes else "[\n") + text).encode()
        self._file.write(data)
        self._file.flush()
        self._num_bytes += len(data)

    def _lines(self, entry: _Entry) -> list[dict[str, Any]]:
        name, begin_ns, end_ns, args = entry
        if end_ns is None:
            return [self._line("i", name, begin_ns, args)]
        span_id = next(self._span_ids)
        begin = {**self._line("b", name, begin_ns, args), "cat": name, "id": span_id}
        end = {**self._line("e", name, end_ns, {}), "cat": name, "id": span_id}
        return [begin, end]

    def _line(self, phase: str, name: str, at_ns: int, args: dict[str, Any]) -> dict[str, Any]:
        line = {"name": name, "ph": phase, "ts": at_ns / 1000, "pid": self._pid, "tid": self._lane}
        if phase == "i":
            line["s"] = "t"
        if args:
            line["args"] = args
        return line

    def _head(
        self, role: str, engine_id: str, process: str, facts: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Names for the viewer, and what ``reader`` knows the file by."""
        known = {
            "format": FORMAT,
            "role": role,
            "engine_id": engine_id,
            "process": process,
            "pid": self._pid,
            "clock": clock_domain(),
            **facts,
        }
        now_ns = time.monotonic_ns()
        return [
            self._line("i", "llmdd_trace", now_ns, known),
            self._line("M", "process_name", now_ns, {"name": f"{role} {engine_id}"}),
            self._line("M", "thread_name", now_ns, {"name": process}),
        ]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def open_trace(
    folder: str, role: str, engine_id: str, process: str, **facts: Any
) -> Recorder | None:
    """The recorder that option ``trace_dir`` asks for; None when it is off."""
    return Recorder(folder, role, engine_id, process, **facts) if folder else None


def _create(folder: str, role: str, engine_id: str, process: str) -> tuple[Path, IO[bytes]]:
    """A new file; a restarted server's has another process id, or the next number."""
    words: list[str] = [re.sub(r"[^A-Za-z0-9.]+", "_", word) for word in (role, engine_id, process)]
    stem = "-".join([*(word[:64] for word in words), str(os.getpid())])
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in count():
            path = Path(folder) / (f"{stem}-{number}.json" if number else f"{stem}.json")
            try:
                # Transfer ids are secrets while they live.
                return path, open(path, "xb", opener=_private)
            except FileExistsError:
                continue
    except OSError as error:
        raise ConfigError(f"trace_dir: cannot write to {folder}: {error}") from None
    raise AssertionError("unreachable")

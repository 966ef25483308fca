"""Reads one trace file, whole or without its end."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_llmdd_connector.trace.recorder import FORMAT

HEAD = "llmdd_trace"


class TraceError(Exception):
    """The files do not make a picture; the text says why in a sentence."""


@dataclass(frozen=True, slots=True)
class Event:
    """A moment, or with ``end_ns`` a span; nanoseconds of the file's clock."""

    name: str
    at_ns: int
    end_ns: int | None
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TraceFile:
    """One process's events in the order in which they were written."""

    path: Path
    engine_id: str
    process: str
    clock: str
    """Files with the same have times that can be compared."""
    facts: dict[str, Any]
    events: list[Event]
    num_dropped: int
    has_end: bool

    @property
    def notes(self) -> Iterator[str]:
        """What a reader of the picture should know."""
        if not self.has_end:
            yield f"{self.path}: has no end; its process was killed or still runs"
        if self.num_dropped:
            yield f"{self.path}: {self.num_dropped} events are missing, the disk was too slow"


def read_file(path: Path) -> TraceFile:
    """Read one file.

    Raises:
        TraceError: it cannot be read, is no JSON or no trace of ours, or is empty.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    lines, has_end = _parse(path, text)
    head = next((line for line in lines if line.get("name") == HEAD), None)
    if head is None:
        raise TraceError(
            f"{path}: is no trace of this connector, or was cut off before its first event"
        )
    try:
        facts = head["args"]
        if facts["format"] != FORMAT:
            raise TraceError(
                f"{path}: has format {facts['format']}, this program reads {FORMAT}; use the "
                "version of the connector that wrote it"
            )
        events, num_dropped = _events(lines)
        return TraceFile(
            path,
            facts["engine_id"],
            facts["process"],
            facts["clock"],
            facts,
            events,
            num_dropped,
            has_end,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{path}: has an event that does not fit: {error!r}") from None


def _parse(path: Path, text: str) -> tuple[list[dict[str, Any]], bool]:
    """The file's objects, and whether it has its end."""
    try:
        whole = json.loads(text)
    except ValueError:
        return _parse_lines(path, text), False
    if isinstance(whole, dict):  # what other tools make of such a file
        whole = whole.get("traceEvents")
    if not isinstance(whole, list) or not all(isinstance(line, dict) for line in whole):
        raise TraceError(f"{path}: is JSON, but no array of events")
    return whole, True


def _parse_lines(path: Path, text: str) -> list[dict[str, Any]]:
    """A file without its end: whole lines, and a last one that may be cut off."""
    first, *lines = text.splitlines() or [""]
    if first.strip() != "[":
        raise TraceError(f"{path}: is no JSON")
    parsed = []
    for number, line in enumerate(lines, 2):
        try:
            value = json.loads(line.strip().removesuffix(","))
        except ValueError:
            if number == len(lines) + 1:
                break
            raise TraceError(f"{path}: line {number} is no JSON") from None
        if not isinstance(value, dict):
            raise TraceError(f"{path}: line {number} is no event")
        parsed.append(value)
    return parsed


def _events(lines: list[dict[str, Any]]) -> tuple[list[Event], int]:
    events: list[Event] = []
    begun: dict[int, dict[str, Any]] = {}
    num_dropped = 0
    for line in lines:
        args = line.get("args", {})
        match line["ph"]:
            case "b":
                begun[line["id"]] = line
            case "e" if line["id"] in begun:
                begin = begun.pop(line["id"])
                event = Event(line["name"], _ns(begin), _ns(line), begin.get("args", {}))
                events.append(event)
            case "i" if line["name"] == "dropped":
                num_dropped = int(args["number"])
            case "i" if line["name"] != HEAD:
                events.append(Event(line["name"], _ns(line), None, args))
    return events, num_dropped


def _ns(line: dict[str, Any]) -> int:
    return round(float(line["ts"]) * 1000)

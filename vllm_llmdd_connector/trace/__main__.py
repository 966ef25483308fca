"""``python -m vllm_llmdd_connector.trace FILES…``: what the traces of P's and D's show together."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_llmdd_connector.trace.merge import Request, merge
from vllm_llmdd_connector.trace.reader import TraceError, TraceFile, read_file
from vllm_llmdd_connector.trace.summary import as_json, as_text, summarize


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 when the files do not make a picture."""
    options = _parse(arguments)
    try:
        files = read_all(options.files)
        requests = _selected(merge(files), options.request)
        if options.png:
            _draw(requests, options.png)
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    summaries = [summarize(request) for request in requests]
    notes = [note for file in files for note in file.notes]
    if options.json:
        print(json.dumps(as_json(summaries, notes), indent=2))
    if options.summary or not (options.json or options.png):
        print(as_text(summaries))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def read_all(paths: Sequence[Path]) -> list[TraceFile]:
    """The files, and of folders all files in them.

    Raises:
        TraceError: one cannot be read, or a folder has none.
    """
    files: dict[Path, TraceFile] = {}
    for path in paths:
        found = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not found:
            raise TraceError(f"{path}: has no *.json; is trace_dir set at the servers?")
        for name in found:
            files[name.resolve()] = read_file(name)
    return list(files.values())


def _selected(requests: list[Request], wanted: str) -> list[Request]:
    if not wanted:
        return requests
    found = [r for r in requests if wanted in (r.transfer, r.request)]
    if not found:
        raise TraceError(f"no request has the id {wanted}; --json lists all of them")
    return found


def _draw(requests: list[Request], path: Path) -> None:
    try:
        from vllm_llmdd_connector.trace.draw import draw
    except ImportError as error:
        raise TraceError(
            f"--png needs matplotlib, which cannot be imported ({error}); pip install matplotlib"
        ) from None
    try:
        num_drawn = draw(requests, path)
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be written: {error}") from None
    if num_drawn < len(requests):
        print(
            f"note: {path} shows {num_drawn} of {len(requests)} requests; choose one with "
            "--request",
            file=sys.stderr,
        )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_llmdd_connector.trace",
        description="Put the traces of prefill and decode servers (option trace_dir) together.",
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILES", help="trace files, or folders of them")
    add("--png", type=Path, help="draw the timeline (needs matplotlib)")
    add("--summary", action="store_true", help="print a table; the default without other options")
    add("--json", action="store_true", help="print the numbers as JSON")
    add("--request", default="", metavar="ID", help="only this request, or transfer id")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

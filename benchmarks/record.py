"""Run every benchmark, keep all lines in one file, draw them.

    python benchmarks/record.py [--only transfer,servers] [--quick]

`make bench` runs this. Lines go to benchmarks/results/DATE.jsonl (UTC; a day's second run to
DATE-2.jsonl) as soon as they come, each with what was run and how loaded the machine was when it
began. A whole run ends by writing docs/performance.md and its figures from that file. With --quick
or --only the lines and figures go to build/bench instead, and no page is written.

A bench that fails is named at the end, with its log; its lines until then stay in the file. One
that this machine cannot run says why and is left out, which is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from report import CANNOT_RUN
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
SCRATCH = ROOT / "build" / "bench"

_STOP_S = 60.0

BLOCKS = ",".join(str(kib << 10) for kib in (4, 16, 64, 96, 256, 1024, 2048))
"""96 KiB is a block of the model that bench_servers.py uses."""
WORKING_SETS_MIB = {1: 0.2, 8: 0.25, 64: 0.5, 1024: 1}
"""Besides the 512 MiB of the bench itself, with the minutes they take."""


@dataclass(frozen=True)
class Run:
    """One command: the bench, its arguments, and the minutes it takes on two idle cores."""

    name: str
    arguments: str
    minutes: float
    quick: str

    def command(self, is_quick: bool) -> list[str]:
        script = BENCHMARKS / f"bench_{self.name}.py"
        words = shlex.split(self.quick if is_quick else self.arguments)
        return [sys.executable, str(script), *words]


def _working_set(mib: int, minutes: float) -> Run:
    arguments = f"--iterations 30 --block-bytes 16384,98304 --working-set-mib {mib}"
    return Run(
        "transfer",
        f"{arguments} --batch-mib {min(mib, 64)}",
        minutes,
        f"--iterations 2 --block-bytes 16384 --working-set-mib {min(mib, 16)} --batch-mib 1",
    )


_TRANSFER = f"--iterations 30 --block-bytes {BLOCKS}"
_QUICK_TRANSFER = "--iterations 2 --block-bytes 4096,65536 --working-set-mib 16 --batch-mib 8"
_TCP = "--tcp --iterations 30 --block-bytes 16384,98304,1048576"
_OVERLAP = "--tokens 512,2048,8192,32768,65536 --rates 0.1,2 --repeats 9"
_QUICK_OVERLAP = "--tokens 512,1024 --rates 2 --repeats 2"

RUNS = (
    Run("transfer", _TRANSFER, 2.5, _QUICK_TRANSFER),
    *(_working_set(*each) for each in WORKING_SETS_MIB.items()),
    Run("transfer", _TCP, 1, f"--tcp {_QUICK_TRANSFER}"),
    Run("steps", "", 0.2, "--steps 20 --rounds 1"),
    Run("datadist", "", 1, "--seconds 0.1"),
    Run("growth", "", 0.3, "--links 1,8 --leases 16"),
    Run("layer_overlap", _OVERLAP, 2, _QUICK_OVERLAP),
    Run("layer_overlap", f"{_OVERLAP} --compute hold", 2, f"{_QUICK_OVERLAP} --compute hold"),
    Run("integrity", "--repeats 11", 0.3, "--blocks 16 --repeats 1"),
    Run("contact", "", 12, "--quick"),
    Run("network", "", 14, "--quick"),
    Run("servers", "", 30, "--quick"),
)
"""The real servers come last: whatever else fails is known before."""


def results_file(folder: Path, day: str) -> Path:
    """A new file's name: the day's, or the first free one of those with a number."""
    names = (f"{day}.jsonl", *(f"{day}-{number}.jsonl" for number in range(2, 1000)))
    return next(folder / name for name in names if not (folder / name).exists())


def with_facts(text: str, facts: dict[str, Any]) -> str | None:
    """The line of a bench with what this run knows; None for what is no result line."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return json.dumps({**line, "run": facts}) if isinstance(line, dict) else None


def last_line(log: Path) -> str:
    """Of a bench's log: why it was left out."""
    return next(iter(log.read_text().splitlines()[-1:]), "")


class Recorder:
    """Runs commands one after the other into one file."""

    def __init__(
        self, results: Path, logs: Path, is_quick: bool, progress: Progress, minutes: float
    ) -> None:
        self._results, self._logs, self._is_quick = results, logs, is_quick
        self._progress = progress
        self._all = progress.add_task("all", total=60 * minutes, said="")
        self.failed: list[str] = []
        results.parent.mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)

    def run(self, number: int, run: Run) -> None:
        log = self._logs / f"{number:02}-{run.name}.log"
        command = run.command(self._is_quick)
        title = " ".join([run.name, *command[2:]])
        task = self._progress.add_task(run.name, total=60 * run.minutes, said="")
        began = time.monotonic()
        facts = {
            "command": " ".join([Path(command[1]).name, *command[2:]]),
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "load": round(os.getloadavg()[0], 2),
            "quick": self._is_quick,
        }
        num_lines, code = self._execute(command, log, facts, task)
        self._progress.remove_task(task)
        self._progress.advance(self._all, 60 * run.minutes)
        ended = f"{title}: {num_lines} lines in {time.monotonic() - began:.0f} s"
        if code == CANNOT_RUN and num_lines == 0:
            ended += f", left out: {last_line(log)}"
        elif code != 0 or num_lines == 0:
            ended += f", failed with status {code}, log in {log}"
            self.failed.append(ended)
        self._progress.console.print(ended, markup=False, highlight=False, soft_wrap=True)

    def _execute(
        self, command: Sequence[str], log: Path, facts: dict[str, Any], task: TaskID
    ) -> tuple[int, int]:
        """The number of lines that came, and the exit status."""
        num_lines = 0
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            follow = (process.stderr, log, task)
            said = threading.Thread(target=self._follow, args=follow, daemon=True)
            said.start()
            try:
                with self._results.open("a") as results:
                    for text in process.stdout:
                        line = with_facts(text, facts)
                        if line is not None:
                            num_lines += 1
                            print(line, file=results, flush=True)
                code = process.wait()
            except BaseException as error:
                # All benches stop what they have started on SIGINT, which a terminal's Ctrl-C has
                # sent to them as well; another one would disturb that.
                if not isinstance(error, KeyboardInterrupt):
                    process.send_signal(signal.SIGINT)
                _wait_end(process)
                raise
            said.join()
        return num_lines, code

    def _follow(self, stderr: IO[str], log: Path, task: TaskID) -> None:
        began = time.monotonic()
        with log.open("w") as sink:
            for text in stderr:
                print(text, end="", file=sink, flush=True)
                passed = time.monotonic() - began
                self._progress.update(task, completed=passed, said=text.strip()[:60])


def _wait_end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def _exit_on_terminate(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def chosen(only: str) -> list[Run]:
    """The runs of the named benches; ValueError for a name that none has."""
    names = only.split(",") if only else [run.name for run in RUNS]
    known = dict.fromkeys(run.name for run in RUNS)
    if unknown := set(names) - known.keys():
        raise ValueError(
            f"no bench named {', '.join(sorted(unknown))}; there are: {', '.join(known)}"
        )
    return [run for run in RUNS if run.name in names]


def record(runs: Sequence[Run], results: Path, is_quick: bool, console: Console) -> list[str]:
    """Run them; gives what failed, in words."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}", markup=False),
    )
    with Progress(*columns, console=console) as progress:
        minutes = sum(run.minutes for run in runs)
        recorder = Recorder(results, SCRATCH / "logs", is_quick, progress, minutes)
        for number, run in enumerate(runs, 1):
            recorder.run(number, run)
    return recorder.failed


def draw(results: Path, to_docs: bool) -> int:
    """Call figures.py, and give its exit status."""
    command = [sys.executable, str(BENCHMARKS / "figures.py"), str(results)]
    return subprocess.run([*command, *(["--docs"] if to_docs else [])], check=False).returncode


def parse(arguments: Sequence[str]) -> tuple[list[Run], bool, bool]:
    """The runs, whether they are quick, and whether they are all there are."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = ", ".join(dict.fromkeys(run.name for run in RUNS))
    parser.add_argument("--only", default="", metavar="NAME,…", help=f"of {names}")
    parser.add_argument("--quick", action="store_true", help="few of each; figures mean nothing")
    options = parser.parse_args(arguments)
    try:
        runs = chosen(options.only)
    except ValueError as error:
        parser.error(f"--only: {error}")
    return runs, options.quick, not options.only


def main(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _exit_on_terminate)
    runs, is_quick, is_whole = parse(arguments)
    of_record = is_whole and not is_quick
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    results = results_file(RESULTS if of_record else SCRATCH, day)
    console = Console(stderr=True)
    if not is_quick:
        minutes = sum(run.minutes for run in runs)
        console.print(f"about {minutes:.0f} minutes, on a machine that does nothing else")
    failed = record(runs, results, is_quick, console)
    for failure in failed:
        console.print(f"failed: {failure}", style="red", markup=False, soft_wrap=True)
    console.print(f"results are in {results}", markup=False, soft_wrap=True)
    if not results.exists():
        return 1
    if failed and of_record:
        console.print("docs/performance.md is left as it is; benchmarks/figures.py writes it")
    return draw(results, of_record and not failed) or int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Real vLLM servers that meet for the first time: what their first request waits for.

    python benchmarks/bench_contact.py [--turns 9] [--arms …]
    python benchmarks/bench_contact.py --quick

Each turn starts a new P, D and proxy for every arm, one after the other. Both servers answer a
request alone first, so that only what is between them is new; prompts are random tokens. Each vLLM
server has one processor to itself, as in bench_servers.py, and the arms are among that one's.

A line per arm: the first request's time to its first token, that of the ones after it, and turn by
turn the difference between the first one and the median of the others.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from report import Report, quantiles
from server_arms import (
    Arm,
    Servers,
    Setup,
    length_arguments,
    raise_on_terminate,
    start_arms,
)
from server_options import ServerOptions
from server_requests import measure, shifted

BENCH = "contact"
ARMS = ("pull", "push", "nixl")
TOKENS, OUTPUT_TOKENS = 256, 3
MAX_NUM_BATCHED_TOKENS = 2048
QUICK = {"turns": 1, "warm_requests": 1}


@dataclass(frozen=True)
class Options:
    arms: Sequence[str]
    turns: int
    warm_requests: int
    """After the first one between two servers."""
    model: Path

    def first_token_ms(self, arm: Arm) -> float:
        return measure(arm, self.model, TOKENS, OUTPUT_TOKENS).first_token_ms


@dataclass
class Case:
    """One arm; `warm_ms` of all turns, the others of each."""

    settings: Mapping[str, str] = field(default_factory=dict)
    first_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)
    over_warm_ms: list[float] = field(default_factory=list)

    def add(self, first_ms: float, warm_ms: list[float]) -> None:
        self.first_ms.append(first_ms)
        self.warm_ms += warm_ms
        self.over_warm_ms.append(first_ms - median(warm_ms))


def meet(arm: Arm, options: Options, case: Case) -> None:
    for alone in arm.alone():
        options.first_token_ms(alone)
    first = options.first_token_ms(arm)
    case.add(first, [options.first_token_ms(arm) for _ in range(options.warm_requests)])


def run(options: Options, work: Path, report: Report) -> dict[str, Case]:
    cases = {name: Case() for name in options.arms}
    arguments = length_arguments(TOKENS + OUTPUT_TOKENS + 1, MAX_NUM_BATCHED_TOKENS)
    setup = Setup(options.model, arguments, work / "times")
    for turn in range(options.turns):
        for name in shifted(options.arms, turn):
            with Servers(work, report.progress) as servers:
                [arm] = start_arms(servers, setup, [name])
                cases[name].settings = arm.settings
                meet(arm, options, cases[name])
            report.progress(f"turn {turn + 1} of {options.turns}, {name}")
    return cases


def report_cases(report: Report, cases: dict[str, Case]) -> None:
    rows = []
    for name, case in cases.items():
        fields = {
            "first_contact_ms": quantiles(case.first_ms),
            "warm_ms": quantiles(case.warm_ms),
            "over_warm_ms": quantiles(case.over_warm_ms),
        }
        report.line(BENCH, name, **case.settings, tokens=TOKENS, **fields)
        rows.append([name, *(figure["p50"] for figure in fields.values())])
    report.table(["arm", "first_contact_ms", "warm_ms", "over_warm_ms"], rows)


def parse() -> Options:
    parser = ServerOptions(__doc__, ARMS, QUICK)
    parser.add("--turns", type=int, default=9, help="default: %(default)s")
    parser.add("--warm-requests", type=int, default=5, help="of a turn; default: %(default)s")
    read = parser.read()
    return Options(read.arms, read.turns, read.warm_requests, read.model)


def main() -> int:
    options = parse()
    raise_on_terminate()
    report = Report()
    work = Path(tempfile.mkdtemp(prefix="bench_contact-"))
    with ExitStack() as on_failure:
        on_failure.callback(report.progress, f"logs are in {work}")
        report_cases(report, run(options, work, report))
        on_failure.pop_all()
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())

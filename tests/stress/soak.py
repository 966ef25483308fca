"""Constant load on real servers for a long time: whatever could grow has to stay flat.

    python tests/stress/soak.py [--minutes 30] [--plot soak.png] [--json soak.jsonl]

P, two D and two proxies answer prompts with known answers, by push and by pull. Meanwhile each vLLM
server's resident memory, open files and threads are read; memory that a server shares with others
is left out, because a D counts P's blocks as soon as it has read them. Afterwards the last third of
the run is compared with the first one (the first tenth is warm-up): memory may grow by 3 %, open
files and threads by 5, the latency by a half: its 99th percentile, or the median in a run that is
too short for one. Exit status 1 when something grew more, a lease stayed open, or an answer was not
right.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from fleet import DECODES, FLOWS, Fleet, Server, Servers, Times, raise_on_terminate
from flow import Pair, num_open_leases
from traffic import Traffic, make_questions

NUM_CLIENTS = 3
PATIENT = Times(first_contact=60, request=180, lease=30)
"""So that a busy machine causes no error."""
SAMPLES = 180
"""In the whole run, however long it is."""
ENOUGH_FOR_P99 = 300
"""Requests in a third; of fewer, the slowest would decide."""
LIMITS: dict[str, Callable[[float], float]] = {
    "rss_mib": lambda first: first * 1.03 + 8,
    "open_files": lambda first: first + 5,
    "threads": lambda first: first + 5,
}


@dataclass(frozen=True)
class Sample:
    """One server at one moment; sums over its processes."""

    at_s: float
    server: str
    rss_mib: float
    open_files: int
    threads: int


def sample(server: Server, at_s: float) -> Sample:
    rss_kib = open_files = threads = 0
    for pid in server.pids():
        with contextlib.suppress(OSError, KeyError):  # it has just ended
            status = Path(f"/proc/{pid}/status").read_text()
            facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            rss_kib += int(facts["VmRSS"].split()[0]) - int(facts["RssShmem"].split()[0])
            threads += int(facts["Threads"])
            open_files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Sample(round(at_s, 1), server.spec.name, rss_kib / 1024, open_files, threads)


def watch(fleet: Fleet, seconds: float, report: Callable[[str], None]) -> list[Sample]:
    samples: list[Sample] = []
    start_s = time.monotonic()
    for turn in range(SAMPLES):
        due_s = start_s + (turn + 1) * seconds / SAMPLES
        time.sleep(max(0.0, due_s - time.monotonic()))
        at_s = time.monotonic() - start_s
        samples += [sample(server, at_s) for server in fleet.by_name.values()]
        if turn % 20 == 19:
            memory = ", ".join(f"{s.server} {s.rss_mib:.0f} MiB" for s in samples[-3:])
            report(f"{at_s:.0f} of {seconds:.0f} s: {memory}")
    return samples


def thirds(values: Sequence[tuple[float, float]], end_s: float) -> tuple[list[float], list[float]]:
    """Of (time, value): the values of the first third after the warm-up, and of the last."""
    begin_s = end_s / 10
    third_s = (end_s - begin_s) / 3
    first = [value for at_s, value in values if begin_s <= at_s < begin_s + third_s]
    last = [value for at_s, value in values if at_s >= end_s - third_s]
    return first, last


def what_grew(samples: Sequence[Sample], seconds: float) -> list[str]:
    problems = []
    for name in sorted({s.server for s in samples}):
        for figure, limit in LIMITS.items():
            values = [(s.at_s, float(getattr(s, figure))) for s in samples if s.server == name]
            first, last = (median(part) for part in thirds(values, seconds))
            if last > limit(first):
                problems.append(f"{figure} of {name} grew from {first:.0f} to {last:.0f}")
    return problems


def slower(latencies: Sequence[tuple[float, float]], seconds: float) -> tuple[str, list[str]]:
    """What is compared as a text, and the problem, if any."""
    parts = thirds(latencies, seconds)
    percent = 99 if min(map(len, parts)) >= ENOUGH_FOR_P99 else 50
    first, last = (sorted(part)[percent * (len(part) - 1) // 100] for part in parts)
    text = f"latency p{percent} {first:.2f} s in the first third, {last:.2f} s in the last"
    return text, [text] if last > 1.5 * first else []


def draw(path: Path, samples: Sequence[Sample], latencies: Sequence[tuple[float, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(9, 11), sharex=True)
    for panel, name in zip(axes, LIMITS, strict=False):
        for server in sorted({s.server for s in samples}):
            mine = [s for s in samples if s.server == server]
            panel.plot([s.at_s for s in mine], [getattr(s, name) for s in mine], label=server)
        panel.set_ylabel(name)
        panel.set_ylim(bottom=0)
    axes[0].legend(loc="lower right")
    axes[3].plot(*zip(*sorted(latencies), strict=True), ".", markersize=2)
    axes[3].set_ylabel("latency, s")
    axes[3].set_xlabel("seconds under load")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    arguments = _parse()
    raise_on_terminate()
    start_s = time.monotonic()
    seconds = arguments.minutes * 60

    def report(line: str) -> None:
        print(f"{time.monotonic() - start_s:6.1f} s  {line}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        work = Path(folder)
        with Servers(work / "logs", report) as servers:
            fleet = Fleet(servers, work, PATIENT, report)
            questions = make_questions(fleet.prefill, 24, 1)
            proxies = [fleet.proxies[flow] for flow in FLOWS]
            traffic = Traffic(proxies, questions, seed=1, impatient=0.0)
            load_s = time.monotonic()
            traffic.start(NUM_CLIENTS)
            try:
                samples = watch(fleet, seconds, report)
            finally:
                traffic.stop()
            pair = Pair(fleet.prefill, fleet.by_name[DECODES[0]], Path())
            num_leases = num_open_leases(pair)
    outcomes = traffic.outcomes
    latencies = [(sent_s - load_s, took_s) for sent_s, took_s in outcomes.latencies_s]
    problems = [*outcomes.details, *what_grew(samples, seconds)]
    latency_text, slow = slower(latencies, seconds)
    problems += slow
    if num_leases:
        problems.append(f"{num_leases:.0f} leases are open after the last request")
    if outcomes.counts["error"]:
        problems.append(f"{outcomes.counts['error']} requests ended in errors")
    if arguments.json:
        lines = [json.dumps(asdict(s)) for s in samples]
        arguments.json.write_text("\n".join(lines) + "\n")
    if arguments.plot:
        draw(arguments.plot, samples, latencies)
    for problem in problems:
        print(problem)
    print(
        f"soak: {outcomes.total} requests in {seconds:.0f} s, {outcomes.counts['right']} right; "
        f"{latency_text}; {len(problems)} problems"
    )
    return 1 if problems else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--minutes", type=float, default=30, help="default: %(default)s")
    add("--plot", type=Path, help="draw the samples here (PNG)")
    add("--json", type=Path, help="write the samples here, a JSON line each")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Simulates prefill and decode engines under faults, in virtual time.

``run.py --requests 20000 --seed 1`` runs worlds 1:0, 1:1, ... until they have served so many
requests; ``run.py --replay 1:17`` runs one of them again, the same event by event, and writes its
journal. Every world is drawn from its name alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "scripted"), str(HERE.parent)]
ENVIRONMENT = {
    # Sets of strings in vLLM: their order is part of what a seed decides.
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
if __name__ == "__main__" and any(os.environ.get(k) != v for k, v in ENVIRONMENT.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)

import msgspec  # noqa: E402
from world_report import summary, total  # noqa: E402
from world_verdict import Verdict  # noqa: E402

WORLD_REQUESTS = 250
MAX_FAILED_WORLDS = 5
"""A process stops after so many: the next ones would tell the same."""
JOURNALS = Path("build") / "chaos"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument("--replay", metavar="WORLD", help="run this world only, as 1:17")
    parser.add_argument("--share", metavar="FIRST,STEP", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replay:
        verdicts = [_run(args.replay, keep_journal=True)]
        print(f"journal digest {verdicts[0].digest}")
    elif args.share:
        first, step = map(int, args.share.split(","))
        for verdict in _worlds(args.seed, args.requests, first, step):
            print(msgspec.json.encode(verdict).decode(), flush=True)
        return 0
    else:
        verdicts = list(_side_by_side(args.seed, args.requests, args.jobs))
    whole = total(verdicts)
    print(summary(whole, len(verdicts)))
    return 1 if whole.problems else 0


def _worlds(seed: int, num_requests: int, first: int, step: int) -> Iterator[Verdict]:
    """Every ``step``-th world until there were enough requests, or problems."""
    index, num_failed = first, 0
    while num_requests > 0 and num_failed < MAX_FAILED_WORLDS:
        verdict = _run(f"{seed}:{index}")
        num_requests -= verdict.num_requests
        num_failed += bool(verdict.problems)
        index += step
        yield verdict


def _run(name: str, keep_journal: bool = False) -> Verdict:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
        from plan import draw_settings
        from world import CAN_REPORT_WINDOWS, run_world
    logging.getLogger("vllm").addHandler(logging.NullHandler())
    from journal import Journal

    settings = draw_settings(name, WORLD_REQUESTS, windows=CAN_REPORT_WINDOWS)
    journal = Journal()
    with tempfile.TemporaryDirectory() as directory:
        verdict = run_world(settings, Path(directory), journal)
    if verdict.problems or keep_journal:
        path = JOURNALS / f"{name.replace(':', '-')}.txt"
        journal.note(verdict.virtual_s, repr(settings))
        journal.write(path)
        print(f"world {name}: journal in {path}", file=sys.stderr)
    for problem in verdict.problems:
        print(f"world {name}: {problem}", file=sys.stderr)
    if verdict.problems:
        print(f"world {name}: again with: {sys.argv[0]} --replay {name}", file=sys.stderr)
    return verdict


def _side_by_side(seed: int, num_requests: int, num_jobs: int) -> Iterator[Verdict]:
    """As many processes as there are jobs, each with every ``num_jobs``-th world."""
    share = -(-num_requests // num_jobs)
    arguments = [__file__, "--seed", str(seed), "--requests", str(share)]

    def run(index: int) -> list[Verdict]:
        command = [sys.executable, *arguments, "--share", f"{index},{num_jobs}"]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        return [msgspec.json.decode(line, type=Verdict) for line in lines.splitlines()]

    with ThreadPoolExecutor(num_jobs) as pool:
        for verdicts in pool.map(run, range(num_jobs)):
            yield from verdicts


if __name__ == "__main__":
    sys.exit(main())

"""Real servers under faults: P, two D and two proxies; kills, stops, restarts, impatient clients.

    python tests/stress/chaos_servers.py [--requests 150] [--seed N]

Requests with known answers go through the push and the pull proxy all the time. Faults come one
after the other, in an order that the seed decides. Every answer has to be right or an error with a
reason; after a restart a prompt has to be handed over again within seconds, without a restart of
the other side; at the end P holds no lease and no server has blocks in use. The seed replays the
plan, not the interleaving. Exit status 1 when something of this does not hold.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fleet import DECODES, FLOWS, PREFILL, Fleet, Servers, Times, raise_on_terminate
from flow import Pair, kv_cache_usage, metrics, num_open_leases
from traffic import Question, Traffic, make_questions

NUM_CLIENTS = 3
IMPATIENT = 0.1
RESUME_S = 15.0
SETTLE_S = 90.0


@dataclass
class Run:
    """One run and what was found wrong."""

    fleet: Fleet
    traffic: Traffic
    questions: list[Question]
    random: random.Random
    report: Callable[[str], None]
    faults: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    resumed_s: list[float] = field(default_factory=list)

    def plan(self) -> list[Callable[[], None]]:
        """Each kind of fault for each server, in a random order."""
        faults: list[Callable[[], None]] = []
        for name in (PREFILL, *DECODES):
            faults.append(lambda name=name: self.stop(name, self.random.uniform(1, 4)))
            faults.append(lambda name=name: self.kill(name))
        faults.append(lambda: self.stop(PREFILL, 25))  # longer than any of a request's deadlines
        faults.append(lambda: self.stop(self.random.choice(DECODES), 15))  # than P's leases
        self.random.shuffle(faults)
        return faults

    def stop(self, name: str, seconds: float) -> None:
        self.faults["stopped"] += 1
        self.fleet.stop_for(name, seconds)

    def kill(self, name: str) -> None:
        self.faults["killed and restarted"] += 1
        self.fleet.kill(name)
        time.sleep(self.random.uniform(0, 5))  # requests meet a server that is gone
        self.fleet.restart(name)
        self.check_resumed(name)

    def check_resumed(self, name: str) -> None:
        """Hand a prompt over to the restarted D, or from the restarted P to each D."""
        for decode in DECODES if name == PREFILL else (name,):
            self._hand_over_to(decode)

    def _hand_over_to(self, name: str) -> None:
        decode = self.fleet.by_name[name]
        pair = Pair(self.fleet.prefill, decode, Path())
        before = metrics(decode).get("recv_requests", 0)
        start_s = time.monotonic()
        body = {**self.questions[0].body, "cache_salt": f"resumed-{start_s}"}
        while time.monotonic() < start_s + RESUME_S:
            params = pair.prefill(**body)["kv_transfer_params"]
            pair.decode(params, **body)
            if metrics(decode).get("recv_requests", 0) > before:
                took_s = time.monotonic() - start_s
                self.resumed_s.append(took_s)
                self.report(f"{name}: handed over again after {took_s:.1f} s")
                return
        self.problems.append(f"{name} got no prompt from P within {RESUME_S:.0f} s of a restart")

    def check_at_rest(self) -> None:
        """Nothing is held any more."""
        pair = Pair(self.fleet.prefill, self.fleet.by_name[DECODES[0]], Path())
        held: dict[str, float] = {}
        deadline_s = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline_s:
            held = {"open leases": num_open_leases(pair)}
            for name, server in self.fleet.by_name.items():
                held[f"KV cache usage of {name}"] = kv_cache_usage(server)
            if not any(held.values()):
                return
            time.sleep(0.5)
        self.problems.append(f"still held after {SETTLE_S:.0f} s: {held}")

    def check_unexpected_ends(self) -> None:
        for name, server in self.fleet.by_name.items():
            if server.process.poll() is not None:
                self.problems.append(f"{name} ended by itself. {server.tail(10)}")


def run_all(run: Run, num_requests: int) -> None:
    """Requests go on until all faults have come and ``num_requests`` have ended."""
    run.traffic.start(NUM_CLIENTS)
    plan = run.plan()
    for done, fault in enumerate(plan):
        run.traffic.wait_for_total(done * num_requests // len(plan))
        fault()
        run.check_unexpected_ends()
    run.traffic.wait_for_total(num_requests)
    run.traffic.stop()
    run.check_at_rest()


def summary(run: Run) -> str:
    counts = run.traffic.outcomes.counts
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(run.faults.items()))
    resumed = max(run.resumed_s, default=0.0)
    longest = run.traffic.outcomes.longest_error_s
    return (
        f"chaos-servers: {counts.total()} requests, {counts['right']} right, "
        f"{counts['error']} clean errors (the longest after {longest:.1f} s), "
        f"{counts['gone']} clients gone, {counts['wrong']} wrong, {counts['hung']} hung; {faults}; "
        f"handed over again within {resumed:.1f} s of a restart; "
        f"{len(run.problems)} other problems"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=150, help="at least; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    arguments = parser.parse_args()
    raise_on_terminate()
    start_s = time.monotonic()

    def report(line: str) -> None:
        print(f"{time.monotonic() - start_s:6.1f} s  {line}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="chaos-servers-") as folder:
        work = Path(folder)
        with Servers(work / "logs", report) as servers:
            fleet = Fleet(servers, work, Times(), report)
            questions = make_questions(fleet.prefill, 12, arguments.seed)
            proxies = [fleet.proxies[flow] for flow in FLOWS]
            traffic = Traffic(proxies, questions, arguments.seed, IMPATIENT)
            run = Run(fleet, traffic, questions, random.Random(arguments.seed), report)
            try:
                run_all(run, arguments.requests)
            finally:
                traffic.stop()
    for line in [*run.traffic.outcomes.details, *run.problems]:
        print(line)
    print(f"{summary(run)}; seed {arguments.seed}, {time.monotonic() - start_s:.0f} s")
    counts = run.traffic.outcomes.counts
    return 1 if run.problems or counts["wrong"] or counts["hung"] else 0


if __name__ == "__main__":
    sys.exit(main())

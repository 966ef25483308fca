"""The engine and the control plane under faults: P and two D's in three processes, without vLLM.

    python tests/stress/chaos_engine.py [--transfers 2000] [--seed N]

Pushes and pulls go over the same links while processes are killed, stopped and restarted, messages
are lost and delayed, requests aborted and preempted, and copies slow. D checks every block it is
given and every block it gave up. Every transfer has to end once and by its deadline; at the end
nothing is held, and processes that lived have the threads, descriptors and memory they began with.
The seed replays the plan, not the interleaving. Exit status 1 when something of this does not hold.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos_fleet import ANSWER_S, DECODES, PREFILL, ChaosFleet, Process
from chaos_plan import Fault, Plan, Transfer
from engine_process import Leg, State
from zmtp_relay import HOST

MAX_IN_FLIGHT = 12
DEAD_PAUSE_S = 0.1
"""Between two transfers that begin while P is dead."""
PREFILL_S = 10.0
HANG_S = 12.0
"""The limits of every stage at D one after the other, and 4 s for a loaded machine."""
RECOVER_S = 10.0
SETTLE_S = 15.0
CUT_S = 3.0
MAX_LINKS = 4
MAX_GROWN_KIB = 16 * 1024
TICK_S = 0.02


@dataclass
class Findings:
    """What a run has seen."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    num_wrong: int = 0
    num_hung: int = 0
    leaks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    """From a fault to the end of a transfer that was under way."""

    @property
    def is_clean(self) -> bool:
        return not (self.num_wrong or self.num_hung or self.leaks or self.problems)

    def summary(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        return (
            f"chaos-engine: {self.ends.total()} transfers ({ends}); faults: {faults}; "
            f"{self.num_wrong} wrong blocks, {self.num_hung} hangs, {len(self.leaks)} leaks, "
            f"{len(self.problems)} other problems; at most {self.longest_s:.1f} s from a fault to "
            "a transfer's end"
        )


class ChaosRun:
    """One run: transfers that begin, faults that come, and what the processes tell of them."""

    def __init__(self, fleet: ChaosFleet, plan: Plan) -> None:
        self.fleet = fleet
        self.plan = plan
        self.findings = Findings()
        self._dice = random.Random(plan.seed)
        self._transfers: dict[int, Transfer] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._num_timers = 0
        self._states: dict[str, State] = {}
        self._baseline: dict[str, dict[str, int]] = {}
        self._last_begin_s = 0.0
        self._slow_down(plan.copy_rate, *DECODES)

    # The course of a run

    def warm_up(self) -> None:
        """Every pair of servers has met; what they have open afterwards is the measure."""
        self.check_recovered("at the begin")
        self.check_nothing_left()
        self._baseline = {name: state.resources for name, state in self._states.items()}

    def run(self) -> None:
        """All transfers of the plan, and its faults among them."""
        for transfer in self.plan.transfers(self._dice):
            while len(self._transfers) >= MAX_IN_FLIGHT or self._must_pause():
                self.tick()
            self._begin(transfer)
            fault = self.plan.fault_after(transfer.number, self._dice)
            if fault is not None:
                self._strike(fault)
            self.tick(0.0)
        while self._transfers or self._timers:
            self.tick()

    def check_recovered(self, when: str = "after the faults") -> None:
        """One push and one pull arrive at each D."""
        for name in DECODES:
            for flow in ("push", "pull"):
                end = self._plain_end(name, flow)
                if end != f"{flow} received":
                    self.findings.problems.append(f"{when}: no {flow} to {name} arrives: {end}")

    def _plain_end(self, name: str, flow: str) -> str:
        """The end of a transfer that nothing happens to; it may be tried again."""
        deadline_s = time.monotonic() + RECOVER_S
        while True:
            transfer = self.plan.plain_transfer(name, flow)
            self._begin(transfer)
            while not transfer.end:
                self.tick()
            if transfer.end == f"{flow} received" or time.monotonic() > deadline_s:
                return transfer.end

    def check_nothing_left(self) -> None:
        """First no request, lease, claim or reservation, then no link, thread or descriptor."""
        self.findings.leaks += self._left(lambda name, state: state.held, SETTLE_S)
        self._cut_all()
        for _ in range(MAX_LINKS):
            # A side gives back what an ended link had when it makes the next one.
            self._plain_end(DECODES[0], "pull")
            left = self._cut_all()
            if not left:
                break
        self.findings.leaks += left
        for name in DECODES:
            self.fleet.by_name[name].order("check_canaries")
        self._look()
        for name, state in self._states.items():
            if state.grown_kib > MAX_GROWN_KIB:
                self.findings.leaks.append(f"{name} has grown by {state.grown_kib} KiB")

    def _cut_all(self) -> list[str]:
        self.fleet.cut()
        return self._left(lambda name, state: {**state.links, **self._surplus(name, state)}, CUT_S)

    def _surplus(self, name: str, state: State) -> dict[str, int]:
        before = self._baseline.get(name, state.resources)
        return {what: max(0, state.resources[what] - before[what]) for what in before}

    def _left(self, count: Callable[[str, State], dict[str, int]], patience_s: float) -> list[str]:
        """What is left of what ``count`` counts, if it does not become 0 in time."""
        deadline_s = time.monotonic() + patience_s
        while True:
            self._look()
            found = [
                f"{name} has {number} {what} left"
                for name, state in self._states.items()
                for what, number in count(name, state).items()
                if number
            ]
            if not found or time.monotonic() > deadline_s:
                return found
            self.tick()

    def _look(self) -> None:
        self._states = {}
        for process in self.fleet.by_name.values():
            process.order("look")
        deadline_s = time.monotonic() + ANSWER_S
        while self._states.keys() != self.fleet.by_name.keys():
            assert time.monotonic() < deadline_s, "a process gives no account of itself"
            self.tick()

    def tick(self, longest_s: float = TICK_S) -> None:
        """Take what the processes tell, and do what is due."""
        by_pipe: dict[Any, str] = {p.pipe: name for name, p in self.fleet.by_name.items()}
        for pipe in wait(list(by_pipe), longest_s):
            try:
                while pipe.poll():  # type: ignore[union-attr]
                    self._on_event(by_pipe[pipe], *pipe.recv())  # type: ignore[union-attr]
            except (EOFError, OSError):
                self.findings.problems.append(f"{by_pipe[pipe]} ended by itself")
                self._kill(by_pipe[pipe], 0.0)
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
        self._find_hung()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._num_timers += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._num_timers, action))

    # Transfers

    def _must_pause(self) -> bool:
        is_dead = PREFILL not in self.fleet.by_name
        return is_dead and time.monotonic() < self._last_begin_s + DEAD_PAUSE_S

    def _begin(self, transfer: Transfer) -> None:
        self._last_begin_s = time.monotonic()
        transfer.deadline_s = self._last_begin_s + PREFILL_S
        self._transfers[transfer.number] = transfer
        self._after(transfer.p_delay_s, lambda: self._ask_prefill(transfer))
        if transfer.flow == "push":
            params = {
                "do_remote_prefill": True,
                "transfer_id": transfer.transfer_id,
                "remote_host": HOST,
                "remote_port": self.fleet.scheduler_relay.port,
            }
            self._after(transfer.d_delay_s, lambda: self._ask_decode(transfer, params))

    def _ask_prefill(self, transfer: Transfer) -> None:
        process = self.fleet.by_name.get(PREFILL)
        if process is None:
            if transfer.flow == "pull":
                self._end(transfer, "not prefilled")
            return
        params: dict[str, Any] = {"do_remote_decode": True}
        if transfer.flow == "push":
            params["transfer_id"] = transfer.transfer_id
        is_slow = transfer.p_is_slow
        process.order("add", Leg(transfer.number, transfer.num_tokens, params, is_slow=is_slow))
        transfer.is_at_prefill = True
        if transfer.p_abort_s is not None:
            self._after(transfer.p_abort_s, lambda: self._abort(process, transfer))

    def _ask_decode(self, transfer: Transfer, params: dict[str, Any]) -> None:
        if transfer.decode not in self.fleet.by_name:
            transfer.decode = DECODES[0]
        process = self.fleet.by_name[transfer.decode]
        leg = Leg(transfer.number, transfer.num_tokens, params, transfer.num_local_blocks)
        process.order("add", leg)
        transfer.is_at_decode = True
        transfer.deadline_s = time.monotonic() + HANG_S
        if transfer.d_abort_s is not None:
            self._after(transfer.d_abort_s, lambda: self._abort(process, transfer))

    def _abort(self, process: Process, transfer: Transfer) -> None:
        if not transfer.end:
            self.findings.faults["aborted"] += 1
            process.order("abort", transfer.number)

    def _on_event(self, name: str, kind: str, *facts: Any) -> None:
        match kind, *facts:
            case "state", state:
                self._states[name] = state
            case "wrong", number, detail:
                self.findings.num_wrong += number
                self.findings.problems.append(f"{name}: wrong: {detail}")
            case "preempted", _:
                self.findings.faults["preempted"] += 1
            case "problem", detail:
                self.findings.problems.append(f"{name}: {detail}")
            case "prefilled", number, params:
                transfer = self._transfers.get(number)
                if transfer is not None and transfer.flow == "pull":
                    self._on_prefilled(transfer, params)
            case "ended", number, end, _:
                transfer = self._transfers.get(number)
                if transfer is None:
                    self.findings.problems.append(f"{name}: transfer {number} ended again: {end}")
                else:
                    self._end(transfer, f"{transfer.flow} {end}")

    def _on_prefilled(self, transfer: Transfer, params: dict[str, Any] | None) -> None:
        transfer.is_at_prefill = False
        if params is None:
            self._end(transfer, "not handed over")
            return
        params["remote_port"] = self.fleet.scheduler_relay.port
        transfer.deadline_s += transfer.d_delay_s
        self._after(transfer.d_delay_s, lambda: self._ask_decode(transfer, params))

    def _end(self, transfer: Transfer, end: str) -> None:
        self._transfers.pop(transfer.number, None)
        transfer.end = end
        self.findings.ends[end] += 1
        if transfer.first_fault_s:
            took_s = time.monotonic() - transfer.first_fault_s
            self.findings.longest_s = max(self.findings.longest_s, took_s)

    def _find_hung(self) -> None:
        now_s = time.monotonic()
        for transfer in [t for t in self._transfers.values() if t.deadline_s < now_s]:
            self.findings.num_hung += 1
            self.findings.problems.append(f"hung: {transfer}")
            self._end(transfer, "hung")

    # Faults

    def _strike(self, fault: Fault) -> None:
        relay = self._dice.choice(self.fleet.relays)  # also when nothing follows, for the seed
        if fault.server and fault.server not in self.fleet.by_name:
            return
        self.findings.faults[fault.kind] += 1
        now_s = time.monotonic()
        for transfer in self._transfers.values():
            transfer.first_fault_s = transfer.first_fault_s or now_s
        match fault.kind:
            case "killed":
                self._kill(fault.server, fault.seconds)
            case "stopped":
                self._stop(fault.server, fault.seconds)
            case "cut":
                relay.cut()
            case "messages lost":
                relay.loss = fault.amount
                self._after(fault.seconds, lambda: setattr(relay, "loss", 0.0))
            case "messages delayed":
                relay.delay_s = fault.amount
                self._after(fault.seconds, lambda: setattr(relay, "delay_s", 0.0))
            case "copies slow":
                self._slow_down(int(fault.amount), fault.server)
                self._after(
                    fault.seconds, lambda: self._slow_down(self.plan.copy_rate, fault.server)
                )

    def _kill(self, name: str, dead_s: float) -> None:
        self.fleet.kill(name)
        for transfer in list(self._transfers.values()):
            if transfer.decode == name and transfer.is_at_decode:
                self._end(transfer, "died")
            elif name == PREFILL and transfer.flow == "pull" and transfer.is_at_prefill:
                self._end(transfer, "not prefilled")
        self._after(dead_s, lambda: self._restart(name))

    def _restart(self, name: str) -> None:
        self.fleet.start(name)
        if name != PREFILL:
            self._slow_down(self.plan.copy_rate, name)

    def _stop(self, name: str, seconds: float) -> None:
        process = self.fleet.by_name[name]
        if process.is_stopped:
            return
        process.stop()
        for transfer in self._transfers.values():
            if name == transfer.decode or not transfer.is_at_decode:
                transfer.deadline_s += seconds
        self._after(seconds, process.resume)

    def _slow_down(self, rate: int, *names: str) -> None:
        for name in names:
            if name in self.fleet.by_name:
                self.fleet.by_name[name].order("slow_down", rate)


def chaos(plan: Plan, keeps_reservations: bool = False) -> Findings:
    """A whole run. ``keeps_reservations`` breaks D's protection, to show that it is noticed; what
    is left at the end is not looked at then."""
    fleet = ChaosFleet(plan.seed, keeps_reservations)
    run = ChaosRun(fleet, plan)
    try:
        if keeps_reservations:
            run.run()
        else:
            run.warm_up()
            run.run()
            run.check_recovered()
            run.check_nothing_left()
    finally:
        statuses = fleet.close()
    wrong = {name: status for name, status in statuses.items() if status != 0}
    if wrong:
        run.findings.problems.append(f"exit statuses {wrong}")
    return run.findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transfers", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    arguments = parser.parse_args()
    start_s = time.monotonic()
    findings = chaos(Plan(arguments.transfers, arguments.seed))
    for line in [*findings.problems, *findings.leaks]:
        print(line)
    took_s = time.monotonic() - start_s
    print(f"{findings.summary()}; seed {arguments.seed}, {took_s:.0f} s")
    return 0 if findings.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())

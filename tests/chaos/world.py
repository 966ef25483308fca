"""One simulated world: engines, their clients, faults, and the checks that go on all the time."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from audit import audit, unwatched
from engine_model import SimDataDist
from engines import Leg, Life
from faults import Disturber
from harness import VERSION, EngineSpec
from hub import Hub, Process
from install import installed
from journal import Journal
from network import Network
from plan import Settings
from push_journal import PushJournal
from sim_metaserver import SimMetaserverClient
from world_traffic import Traffic
from world_verdict import Verdict

CONNECTOR: dict[str, Any] = {
    "connector": "LLMDataDistConnector",
    "module_path": "vllm_llmdd_connector.connector",
}
LEG_LIMIT_S = 40.0
"""No request may take longer: queues and all deadlines of the connector one after the other."""
SETTLE_S = 50.0
"""Until every lease, idle thread and late message of the connector is over."""
DRAIN_LIMIT_S = 600.0
"""A small cache that leases of lost D's fill takes some prompts per lease time."""
REST_S = 2.0
START_LIMIT_S = 5.0


class World:
    """Everything that runs in one hub."""

    def __init__(
        self,
        settings: Settings,
        directory: Path,
        hub: Hub,
        network: Network,
        datadist: SimDataDist,
        journal: PushJournal,
    ) -> None:
        self.settings = settings
        self.hub = hub
        self.network = network
        self.datadist = datadist
        self.push_journal = journal
        self.proxy = Process("proxy")
        self.verdict = Verdict(settings.seed)
        self.lives: list[Life] = []
        """The last start of each engine, P's first."""
        self.past: list[Life] = []
        self.disturber = Disturber(self)
        self.traffic = Traffic(self)
        self._directory = directory

    # Engines

    @property
    def ps(self) -> list[Life]:
        return self.lives[: self.settings.num_p]

    @property
    def ds(self) -> list[Life]:
        return self.lives[self.settings.num_p :]

    def start_engine(self, index: int, generation: int = 0) -> None:
        """Start an engine, or start it again as another process."""
        settings = self.settings
        is_p = index < settings.num_p
        fields = settings.common | (settings.p if is_p else settings.d)
        if is_p and settings.fixed_ports:
            fields["extra_config"] = fields["extra_config"] | {"control_port": 10000 + index}
        kind, number = ("P", index) if is_p else ("D", index - settings.num_p)
        spec = EngineSpec(
            **CONNECTOR,
            role="kv_both" if settings.both_roles else "kv_producer" if is_p else "kv_consumer",
            engine_id=f"engine {index}",
            **fields,
        )
        life = Life(self.hub, f"{kind}{number}.{generation}", spec, self._directory)
        life.on_ended = self._ended
        life.on_ready = self._watch
        if index < len(self.lives):
            self.past.append(self.lives[index])
            self.lives[index] = life
        else:
            self.lives.append(life)
        life.start()

    def _watch(self, life: Life) -> None:
        assert life.engine is not None
        for worker in life.engine.workers:
            worker.use_layer_hooks = self.settings.layer_hooks
        self.push_journal.watch(life.engine)

    def note(self, text: str) -> None:
        self.hub.journal.note(self.hub.now_s, text)

    # Requests

    def follow(self, leg: Leg) -> None:
        """See that a leg ends in time."""
        self.hub.call_later(LEG_LIMIT_S, lambda: self._check_time(leg))

    def _check_time(self, leg: Leg) -> None:
        if leg.is_over:
            return
        left_s = leg.submitted_s + LEG_LIMIT_S + self.disturber.stopped_s - self.hub.now_s
        if left_s > 0:
            self.hub.call_later(left_s, lambda: self._check_time(leg))
            return
        state = "of an engine that is gone"
        if leg.life is not None and leg.life.engine is not None:
            state = leg.life.engine.describe()
        self.verdict.hangs.append(f"{leg.request_id} has not ended: {state}")
        self.note(f"{leg.request_id} has not ended: {state}")

    def _ended(self, leg: Leg) -> None:
        verdict = self.verdict
        if leg.role != "d":
            return
        if leg.first_fault_s is not None:
            verdict.longest_s = max(verdict.longest_s, leg.ended_s - leg.first_fault_s)
        verdict.ends[leg.end] = verdict.ends.get(leg.end, 0) + 1
        assert leg.life is not None
        if leg.end == "length":
            expected = self.traffic.reference(leg.prompt, leg.max_tokens)
            if leg.tokens != expected:
                self._wrong(f"{leg.request_id} gave {leg.tokens} instead of {expected}")
        elif leg.end == "error":
            self._check_error(leg)
        elif leg.end not in ("lost", "refused", "aborted"):
            verdict.errors.append(f"{leg.request_id} ended as {leg.end}")

    def _check_error(self, leg: Leg) -> None:
        """An error is what policy ``fail`` makes of a failure, and nothing else."""
        if leg.tokens:
            self._wrong(f"{leg.request_id} gave {leg.tokens} before it failed")
        if leg.life is not None and leg.life.spec.load_failure_policy != "fail":
            self.verdict.errors.append(f"{leg.request_id} failed, but is to be recomputed")
        if self.settings.is_calm:
            self.verdict.errors.append(f"{leg.request_id} failed without a fault")

    def _wrong(self, text: str) -> None:
        self.verdict.wrong.append(text)
        self.note(f"wrong: {text}")

    # The whole

    def run(self) -> Verdict:
        """Start, send all requests, come to rest, and look for what is left."""
        for index in range(self.settings.num_p + self.settings.num_d):
            self.start_engine(index)
        self._run_for(START_LIMIT_S, lambda: all(life.takes_requests for life in self.lives))
        self.disturber.start()
        self.traffic.start()
        self._run_for(
            self.settings.duration_s + 3 * LEG_LIMIT_S + 600.0, lambda: self.traffic.is_over
        )
        self.disturber.end()
        self._settle()
        self._recover()
        self._audit()
        self._close()
        return self._finished()

    @property
    def _is_broken(self) -> bool:
        """Nothing that comes after tells more than the journal so far."""
        return bool(self.hub.errors or self.verdict.hangs)

    def _run_for(self, seconds: float, is_over: Any = lambda: False) -> None:
        end_s = self.hub.now_s + seconds
        self.hub.call_later(seconds, lambda: None)
        self.hub.run(lambda: is_over() or self.hub.now_s >= end_s or self._is_broken)

    def _settle(self) -> None:
        """Let all queues empty, and then deadlines pass."""
        self._run_for(DRAIN_LIMIT_S, lambda: all(life.is_idle for life in self.lives))
        self._run_for(SETTLE_S)

    def _recover(self) -> None:
        """After all that, KV moves again between every two engines; then P's workers are told what
        is over by one more prompt.

        Only a second prompt has to be loaded: by the first one a D learns that a machine has gone
        without a word, and prefills it.
        """
        if self._is_broken:
            return
        for attempt in ("first", "second"):
            before = {life: life.counts.get("recv_requests", 0) for life in self.ds}
            legs = self.traffic.send_between_all(attempt)
            self._run_for(LEG_LIMIT_S, partial(_are_over, legs))
            self._run_for(1.0)
        for life in self.ds:
            received = life.counts.get("recv_requests", 0) - before[life]
            expected = len(self.ps) * life.spec.tp_size
            if received != expected:
                self.verdict.errors.append(
                    f"{life.name} has loaded {received} times instead of {expected}, in calm"
                )
        for life in self.lives:
            self.traffic.send_plain(life)
        self._run_for(SETTLE_S)
        self._rest()

    def _rest(self) -> None:
        """With nothing to do no thread polls faster than ten times a second."""
        before = self.hub.num_switches
        self._run_for(REST_S)
        num_threads = sum(len(life.process.tasks) for life in self.lives)
        number = self.hub.num_switches - before
        if number > 10 * REST_S * num_threads:
            self.verdict.errors.append(f"{num_threads} threads at rest ran {number} times")

    def _audit(self) -> None:
        if self._is_broken:
            return
        for life in self.lives:
            if not life.takes_requests:
                self.verdict.errors.append(f"{life.name} does not serve any more")
                continue
            task = self.hub.start(life.process, partial(self._audit_one, life), "audit")
            task.surroundings = None
        self._run_for(1.0)

    def _audit_one(self, life: Life) -> None:
        for text in audit(life, may_park=self.settings.may_park):
            self.verdict.leaks.append(f"{life.name}: {text}")
            self.note(f"leak: {life.name}: {text}")

    def _close(self) -> None:
        """In good order, and then no thread and no socket is left."""
        if self._is_broken:
            return
        for life in self.lives:
            life.close()
        self._run_for(30.0, lambda: all(life.closed.is_set() for life in self.lives))
        self._run_for(1.0)
        for life in self.lives:
            left = [task.name for task in life.process.tasks]
            if left:
                self.verdict.leaks.append(f"{life.name}: threads after its end: {left}")
        if self.network.num_links:
            self.verdict.leaks.append(f"{self.network.num_links} dialling sockets at the end")

    def _finished(self) -> Verdict:
        verdict = self.verdict
        verdict.errors += self.hub.errors
        verdict.wrong += self.datadist.violations
        verdict.leaks += unwatched(self.datadist)
        verdict.num_requests = sum(verdict.ends.values()) - verdict.ends.get("refused", 0)
        verdict.virtual_s = self.hub.now_s
        verdict.messages = self.network.messages
        for source in (
            self.disturber.num_faults,
            self.network.num_faults,
            self.datadist.num_faults,
            self.traffic.num_faults,
        ):
            for name, amount in source.items():
                verdict.faults[name] = verdict.faults.get(name, 0) + amount
        for life in [*self.past, *self.lives]:
            for name, amount in life.counts.items():
                verdict.counts[name] = verdict.counts.get(name, 0) + amount
        self._check_calm()
        verdict.digest = self.hub.journal.digest
        return verdict

    def _check_calm(self) -> None:
        """Where nothing goes wrong nothing may fail, and no deadline ends what should have ended.

        D may miss a block that P's sliding window has just left, a lease that P refuses because of
        its others, and one that the first try of a request has released before the second came.
        """
        if not self.settings.is_calm:
            return
        counts = self.verdict.counts
        allowed = {
            "failed at block map": counts.get("failed at block map", 0),
            "failed at announce": counts.get("leases_over_cap", 0),
            "failed at claim": self.verdict.faults.get("retry", 0),
        }
        for name, amount in counts.items():
            is_failure = name.startswith("failed at ") or name == "leases_expired"
            if is_failure and amount > allowed.get(name, 0):
                self.verdict.errors.append(f"{name}: {amount} without a fault")


def _are_over(legs: list[Leg]) -> bool:
    return all(leg.is_over for leg in legs)


class _Complaints(logging.Handler):
    """The connector's own log: an exception that it has caught is none that it expected."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(logging.ERROR)
        self._hub = hub

    def emit(self, record: logging.LogRecord) -> None:
        name = "outside" if self._hub.current is None else self._hub.current.process.name
        text = f"{name} logs: {record.getMessage()}"
        if record.exc_info:
            self._hub.errors.append(self._hub.journal.exception(self._hub.now_s, text))
        else:
            self._hub.journal.note(self._hub.now_s, text)


def run_world(settings: Settings, directory: Path, journal: Journal | None = None) -> Verdict:
    """Simulate one world. ``journal`` gets its lines; of an engine's files there are none but its
    model's ``config.json`` in ``directory``."""
    hub = Hub(settings.seed, journal or Journal(), settings.switch_chance)
    network = Network(hub, settings.latency_s)
    logger = logging.getLogger("vllm.vllm_llmdd_connector")
    complaints = _Complaints(hub)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(complaints)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        with (
            installed(hub, network, settings.seed) as datadist,
            pytest.MonkeyPatch.context() as patch,
        ):
            datadist.block_s = settings.block_s
            push_journal = PushJournal(datadist)
            push_journal.install(patch)
            world = World(settings, directory, hub, network, datadist, push_journal)
            patch.setattr(
                "vllm_llmdd_connector.scheduler.scheduler.MetaserverClient",
                lambda connect_timeout_s: SimMetaserverClient(
                    hub, world.traffic.on_post, settings.latency_s
                ),
            )
            return world.run()
    finally:
        hub.abandon()
        logger.removeHandler(complaints)
        logger.setLevel(level)
        logger.propagate = propagates


CAN_REPORT_WINDOWS = VERSION >= (0, 30)
"""Whether this vLLM can be told of a failed load into a sliding window."""

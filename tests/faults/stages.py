"""The stages of a request's life, and what each fault does to the request that is in one.

A row is a message, or a call of the engine, at which the fault strikes; ``Flow`` brings a request
there. Rows before D has blocks end in a local prefill, whatever the failure policy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness import Engine, Result
from pairs import CONNECTOR, MakePair, Pair, prompt_of
from wire import Fault, Wire, cut

from vllm_llmdd_connector.control.messages import (
    Admitted,
    Announce,
    AnyMessage,
    Claim,
    Done,
    Failed,
    Gone,
    Grant,
    Hello,
    Queued,
    Reject,
    Release,
    ReleaseAck,
    Reserve,
    Welcome,
)

PROMPT, NEXT_PROMPT = prompt_of(70), prompt_of(70, 2)


@dataclass(frozen=True)
class Stage:
    """Where a fault strikes."""

    kind: type[Any]
    is_push: bool = False
    has_blocks: bool = False
    """D has allocated blocks, so a failure ends as the policy says."""
    is_repeated: bool = True
    """D says it, or asks for it, again until it is answered."""
    is_optional: bool = False
    """The request goes on without it."""
    d_first: bool = False
    """P's leg comes when D has announced itself, so that D is told to wait for its turn."""


STAGES = {
    "handshake": Stage(Hello),
    "handshake's answer": Stage(Welcome),
    "claim": Stage(Claim),
    "claim's answer": Stage(Grant),
    "announce": Stage(Announce, is_push=True),
    "announce's answer": Stage(Admitted, is_push=True, is_repeated=False),
    "announce's first answer": Stage(Queued, is_push=True, is_optional=True, d_first=True),
    "turn": Stage(Admitted, is_push=True, is_repeated=False, d_first=True),
    "reserve": Stage(Reserve, is_push=True, has_blocks=True, is_repeated=False),
    "done": Stage(Done, is_push=True, has_blocks=True, is_repeated=False),
    "release": Stage(Release, has_blocks=True),
    "release's answer": Stage(ReleaseAck, has_blocks=True),
}


def refused(wire: Wire, message: AnyMessage) -> list[AnyMessage]:
    """P says no instead."""
    match message:
        case Welcome():
            return [Reject(reason="scripted")]
        case Grant() | Queued() | Admitted():
            return [Gone(claim_id=message.claim_id, reason="scripted")]
        case Done():
            return [
                Failed(
                    transfer_id=message.transfer_id,
                    reservation=message.reservation,
                    reason="scripted",
                )
            ]
        case ReleaseAck():
            return [
                ReleaseAck(claim_id=message.claim_id, production=message.production, valid=False)
            ]
        case _:
            raise AssertionError(f"{message} is no answer")


class Scene:
    """One request, a fault on its way, and what both engines hold before and after."""

    def __init__(self, make_pair: MakePair, make_engine: Any, wire: Wire) -> None:
        self.wire = wire
        self._make_engine = make_engine
        self.pair: Pair = make_pair(d={"load_failure_policy": "fail"}, d_clock=wire.d_clock)
        self.request_id = ""

    @property
    def result(self) -> Result:
        return self.pair.d.results[self.request_id]

    def start(self, is_push: bool, d_first: bool = False) -> None:
        pair = self.pair
        if d_first:
            self.request_id = pair.push_after_announcement(PROMPT)
        elif is_push:
            self.request_id = pair.push(PROMPT)
        else:
            self.request_id = pair.decode(PROMPT, pair.params(PROMPT))

    def strike(self, stage: Stage, fault: Fault, until_limit: bool) -> None:
        """The fault is there before the request, which ends by itself or by its limit."""
        self.wire.let(stage.kind, fault)
        self.start(stage.is_push, stage.d_first)
        self.pair.run_until(self.wire.seen.is_set)
        if until_limit:
            self.pair.run_until(self.ends_by_its_limits)
        self.pair.run(self.request_id)

    def stop_p(self, stage: Stage) -> None:
        """P stands still at the stage: D hears nothing more of it."""
        self.wire.let(stage.kind, cut)
        self.start(stage.is_push, stage.d_first)
        self.pair.run_until(self.wire.seen.is_set)

    def ends_by_its_limits(self) -> bool:
        """Whether D's request has ended; if not, the limit that it waits for now is over."""
        if not self.result.finished:
            self.wire.end_waits()
        return self.result.finished

    def end_d(self, by_limits: bool = False) -> None:
        """D alone goes on until its request has ended."""
        if by_limits:
            self.pair.d.run_until(self.ends_by_its_limits)
        self.pair.d.run(self.request_id)

    def restart_p(self) -> None:
        """Another process takes P's address."""
        port = self.pair.p.connector._scheduler._server.port
        self.pair.p.close()
        self.wire.is_cut = False
        restarted: Engine = self._make_engine(
            **CONNECTOR, role="kv_producer", extra_config={"control_port": port}
        )
        old = self.pair
        self.pair = Pair(restarted, old.d, old.network, old.p_clock, old.journal)
        self.pair.journal.watch(restarted)

    def ended_as(self, is_right: bool) -> bool:
        if is_right:
            return self.pair.is_right(PROMPT, self.result)
        return (self.result.finish_reason, self.result.tokens) == ("error", [])

    def check_d(self) -> None:
        """D holds and expects nothing; a request that needs no P is served."""
        d = self.pair.d
        d.drain()
        assert d.free_blocks() == d.initial_free_blocks
        assert not d.connector._scheduler._consumer._requests
        for worker in d.workers:
            assert worker.connector._worker._completions.num_waiting == 0
        assert self.pair.network.open_reservations == []
        assert self.pair.network.violations == []

    def check_p(self) -> None:
        """P holds nothing, at the latest when its own limits are over; and both serve again."""
        pair = self.pair
        pair.run_until(lambda: not (pair.p.has_work or pair.d.has_work))
        pair.p_clock.advance(400)
        pair.finish()
        num_pulls = len(pair.network.pulls)
        assert pair.is_right(NEXT_PROMPT, pair.transfer(NEXT_PROMPT))
        assert len(pair.network.pulls) == num_pulls + 1
        pair.p_clock.advance(400)
        pair.finish()


class Held:
    """An engine call that waits until the test has done something to P."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.seen, self.gate = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        self.seen.set()
        self.gate.wait()
        return self._call(*arguments)

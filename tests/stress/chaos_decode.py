"""D of ``chaos_engine.py``: fetches prompts, checks every block, and uses given-up blocks at once.

A block that nobody has holds a number of its own, its canary, written as soon as the request was
reported. Whatever changes it, or what a request has written behind its prompt, is a wrong block.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from engine_process import MAX_RUNNING, NUM_BLOCKS, EngineProcess, Leg
from fakes.prefiller import make_output
from fakes.requests import make_request
from kv_memory import BLOCK_TOKENS, LAYERS, Pool, num_blocks_of

OWN = 1 << 40
"""Added to a prompt's number for what D itself writes, so that P's bytes are never right there."""
PREEMPTS = 0.02
IDLE_STEP_S = 0.0005


class Stage(Enum):
    WAITING = auto()
    LOADING = auto()
    ABORTED = auto()
    """While it was loading: its blocks are held until it is reported."""
    DECODING = auto()


@dataclass
class Fetched:
    leg: Leg
    request: Any
    stage: Stage = Stage.WAITING
    blocks: list[int] = field(default_factory=list)
    is_loaded: bool = False
    was_placed: bool = False
    num_decoded: int = 0
    num_to_decode: int = 0

    @property
    def num_local(self) -> int:
        return self.leg.num_local_blocks * BLOCK_TOKENS


class DecodeProcess(EngineProcess):
    role = "kv_consumer"

    def __init__(self, pipe: Connection, seed: int, keeps_reservations: bool) -> None:
        super().__init__(pipe, seed)
        self._canaries: dict[int, int] = {}
        self._num_canaries = 0
        self._pool = Pool(NUM_BLOCKS, self._put_canary)
        self._last_owner = ["nobody"] * NUM_BLOCKS
        for block in range(NUM_BLOCKS):
            self._put_canary(block)
        self._requests: dict[str, Fetched] = {}
        self._open_tokens: set[int] = set()
        self._watch_reservations(keeps_reservations)
        assert self.worker.handshake is not None
        self.scheduler.set_handshake({0: self.worker.handshake})
        self.tell("ports", 0, 0)

    def _watch_reservations(self, keeps_reservations: bool) -> None:
        """``keeps_reservations`` breaks what protects D's blocks."""
        engine = self.worker._engine
        assert engine is not None
        open_one, close_one = engine.open_reservation, engine.close_reservation

        def opened(*arguments: Any) -> int:
            token = open_one(*arguments)
            self._open_tokens.add(token)
            return token

        def closed(token: int) -> None:
            if not keeps_reservations:
                close_one(token)
                self._open_tokens.discard(token)

        engine.open_reservation = opened  # type: ignore[method-assign]
        engine.close_reservation = closed  # type: ignore[method-assign]

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, leg: Leg) -> None:
        self.count_request()
        request = make_request(f"d{leg.number}", leg.prompt, leg.params)
        self._requests[request.request_id] = Fetched(leg, request)
        self.scheduler.on_new_request(request)

    def abort(self, number: int) -> None:
        fetched = self._requests.get(f"d{number}")
        if fetched is None or fetched.stage is Stage.ABORTED:
            return
        if fetched.stage is not Stage.LOADING:
            self._end(fetched, "aborted")
            return
        fetched.request.status = SimpleNamespace(name="FINISHED_ABORTED")
        self.scheduler.request_finished(fetched.request, (fetched.blocks,))
        fetched.stage = Stage.ABORTED

    def step(self) -> None:
        self._preempt()
        for fetched in list(self._requests.values()):
            if fetched.stage is Stage.WAITING:
                self._schedule(fetched)
        message = self.scheduler.build_connector_meta(make_output())
        self.worker.apply_voids(message)
        self.worker.bind(message)
        for fetched in list(self._requests.values()):
            if fetched.stage is Stage.DECODING:
                self._decode(fetched)
        self.worker.forward_ended()
        self._take_reports()
        time.sleep(IDLE_STEP_S)

    def _schedule(self, fetched: Fetched) -> None:
        num_running = sum(one.stage is not Stage.WAITING for one in self._requests.values())
        if num_running >= MAX_RUNNING:
            return
        answer = self.scheduler.get_num_new_matched_tokens(fetched.request, fetched.num_local)
        if answer[0] is None:
            return
        needed = num_blocks_of(fetched.leg.num_tokens) + 1
        if needed > len(self._pool.free):
            return
        fetched.blocks = self._pool.take(needed, self.dice.choice)
        for block in fetched.blocks:
            self._check_canary(block)
            self._last_owner[block] = fetched.request.request_id
        self._write_own(fetched, 0, fetched.num_local)
        blocks: Any = SimpleNamespace(get_block_ids=lambda: (fetched.blocks,))
        self.scheduler.update_state_after_alloc(fetched.request, blocks, answer[0])
        if answer[0]:
            if fetched.was_placed:
                self.tell("problem", f"{fetched.request.request_id} was to be loaded twice")
            fetched.stage = Stage.LOADING
        else:
            self._begin_decode(fetched)
        fetched.was_placed = True

    def _take_reports(self) -> None:
        drained = self.worker.poll()
        reported = drained.received | drained.failed.keys()
        self.worker.take_failed_blocks()
        output: Any = SimpleNamespace(
            kv_connector_worker_meta=self.worker.take_report(), finished_recving=reported
        )
        self.scheduler.update_connector_output(output)
        for request_id in reported:
            fetched = self._requests.get(request_id)
            if fetched is None or fetched.stage not in (Stage.LOADING, Stage.ABORTED):
                self.tell("problem", f"{request_id} was reported although nobody waits for it")
            elif fetched.stage is Stage.ABORTED:
                self._forget(fetched, "aborted")
            elif request_id in drained.failed:
                self._end(fetched, "failed", drained.failed[request_id])
            else:
                fetched.is_loaded = True
                self._check_prompt(fetched, "when it was reported")
                self._begin_decode(fetched)

    def _begin_decode(self, fetched: Fetched) -> None:
        """D computes the last token of the prompt, and what follows."""
        fetched.stage = Stage.DECODING
        fetched.num_decoded, fetched.num_to_decode = 0, self.dice.randint(1, BLOCK_TOKENS)

    def _decode(self, fetched: Fetched) -> None:
        if fetched.num_decoded == fetched.num_to_decode:
            self._check_decoded(fetched)
            self._end(fetched, "received" if fetched.is_loaded else "local")
            return
        token = fetched.leg.num_tokens - 1 + fetched.num_decoded
        self._write_own(fetched, token, token + 1)
        fetched.num_decoded += 1

    def _check_decoded(self, fetched: Fetched) -> None:
        if fetched.is_loaded:
            self._check_prompt(fetched, "at its end")
        first = fetched.leg.num_tokens - 1
        for start, end in ((0, fetched.num_local), (first, first + fetched.num_decoded)):
            if start < end:
                own = OWN + fetched.leg.number
                wrong = self.memory.wrong_blocks(own, fetched.blocks, start, end)
                self._report_wrong(fetched.request.request_id, wrong, "D's own tokens")

    def _preempt(self) -> None:
        """D computes such a request itself afterwards."""
        decoding = [one for one in self._requests.values() if one.stage is Stage.DECODING]
        if not decoding or self.dice.random() >= PREEMPTS:
            return
        victim = self.dice.choice(decoding)
        self._check_decoded(victim)
        self._pool.give_back(victim.blocks)
        victim.blocks, victim.is_loaded, victim.stage = [], False, Stage.WAITING
        self.tell("preempted", victim.leg.number)

    def _write_own(self, fetched: Fetched, first: int, end: int) -> None:
        for layer in LAYERS if first < end else ():
            self.memory.write(OWN + fetched.leg.number, layer, fetched.blocks, first, end)

    def _end(self, fetched: Fetched, end: str, reason: str = "") -> None:
        names = {"aborted": "FINISHED_ABORTED", "failed": "FINISHED_ERROR"}
        name = names.get(end, "FINISHED_STOPPED")
        fetched.request.status = SimpleNamespace(name=name)
        self.scheduler.request_finished(fetched.request, (fetched.blocks,))
        self._forget(fetched, end, reason)

    def _forget(self, fetched: Fetched, end: str, reason: str = "") -> None:
        self._pool.give_back(fetched.blocks)
        del self._requests[fetched.request.request_id]
        self.tell("ended", fetched.leg.number, end, reason)

    # What must not change

    def _check_prompt(self, fetched: Fetched, when: str) -> None:
        first, end = fetched.num_local, fetched.leg.num_tokens - 1
        if first < end:
            wrong = self.memory.wrong_blocks(fetched.leg.number, fetched.blocks, first, end)
            self._report_wrong(fetched.request.request_id, wrong, f"its prompt, {when}")

    def _put_canary(self, block: int) -> None:
        self._num_canaries += 1
        self._canaries[block] = -self._num_canaries
        self.memory.fill_all(block, -self._num_canaries)

    def _check_canary(self, block: int) -> None:
        if not self.memory.holds(block, self._canaries[block]):
            self._report_wrong(self._last_owner[block], [block], "after it was given up")

    def _report_wrong(self, request_id: str, blocks: list[int], what: str) -> None:
        if blocks:
            self.tell("wrong", len(blocks), f"{request_id}: blocks {blocks}: {what}")

    def check_canaries(self) -> None:
        """All blocks that nobody has, and the null block."""
        for block in (0, *self._pool.free):
            self._check_canary(block)
            self._put_canary(block)

    def held(self) -> dict[str, int]:
        consumer, client = self.scheduler._consumer, self.scheduler._client
        assert consumer is not None
        assert client is not None
        sessions = list(client._sessions.values())
        return {
            "requests": len(self._requests) + len(consumer._requests),
            "claims": len(consumer._by_claim) + sum(one.num_claims for one, _ in sessions),
            "reports": self.worker._completions.num_waiting,
            "reservations": len(self._open_tokens),
            "blocks": NUM_BLOCKS - 1 - len(self._pool.free),
        }

    def links(self) -> dict[str, int]:
        sessions = 0 if self.scheduler._client is None else len(self.scheduler._client._sessions)
        return {"links": len(self.worker._peers), "sessions": sessions}

"""What is left in an engine at rest, and should not be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine_model import SimDataDist
from engines import Life

PARKED = "parked reservations"


def audit(life: Life, may_park: bool) -> Iterator[str]:
    """One line per thing that has not returned to the start; runs in the engine's process.

    ``may_park``: a reservation may have come to P when its transfer was over, repeated or overtaken
    by the network or with nobody left to cancel it. P keeps a bounded number of such.
    """
    engine = life.engine
    assert engine is not None
    free = engine.free_blocks()
    if free != engine.initial_free_blocks:
        yield f"{engine.initial_free_blocks - free} blocks are not free"
    if engine.has_work:
        yield f"vLLM still has work: {engine.describe()}"
    if life.legs:
        yield f"requests without an end: {sorted(life.legs)}"
    for name, number in _left(engine.connector._scheduler):
        if number:
            yield f"scheduler: {name}: {number}"
    for worker in engine.workers:
        for name, number in _left_in_worker(worker.connector._worker):
            if number and not (may_park and name == PARKED):
                yield f"rank {worker.rank}: {name}: {number}"


def unwatched(datadist: SimDataDist) -> list[str]:
    """Reservations that are open at the very end."""
    return [f"reservation of {r.blocks} is open" for r in datadist.open_reservations]


def _left(side: Any) -> Iterator[tuple[str, int]]:
    producer, consumer, client = side._producer, side._consumer, side._client
    if producer is not None:
        yield "leases", len(producer.leases)
        yield "claims of leases", len(producer.leases._claims)
        yield "blocks held by leases", producer.leases.num_held_blocks
        yield "handovers", len(producer.handovers)
        for name in ("_by_request", "_by_claim", "_admitted"):
            yield f"handovers{name}", len(getattr(producer.handovers, name))
        yield "followed prefills", len(producer._prefills._prefills)
        yield "begun prefills", len(producer._prefills._begun)
        yield "voids", len(producer._voids)
    if consumer is not None:
        for name in ("_requests", "_by_claim", "_jobs", "_cancels"):
            yield f"consumer{name}", len(getattr(consumer, name))
        yield "turns", len(consumer._turns._asked) + len(consumer._turns._arrived)
        for session, _ in client._sessions.values():
            yield "claims of sessions", session.num_claims
            yield "drops of sessions", len(session._pending_drops)


def _left_in_worker(side: Any) -> Iterator[tuple[str, int]]:
    completions = side._completions
    yield "requests without a report", completions.num_waiting
    yield "cancelled requests", len(completions._cancelled)
    for peer in side._peers:
        yield "jobs of a peer", len(peer._queue) + len(peer._unreported) + len(peer._unwanted)
        yield "releases", len(peer._releases)
        yield "awaited pushes", len(peer._receiver) + len(peer._receiver._by_reservation)
    yield "reservations", len(side._engine._datadist.reservations)
    if side._pusher is not None:
        yield "pushes", side._pusher.num_under_way
        yield "senders", len(side._pusher._carrier.by_cluster)
        yield "prompts to push", side._pusher._plan.num_prefills
        yield "productions", len(side._pusher._plan._transfer_of)
        yield PARKED, side._pusher._plan.num_parked

"""P's worker: is a block that a D rank has read still held? Pure state behind one lock.

The main thread learns of new and ended leases from the step message; the release server asks for
every ``Release``. A rank confirms until the moment it reports the blocks as sent, never afterwards:
both happen under the lock. Production numbers rise, so an unknown one is either forgotten (confirm
never) or so new that the step message is still on its way (the answer waits for it).
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from vllm_llmdd_connector.control.messages import Release, ReleaseAck
from vllm_llmdd_connector.metadata import Hold

MAX_PARKED = 4096
"""Releases that wait for their lease to be announced; beyond it the oldest is refused."""

Reply = Callable[[ReleaseAck], None]


@dataclass(slots=True)
class _Held:
    request_id: str
    secret: str
    released_claims: set[int]


class HeldLeases:
    """The leases of one P rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}
        self._last_production = 0
        self._parked: dict[tuple[int, int], tuple[Release, Reply]] = {}
        self._released: dict[int, int] = {}

    def hold(self, holds: list[Hold]) -> None:
        """New leases; releases that came before them are answered now."""
        with self._lock:
            for hold in holds:
                self._held[hold.production] = _Held(hold.request_id, hold.secret, set())
                self._last_production = max(self._last_production, hold.production)
            if not self._parked:
                return
            ready = [key for key in self._parked if key[0] <= self._last_production]
            for key in ready:
                release, reply = self._parked.pop(key)
                reply(self._answer(release))

    def end(self, productions: list[int]) -> set[str]:
        """These leases are over; returns the requests to report as sent."""
        with self._lock:
            ended = [self._held.pop(production, None) for production in productions]
        return {held.request_id for held in ended if held is not None}

    def on_release(self, release: Release, reply: Reply) -> None:
        """A D rank has read the blocks; ``reply`` is called once, now or when the lease is
        known."""
        with self._lock:
            if release.production <= self._last_production:
                reply(self._answer(release))
                return
            key = (release.production, release.claim_id)
            if key not in self._parked and len(self._parked) >= MAX_PARKED:
                # The oldest goes: invented numbers must not keep the place of honest ones for ever.
                oldest, reply_to_oldest = self._parked.pop(next(iter(self._parked)))
                reply_to_oldest(self._refusal(oldest))
            self._parked[key] = (release, reply)

    def take_released(self) -> dict[int, int]:
        """Claims confirmed since the last call, each with this rank's count of 1."""
        if not self._released:
            return {}
        with self._lock:
            released, self._released = self._released, {}
        return released

    def _answer(self, release: Release) -> ReleaseAck:
        held = self._held.get(release.production)
        if held is None or held.secret != release.secret:
            return self._refusal(release)
        if release.claim_id not in held.released_claims:
            held.released_claims.add(release.claim_id)
            self._released[release.claim_id] = 1
        return ReleaseAck(claim_id=release.claim_id, production=release.production, valid=True)

    @staticmethod
    def _refusal(release: Release) -> ReleaseAck:
        return ReleaseAck(claim_id=release.claim_id, production=release.production, valid=False)

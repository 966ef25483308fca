"""Leases: finished prompts' blocks that P holds for a D, each with a deadline of its own.

Pure state, no lock and no clock: ``Producer`` guards it, because the scheduler thread opens and
ends leases while the control thread answers claims. A lease may be claimed more than once: the
``n`` children of one request at D carry the same ticket, and a proxy may try another D. It ends
when

* every claim on it was released by all of D's ranks, dropped, or expired, or
* nobody claimed it within ``lease_s``, or
* ``max_lease_s`` has passed, or
* P voids it.

Ended means that the scheduling thread may free the blocks. A release is confirmed while its lease
has not ended and refused afterwards, so the reader always learns the truth.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from vllm_llmdd_connector.control.messages import NOT_HELD

MAX_CLAIMS = 1024
"""Claims on one lease: of the children of one request, and a proxy's repetitions."""

MAX_CONFIRMED = 4096
"""Releases whose confirmation can be repeated after the blocks have been freed."""


class LeaseEnd(Enum):
    """Why a lease ended."""

    RELEASED = "released"
    EXPIRED = "expired"
    VOIDED = "voided"
    """P itself gave the blocks up: their request was preempted or aborted."""


@dataclass(slots=True)
class ClaimState:
    """One D request's hold on a lease."""

    deadline_s: float
    ranks_released: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Lease:
    """One finished prompt's blocks."""

    production: int
    request_id: str
    secret: str
    prompt_hash: str
    block_ids: tuple[tuple[int, ...], ...]
    """Blocks of the prompt per KV cache group, from position 0."""
    held_blocks: tuple[int, ...]
    """The distinct blocks among them, in the order of the prompt."""
    opened_s: float
    deadline_s: float
    due_s: float = math.inf
    """When the table looks whether it has expired; a renewal leaves this as it is."""
    claims: dict[int, ClaimState] = field(default_factory=dict)
    """By claim id, the one heard of last at the end: it lives longest."""
    closed: set[int] = field(default_factory=set)
    """Claims that were released or dropped: what was sent of them before may come after."""
    confirmed: set[tuple[int, int]] = field(default_factory=set)
    """Claim and rank of each confirmed release: a repeated one gets the same answer."""
    end: LeaseEnd | None = None


class LeaseTable:
    """All leases of one P engine."""

    def __init__(self, lease_s: float, max_lease_s: float, num_ranks: int) -> None:
        self._lease_s = lease_s
        self._max_lease_s = max_lease_s
        self.num_ranks = num_ranks
        self._last_production = 0
        self._leases: dict[int, Lease] = {}
        self._claims: dict[int, int] = {}
        self._expiry: list[tuple[float, int]] = []
        """``due_s`` and number of each lease; entries with another ``due_s`` are stale."""
        self._ended: list[Lease] = []
        self._holders: Counter[int] = Counter()
        self._past: dict[tuple[int, str, int, int], None] = {}
        """Confirmed releases of leases that are forgotten, the oldest first: production, secret,
        claim and rank."""

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_held_blocks(self) -> int:
        """Blocks of the cache that some lease holds; a block of several leases counts once."""
        return len(self._holders)

    def num_not_held(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks`` no lease holds yet."""
        return sum(1 for block in blocks if block not in self._holders)

    def new_production(self) -> int:
        """The number of one computation of one prompt."""
        self._last_production += 1
        return self._last_production

    def open(
        self,
        request_id: str,
        secret: str,
        prompt_hash: str,
        block_ids: Sequence[Sequence[int]],
        held_blocks: tuple[int, ...],
        now_s: float,
        production: int = 0,
    ) -> Lease:
        """Hold a prompt's blocks from now on; ``production`` if it was numbered before."""
        lease = Lease(
            production=production or self.new_production(),
            request_id=request_id,
            secret=secret,
            prompt_hash=prompt_hash,
            block_ids=tuple(tuple(ids) for ids in block_ids),
            held_blocks=held_blocks,
            opened_s=now_s,
            deadline_s=now_s + min(self._lease_s, self._max_lease_s),
        )
        self._leases[lease.production] = lease
        self._holders.update(held_blocks)
        self._schedule(lease)
        return lease

    def claim(
        self, production: int, secret: str, prompt_hash: str, claim_id: int, now_s: float
    ) -> Lease | str:
        """Attach a D request to a lease; returns the lease, or a sentence why there is none."""
        lease = self._live(production, secret)
        if lease is None:
            return NOT_HELD
        if lease.prompt_hash != prompt_hash:
            return "the prompt differs from the one that was prefilled"
        if claim_id in lease.closed:
            return "this claim was released or dropped before"
        known = self._claims.get(claim_id)
        if known is not None and known != production:
            return "this claim id is in use for another prompt"
        if known is None and len(lease.claims) >= MAX_CLAIMS:
            return f"{MAX_CLAIMS} requests have claimed this prompt already"
        self.attach(lease, claim_id, now_s)
        return lease

    def attach(
        self, lease: Lease, claim_id: int, now_s: float, ranks_released: Iterable[int] = ()
    ) -> None:
        """A D request's hold on a live lease, new or renewed."""
        self._claims[claim_id] = lease.production
        claim = self._extend(lease, claim_id, now_s)
        claim.ranks_released.update(ranks_released)

    def void(self, lease: Lease) -> None:
        """Its blocks do not count any more, whoever still has a claim."""
        if lease.end is None:
            self._end(lease, LeaseEnd.VOIDED)

    def has_claim(self, claim_id: int) -> bool:
        """Whether a D request still has a hold on some lease."""
        return claim_id in self._claims

    def renew(self, claim_id: int, now_s: float) -> bool:
        """Extend a claim; False when there is nothing left to extend."""
        lease = self._leases.get(self._claims.get(claim_id, 0))
        if lease is None or lease.end is not None:
            return False
        self._extend(lease, claim_id, now_s)
        return True

    def drop(self, production: int, secret: str, claim_id: int) -> None:
        """D needs nothing of this claim. The lease ends when no other claim is open."""
        lease = self._live(production, secret)
        if lease is not None:
            self._close_claim(lease, claim_id)

    def release(self, production: int, secret: str, claim_id: int, rank: int) -> bool:
        """A rank of D has read the blocks. Returns whether they were held until now."""
        lease = self._leases.get(production)
        if lease is None:
            return (production, secret, claim_id, rank) in self._past
        if lease.secret != secret:
            return False
        if (claim_id, rank) in lease.confirmed:
            return True
        if lease.end is not None:
            return False
        lease.confirmed.add((claim_id, rank))
        claim = lease.claims.get(claim_id)
        if claim is not None:
            claim.ranks_released.add(rank)
            if len(claim.ranks_released) >= self.num_ranks:
                self._close_claim(lease, claim_id)
        return True

    def take_ended(self, now_s: float) -> list[Lease]:
        """The leases that ended since the last call; each is returned once."""
        while self._expiry and self._expiry[0][0] <= now_s:
            due_s, production = heapq.heappop(self._expiry)
            lease = self._leases.get(production)
            if lease is None or lease.end is not None or lease.due_s != due_s:
                continue
            if lease.deadline_s > now_s:
                self._schedule(lease)
            else:
                self._expire(lease)
        ended, self._ended = self._ended, []
        return ended

    def forget(self, lease: Lease) -> None:
        """The blocks of an ended lease have been freed."""
        del self._leases[lease.production]
        if lease.end is LeaseEnd.RELEASED:
            # Not of a voided one: a D that has not all of it will want the next production.
            self._remember(lease)
        for claim_id in lease.claims:
            # A D may have a claim to the prompt's next production by now.
            if self._claims.get(claim_id) == lease.production:
                del self._claims[claim_id]
        for block in lease.held_blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]

    def _remember(self, lease: Lease) -> None:
        for claim_id, rank in lease.confirmed:
            self._past[lease.production, lease.secret, claim_id, rank] = None
        while len(self._past) > MAX_CONFIRMED:
            del self._past[next(iter(self._past))]

    def _live(self, production: int, secret: str) -> Lease | None:
        lease = self._leases.get(production)
        if lease is None or lease.end is not None or lease.secret != secret:
            return None
        return lease

    def _extend(self, lease: Lease, claim_id: int, now_s: float) -> ClaimState:
        """A sign of life of a claim, old or new."""
        claim = lease.claims.pop(claim_id, None) or ClaimState(0.0)
        claim.deadline_s = min(now_s + self._lease_s, lease.opened_s + self._max_lease_s)
        lease.claims[claim_id] = claim
        self._set_deadline(lease)
        return claim

    def _set_deadline(self, lease: Lease) -> None:
        """A claimed lease lives until the last of its claims."""
        lease.deadline_s = next(reversed(lease.claims.values())).deadline_s
        if lease.deadline_s < lease.due_s:
            self._schedule(lease)

    def _schedule(self, lease: Lease) -> None:
        # Not at each renewal: a D may send any number of them.
        lease.due_s = lease.deadline_s
        heapq.heappush(self._expiry, (lease.due_s, lease.production))

    def _close_claim(self, lease: Lease, claim_id: int) -> None:
        lease.closed.add(claim_id)
        if lease.claims.pop(claim_id, None) is not None:
            self._claims.pop(claim_id, None)
        if not lease.claims:
            self._end(lease, LeaseEnd.RELEASED)
        else:
            self._set_deadline(lease)

    def _expire(self, lease: Lease) -> None:
        for claim_id in lease.claims:
            # A D may have a claim to the prompt's next production by now.
            if self._claims.get(claim_id) == lease.production:
                del self._claims[claim_id]
        lease.claims.clear()
        self._end(lease, LeaseEnd.EXPIRED)

    def _end(self, lease: Lease, reason: LeaseEnd) -> None:
        lease.end = reason
        self._ended.append(lease)

"""What happens in a run of ``chaos_engine.py``: its transfers and its faults, by the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from chaos_fleet import DECODES, PREFILL
from kv_memory import BLOCK_TOKENS

MAX_TOKENS = 24 * BLOCK_TOKENS
LATE_S = 2.0
"""A D leg so late finds P's lease expired."""


@dataclass
class Transfer:
    """One prompt's way from P to a D; times are from its begin, for a pull's D leg from P's end."""

    number: int
    flow: str
    decode: str
    num_tokens: int
    num_local_blocks: int = 0
    p_delay_s: float = 0.0
    d_delay_s: float = 0.0
    p_is_slow: bool = False
    p_abort_s: float | None = None
    d_abort_s: float | None = None
    # From here on what became of it.
    is_at_prefill: bool = False
    is_at_decode: bool = False
    deadline_s: float = 0.0
    first_fault_s: float = 0.0
    end: str = ""

    @property
    def transfer_id(self) -> str:
        return f"transfer {self.number}"


@dataclass(frozen=True)
class Fault:
    kind: str
    server: str = ""
    seconds: float = 0.0
    amount: float = 0.0


@dataclass
class Plan:
    num_transfers: int
    seed: int
    transfers_per_fault: int = 20
    aborts: float = 0.2
    """Share of transfers that D's client aborts."""
    has_faults: bool = True
    copy_rate: int = 100_000_000
    """Bytes per second of a D's copies, so that aborts come in the middle of one."""
    _num_plain: int = field(default=0, init=False)

    def transfers(self, dice: random.Random) -> Iterator[Transfer]:
        for number in range(1, self.num_transfers + 1):
            num_tokens = dice.randint(2, MAX_TOKENS)
            yield Transfer(
                number,
                flow=dice.choice(("push", "pull")),
                decode=dice.choice(DECODES),
                num_tokens=num_tokens,
                num_local_blocks=dice.choice((0, 0, 0, dice.randrange(0, 24)))
                * BLOCK_TOKENS
                % num_tokens
                // BLOCK_TOKENS,
                p_delay_s=dice.uniform(0, 0.03),
                d_delay_s=LATE_S if dice.random() < 0.01 else dice.uniform(0, 0.03),
                p_is_slow=dice.random() < 0.2,
                p_abort_s=dice.uniform(0, 0.05) if dice.random() < 0.05 else None,
                d_abort_s=dice.uniform(0, 0.15) if dice.random() < self.aborts else None,
            )

    def plain_transfer(self, decode: str, flow: str) -> Transfer:
        """One that nothing happens to."""
        self._num_plain += 1
        return Transfer(self.num_transfers + self._num_plain, flow, decode, 200)

    def fault_after(self, number: int, dice: random.Random) -> Fault | None:
        """What strikes when this transfer has begun. ``d0`` lives as long as the run."""
        if not self.has_faults or number % self.transfers_per_fault:
            return None
        anyone = dice.choice((PREFILL, *DECODES))
        faults = (
            Fault("killed", PREFILL, dice.uniform(0, 0.8)),
            Fault("killed", DECODES[1], dice.uniform(0, 0.5)),
            Fault("stopped", anyone, dice.uniform(0.02, 0.5)),
            Fault("stopped", anyone, dice.uniform(0.02, 0.5)),
            Fault("stopped", dice.choice((PREFILL, dice.choice(DECODES))), dice.uniform(2, 4)),
            Fault("cut"),
            Fault("messages lost", "", dice.uniform(0.3, 1.5), dice.choice((0.1, 0.3, 0.6))),
            Fault("messages lost", "", dice.uniform(0.3, 1.5), dice.choice((0.1, 0.3, 0.6))),
            Fault("messages delayed", "", dice.uniform(0.3, 1.5), dice.choice((0.05, 0.4))),
            Fault("messages delayed", "", dice.uniform(0.3, 1.5), dice.choice((0.05, 0.4))),
            Fault("copies slow", dice.choice(DECODES), dice.uniform(0.2, 1), 300_000),
            Fault("copies slow", dice.choice(DECODES), dice.uniform(0.2, 1), 10_000_000),
        )
        return dice.choice(faults)

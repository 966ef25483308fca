"""What a seed draws: the engines of a world, its traffic, and what goes wrong in it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

OPTIONS: dict[str, Any] = {
    "first_contact_timeout_s": 2.0,
    "metaserver_timeout_s": 4.0,
    "reserve_timeout_s": 8.0,
    "request_timeout_s": 8.0,
    "link_timeout_ms": 1000,
    "sync_kv_timeout_ms": 2000,
    "release_timeout_s": 2.0,
    "lease_s": 5.0,
    "max_lease_s": 15.0,
}
"""Of the connector: short, because virtual seconds of waiting engines cost real time."""

KINDS = (
    "kill",
    "vanish",
    "restart",
    "stop",
    "cut",
    "delay",
    "drop",
    "duplicate",
    "reorder",
    "fail copies",
    "slow copies",
    "fail links",
    "preempt",
    "full cache",
    "reset prefix cache",
)
"""Of faults that come to an engine or the network; aborts and lost clients belong to traffic."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    at_s: float
    kind: str
    target: int
    """Number of an engine, for those that concern one."""
    duration_s: float
    amount: float
    """How bad it is, in [0, 1)."""


@dataclass(frozen=True)
class Settings:
    """One world."""

    seed: str
    num_requests: int
    num_p: int
    num_d: int
    common: dict[str, Any]
    p: dict[str, Any]
    d: dict[str, Any]
    both_roles: bool
    """Every engine could be P or D."""
    layer_hooks: bool
    """P's forward reports each layer, as without the replay of a full graph."""
    fixed_ports: bool
    """A P comes back at the same control address after a restart."""
    mean_gap_s: float
    """Between two requests."""
    flows: tuple[str, ...]
    abort_chance: float
    lost_client_chance: float
    """The second leg is never sent."""
    late_chance: float
    """The second leg comes when the lease may have expired."""
    twin_chance: float
    """Two requests at D share one prefill."""
    retry_chance: float
    """A client repeats what has failed, or has ended."""
    latency_s: float
    """Of a control message."""
    block_s: float
    """To copy one block of one layer."""
    switch_chance: float
    """How often a thread is overtaken where it could be."""
    faults: tuple[Fault, ...] = field(default=())

    @property
    def is_calm(self) -> bool:
        """Nothing goes wrong, so nothing may fail."""
        return not (self.faults or self.abort_chance or self.lost_client_chance or self.late_chance)

    @property
    def may_park(self) -> bool:
        """P's workers may be left with reservations of transfers that are over."""
        causes = {"duplicate", "reorder", "drop", "delay", "cut", "kill", "vanish", "restart"}
        return any(fault.kind in causes for fault in self.faults)

    @property
    def duration_s(self) -> float:
        return self.num_requests * self.mean_gap_s


def draw_settings(
    seed: str, num_requests: int, kinds: tuple[str, ...] = KINDS, windows: bool = True
) -> Settings:
    """A world; ``windows``: this vLLM can be told of failed loads into sliding windows."""
    rng = random.Random(f"world {seed}")
    policy = rng.choice(["recompute", "fail"])
    tp_size = rng.choice([1, 1, 1, 2])
    window = rng.choice([None, 24, 40]) if windows and policy == "fail" else None
    num_p, num_d = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)])
    calm = rng.random() < 0.1
    mean_gap_s = rng.choice([0.02, 0.04, 0.08] if calm else [0.005, 0.02, 0.04, 0.08])
    short = {"lease_s": 0.5, "max_lease_s": 2.0}
    leases = {} if calm else rng.choice([{}, {}, short])
    faults = () if calm else _draw_faults(rng, kinds, num_requests * mean_gap_s, num_p + num_d)
    disturbed = 0.0 if calm else 1.0
    return Settings(
        seed=seed,
        num_requests=num_requests,
        num_p=num_p,
        num_d=num_d,
        common={
            "tp_size": tp_size,
            "num_layers": rng.choice([2, 4]),
            "sliding_window": window,
            "pipeline_depth": rng.choice([1, 2]),
            "zero_new_blocks": rng.choice([False, True]),
            "enable_prefix_caching": rng.choice([False, True]),
            "max_model_len": 256,
            "max_num_seqs": rng.choice([8, 16]),
        },
        p={
            "num_blocks": rng.choice([36, 64, 200]),
            "max_num_batched_tokens": rng.choice([24, 64, 300]),
            "extra_config": OPTIONS | leases | {"push": rng.random() < 0.97},
        },
        d={
            "num_blocks": rng.choice([36, 64, 200]),
            "max_num_batched_tokens": 300,
            "load_failure_policy": policy,
            "extra_config": OPTIONS | {"push": rng.random() < 0.9},
        },
        both_roles=rng.random() < 0.2,
        layer_hooks=rng.random() < 0.8,
        fixed_ports=rng.random() < 0.7,
        mean_gap_s=mean_gap_s,
        flows=rng.choice(
            [("pull",), ("push",), ("decode first",), ("pull", "push", "push", "decode first")]
        ),
        abort_chance=disturbed * rng.choice([0.0, 0.05, 0.2]),
        lost_client_chance=disturbed * rng.choice([0.0, 0.03]),
        late_chance=disturbed * rng.choice([0.0, 0.03]),
        twin_chance=rng.choice([0.0, 0.05]),
        retry_chance=disturbed * rng.choice([0.0, 0.5]),
        latency_s=rng.choice([0.0001, 0.0001, 0.01]),
        block_s=rng.choice([0.00002, 0.0002, 0.004]),
        switch_chance=rng.choice([0.01, 0.05, 0.3]),
        faults=faults,
    )


def _draw_faults(
    rng: random.Random, kinds: tuple[str, ...], duration_s: float, num_engines: int
) -> tuple[Fault, ...]:
    """Some kinds only, so that each also meets a world that is well otherwise."""
    chosen = rng.sample(kinds, min(len(kinds), rng.choice([1, 2, 4, len(kinds)])))
    faults = []
    at_s, per_s = 0.2, rng.choice([1.0, 4.0, 10.0])
    while chosen and (at_s := at_s + rng.expovariate(per_s)) < duration_s:
        faults.append(
            Fault(
                at_s=at_s,
                kind=rng.choice(chosen),
                target=rng.randrange(num_engines),
                duration_s=rng.choice([0.02, 0.2, 1.0, 4.0]) * rng.uniform(0.5, 1.5),
                amount=rng.random(),
            )
        )
    return tuple(faults)

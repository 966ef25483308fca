"""A few worlds of the simulator, in which everything ends well; ``make chaos`` runs many."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plan import KINDS, OPTIONS, Fault
from world_verdict import Verdict

Simulate = Callable[..., Verdict]


@pytest.mark.parametrize("seed", ["test:0", "test:1", "test:2"])
def test_whatever_goes_wrong_every_request_ends_and_nothing_is_left(
    simulate: Simulate, seed: str
) -> None:
    storm = tuple(Fault(0.1 + 0.1 * i, kind, i % 2, 0.3, 0.5) for i, kind in enumerate(3 * KINDS))
    verdict = simulate(seed, faults=storm, abort_chance=0.1, mean_gap_s=0.08)
    assert verdict.problems == []
    assert len(verdict.faults) > len(KINDS) // 2


def test_without_faults_nothing_fails(simulate: Simulate) -> None:
    verdict = simulate(
        "test:3",
        faults=(),
        p={"num_blocks": 64, "max_num_batched_tokens": 64, "extra_config": OPTIONS},
        mean_gap_s=0.04,
        abort_chance=0.0,
        lost_client_chance=0.0,
        late_chance=0.0,
        retry_chance=0.0,
    )
    assert verdict.problems == []
    assert verdict.faults == {}
    assert set(verdict.ends) == {"length"}


def test_one_seed_gives_one_journal(simulate: Simulate) -> None:
    first, second = simulate("test:4", 30), simulate("test:4", 30)
    assert sum(first.messages.values()) > 100
    assert first.digest == second.digest
    assert simulate("test:5", 30).digest != first.digest

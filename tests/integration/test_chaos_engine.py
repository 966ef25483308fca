"""A short ``make chaos-engine``, and that it notices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "stress"))

from chaos_engine import chaos
from chaos_plan import Plan


@pytest.mark.timeout(300)
def test_faults_cost_no_block_no_end_and_nothing_that_is_held() -> None:
    """Each arm of a transfer is there: arrived, aborted, and ended by a fault."""
    findings = chaos(Plan(num_transfers=60, seed=3, transfers_per_fault=10))
    assert findings.is_clean, [*findings.problems, *findings.leaks, findings.summary()]
    assert findings.ends["push received"]
    assert findings.ends["pull received"]
    assert len(findings.faults) >= 5


@pytest.mark.timeout(300)
def test_reservations_are_what_protects_blocks_that_d_gave_up() -> None:
    """With reservations that stay open blocks change after the report."""
    plan = Plan(num_transfers=150, seed=1, aborts=0.8, has_faults=False, copy_rate=5_000_000)
    assert chaos(plan, keeps_reservations=True).num_wrong

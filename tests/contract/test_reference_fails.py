"""The model test finds what it is for: each fault here, put between test and engine, is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from contract.cluster import Cluster
from contract.engines import Restriction, message_mode, refused_by_vendor
from contract.examples import FAULT_WANTED
from contract.peer import Peer
from contract.reference import run as model_run
from contract.reference.programs import programs
from contract.reference.pulls import PullBlocks
from contract.reference.run import SUCCESS, Call, Program, Run, compare
from contract.reference.tables import PAGE, POOL_PAGES
from contract.reference.world import LOCAL, ByModel

pytestmark = [message_mode, refused_by_vendor(Restriction.REGISTER_FIRST)]

Pair = Callable[..., tuple[Cluster, Peer]]
Engine = Callable[[Run, Call], str]

POOL = f'{{"memory_size": {POOL_PAGES * PAGE}, "page_shift": 12}}'

MOST_CALLS = 16  # a fault between two calls takes two that fit each other


def flipped_byte(engine: Engine) -> Engine:
    """The last byte of what a pull wrote is another one."""

    def call(run: Run, asked: Call) -> str:
        result = engine(run, asked)
        if isinstance(asked, PullBlocks) and result == SUCCESS:
            made = run.world.slot(LOCAL, asked.slot)
            last = (max(asked.dst) + 1) * made.desc.row_bytes - 1
            run.sides[LOCAL].flip_byte(made.id, made.desc.tensors - 1, last)
        return result

    return call


def blocks_in_reverse(engine: Engine) -> Engine:
    """A list of blocks is gone through from its end."""

    def call(run: Run, asked: Call) -> str:
        if not isinstance(asked, PullBlocks) or not isinstance(asked.key, ByModel):
            return engine(run, asked)
        changed = PullBlocks(asked.key, asked.slot, asked.src[::-1], asked.dst, asked.layers)
        return engine(run, changed)

    return call


def swallowed_error(engine: Engine) -> Engine:
    """A pull of what is not there counts as done."""

    def call(run: Run, asked: Call) -> str:
        result = engine(run, asked)
        return SUCCESS if result == "LLM_KV_CACHE_NOT_EXIST" else result

    return call


def second_pull(engine: Engine) -> Engine:
    """What a failed call has asked for is done later, with the first block alone."""

    def call(run: Run, asked: Call) -> str:
        result = engine(run, asked)
        if isinstance(asked, PullBlocks) and result != SUCCESS:
            engine(run, PullBlocks(asked.key, asked.slot, asked.src[:1], asked.dst[:1]))
        return result

    return call


@pytest.mark.parametrize("fault", [flipped_byte, blocks_in_reverse, swallowed_error, second_pull])
def test_fault_is_noticed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Engine], Engine]
) -> None:
    local, peer = pair(pool=POOL)
    monkeypatch.setattr(model_run, "outcome", fault(model_run.outcome))

    @FAULT_WANTED
    @given(program=programs(False, ("pull_blocks", "pull_cache"), MOST_CALLS))
    def check(program: Program) -> None:
        with Run(local, peer, False) as run:
            compare(run, program)

    with pytest.raises(AssertionError, match="the model"):
        check()


def test_key_that_outlives_its_pull_is_noticed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model forgets that a pull uses a key up, as an engine might."""
    local, peer = pair(pool=POOL)
    monkeypatch.setattr("contract.reference.tables.Tables.pulled", lambda *unused: None)

    @FAULT_WANTED
    @given(program=programs(False, ("pull_cache",), MOST_CALLS))
    def check(program: Program) -> None:
        with Run(local, peer, False) as run:
            compare(run, program)

    with pytest.raises(AssertionError, match="the model"):
        check()

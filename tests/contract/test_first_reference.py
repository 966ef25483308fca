"""The calls of `KvCacheManager` on random caches, against a model; and that the model notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given

from contract.engines import Restriction, refused_by_vendor
from contract.examples import FAULT_WANTED, examples
from contract.first_cluster import FirstCluster
from contract.fixtures import Linked, MakeFirst, MakePeer
from contract.peer import Peer
from contract.reference import run as model_run
from contract.reference.first_generation import PAGE, FirstRun, PullBlockPairs, PullRow
from contract.reference.first_programs import first_programs
from contract.reference.run import SUCCESS, Call, Program, Run, compare
from contract.reference.tables import POOL_PAGES
from contract.reference.world import LOCAL

pytestmark = refused_by_vendor(Restriction.REGISTER_FIRST)

Engine = Callable[[Run, Call], str]

PULLS = "pull_cache", "pull_cache", "pull_blocks"
COPIES = "copy_cache", "copy_blocks", "swap_blocks"
LIFETIMES = "create", "discard", "remove_key"
KINDS = {
    "pulls": PULLS,
    "copies": COPIES,
    "lifetimes": (*LIFETIMES, *PULLS),
    "everything": (*LIFETIMES, *PULLS, *COPIES),
}
MEMORY = str(POOL_PAGES * PAGE)


@pytest.fixture
def modelled(make_first: MakeFirst, make_peer: MakePeer) -> Linked:
    """A DECODER here, linked to a PROMPT; both have little memory."""
    local: FirstCluster = make_first(memory=MEMORY)
    peer: Peer = make_peer(2, role="PROMPT", memory=MEMORY)
    assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
    return local, peer


@pytest.mark.parametrize("kinds", KINDS)
def test_calls_do_what_the_model_says(modelled: Linked, kinds: str) -> None:
    local, peer = modelled

    @examples(100)
    @given(program=first_programs(KINDS[kinds]))
    def check(program: Program) -> None:
        with FirstRun(local, peer, False) as run:
            compare(run, program)

    check()


def flipped_byte(engine: Engine) -> Engine:
    """The last byte of the row that a pull wrote to is another one."""

    def call(run: Run, asked: Call) -> str:
        result = engine(run, asked)
        if isinstance(asked, PullRow) and result == SUCCESS:
            made = run.world.slot(LOCAL, asked.slot)
            last = (asked.batch_index + 1) * made.desc.row_bytes - 1
            run.sides[LOCAL].flip_byte(made.id, made.desc.tensors - 1, last)
        return result

    return call


def offsets_dropped(engine: Engine) -> Engine:
    """A pull without its offsets: other bytes, and the key is used up."""

    def call(run: Run, asked: Call) -> str:
        if isinstance(asked, PullRow):
            asked = replace(asked, src_offset=None, dst_offset=None)
        return engine(run, asked)

    return call


def blocks_in_reverse(engine: Engine) -> Engine:
    def call(run: Run, asked: Call) -> str:
        if isinstance(asked, PullBlockPairs):
            asked = replace(asked, src=asked.src[::-1])
        return engine(run, asked)

    return call


def pulled_twice(engine: Engine) -> Engine:
    """A pull that was done is done again, as if no answer had come: its key has been used up."""

    def call(run: Run, asked: Call) -> str:
        result = engine(run, asked)
        if isinstance(asked, PullRow) and result == SUCCESS:
            return engine(run, asked)
        return result

    return call


FAULTS = flipped_byte, offsets_dropped, blocks_in_reverse, pulled_twice


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(
    modelled: Linked, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Engine], Engine]
) -> None:
    local, peer = modelled
    monkeypatch.setattr(model_run, "outcome", fault(model_run.outcome))

    @FAULT_WANTED
    @given(program=first_programs(PULLS))
    def check(program: Program) -> None:
        with FirstRun(local, peer, False) as run:
            compare(run, program)

    with pytest.raises(AssertionError, match="the model"):
        check()

"""Every transfer call of the API on random caches, against a model of tables and bytes.

transfer_cache_async has a model of its own, in test_transfer_random.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from contract.cluster import Cluster
from contract.engines import Restriction, refused_by_vendor
from contract.examples import examples
from contract.peer import Peer
from contract.reference.programs import programs
from contract.reference.run import Program, Run, compare
from contract.reference.tables import PAGE, POOL_PAGES

pytestmark = refused_by_vendor(Restriction.REGISTER_FIRST)

Pair = Callable[..., tuple[Cluster, Peer]]

POOL = f'{{"memory_size": {POOL_PAGES * PAGE}, "page_shift": 12}}'
PULLS = "pull_cache", "pull_blocks"
PUSHES = "push_cache", "push_blocks", "push_blocks", "reserve", "end_reservation"
COPIES = "copy_cache", "copy_blocks", "swap_blocks"
LIFETIMES = "create", "discard", "remove_key"
KINDS = {
    "pulls": PULLS,
    "pushes": PUSHES,
    "copies": COPIES,
    "lifetimes": (*LIFETIMES, *PULLS),
    "everything": (*LIFETIMES, *PULLS, *PUSHES, *COPIES),
}


@pytest.fixture
def modelled_pair(pair: Pair, remote: bool) -> tuple[Cluster, Peer]:
    return pair(pool=POOL)


@pytest.mark.parametrize("kinds", KINDS)
def test_calls_do_what_the_model_says(
    modelled_pair: tuple[Cluster, Peer], remote: bool, kinds: str
) -> None:
    local, peer = modelled_pair

    @examples(200 if remote or kinds != "pushes" else 20)  # message mode has no pushes
    @given(program=programs(remote, KINDS[kinds]))
    def check(program: Program) -> None:
        with Run(local, peer, remote) as run:
            compare(run, program)

    check()

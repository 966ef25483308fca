"""Many collective links of one pair at once, in which either side dials.

A member that met the other in another comm at the same moment once waited for it for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from contract.cluster import Cluster
from contract.engines import Restriction, refused_by_vendor
from contract.errors import wait_until
from contract.memory import block_pieces, moved
from contract.peer import Peer

pytestmark = refused_by_vendor(Restriction.REGISTER_FIRST)

COMMS = 20
ROUNDS = 10
GENEROUS_S = 60.0


def members(number: int) -> dict[int, int]:
    """The member of higher rank dials."""
    return {1: 0, 2: 1} if number % 2 else {2: 0, 1: 1}


def settled(side: Cluster | Peer, comms: list[int]) -> bool:
    return all(side.comm_status(comm) != "PREPARING" for comm in comms)


def test_comms_in_both_directions_agree(
    make_local: Callable[..., Cluster], make_peer: Callable[..., Peer]
) -> None:
    local, peer = make_local(1), make_peer(2)
    cache, source = local.add_blocks(), peer.add_blocks(seed=100)
    content = peer.dump(source)
    for turn in range(ROUNDS):
        names = [f"stress {peer.pid} {turn} {number}" for number in range(COMMS)]
        # The peer goes through the list from its end, so that different comms meet.
        peer.start("link_all", [(names[n], members(n)) for n in reversed(range(COMMS))])
        ours = [local.link_members(names[n], members(n)) for n in range(COMMS)]
        theirs = peer.result()
        wait_until(partial(settled, local, ours), GENEROUS_S)
        wait_until(partial(settled, peer, theirs), GENEROUS_S)
        assert {local.comm_status(comm) for comm in ours} == {"OK"}, local.link_error(2)
        assert {peer.comm_status(comm) for comm in theirs} == {"OK"}, peer.link_error(1)
        before, block = local.dump(cache), turn % 16
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [block], [block])
        pieces = block_pieces([block], [block], 64)
        assert local.dump(cache) == moved(before, content, pieces)
        peer.start("unlink_all", theirs)
        for comm in ours:
            local.unlink_members(comm)
        peer.result()

"""KvCacheManager.transfer_cache_async: what differs from the second generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from contract.actions import names
from contract.errors import refused
from contract.first_cluster import FirstCluster
from contract.fixtures import Linked
from contract.layerwise import Held, recorder
from contract.memory import block_pieces, moved
from contract.peer import Peer


@pytest.fixture
def linked(engine: str, make_peer: Callable[..., Peer]) -> Iterator[Linked]:
    """A PROMPT here, linked by a DECODER in another process."""
    local = FirstCluster(1, role="PROMPT", api=engine, timeout_ms=500)
    peer = make_peer(2, role="DECODER")
    assert peer.link(1, local.port()).name == "LLM_SUCCESS"
    yield local, peer
    local.finalize()


def test_rows_and_blocks_arrive(linked: Linked) -> None:
    local, peer = linked
    source, target = local.allocate_rows(seed=100), peer.allocate_rows()
    before, addrs = peer.dump(target), peer.addrs(target)
    config = local.api.TransferConfig(2, [addr + 512 for addr in addrs], range(2), 1)
    task = local.transfer(recorder(local.api), source, [config])
    assert task.synchronize().name == "LLM_SUCCESS"
    after = moved(before, local.dump(source), [(256, 512, 256)])
    assert peer.dump(target) == after

    blocks, wanted = local.allocate_blocks(seed=200), peer.allocate_blocks()
    before = peer.dump(wanted)
    config = local.api.TransferConfig(2, peer.addrs(wanted))
    task = local.transfer(recorder(local.api), blocks, [config], [1, 2], [4, 3])
    assert names(task) == ["LLM_SUCCESS"]
    pieces = block_pieces([1, 2], [4, 3], 64)
    assert peer.dump(wanted) == moved(before, local.dump(blocks), pieces)


def test_c63_a_row_cannot_go_to_blocks(linked: Linked) -> None:
    local, peer = linked
    source = local.allocate_rows()
    config = local.api.TransferConfig(2, peer.addrs(peer.allocate_blocks()))
    for dst in ([], [1]):
        with refused(local.api):
            local.transfer(recorder(local.api), source, [config], None, dst, 64)


def test_c67_c68_timeouts_have_their_own_code(linked: Linked) -> None:
    local, peer = linked
    source = local.allocate_rows()
    config = local.api.TransferConfig(2, peer.addrs(peer.allocate_rows()))
    peer.stop()
    task = local.transfer(recorder(local.api), source, [config])
    assert task.synchronize(0).name == "LLM_WAIT_PROCESS_TIMEOUT"
    assert [status.name for status in task.get_results(0)] == ["LLM_WAIT_PROCESS_TIMEOUT"]
    assert names(task) == ["LLM_WAIT_PROCESS_TIMEOUT"]
    peer.resume()


def test_c71_address_outside_the_receivers_caches(linked: Linked) -> None:
    local, peer = linked
    target = peer.allocate_rows(tensors=2)
    before = peer.dump(target)
    addrs = peer.addrs(target)
    config = local.api.TransferConfig(2, [addrs[0], addrs[1] + 769])
    task = local.transfer(recorder(local.api), local.allocate_rows(tensors=2), [config])
    assert names(task) == ["LLM_PARAM_INVALID"]
    assert peer.dump(target) == before


def test_roles_and_types(linked: Linked) -> None:
    local, peer = linked
    cache = peer.allocate_rows()
    with refused(local.api):
        peer.transfer(None, cache, [])
    with pytest.raises(TypeError):
        local.manager.transfer_cache_async(None, recorder(local.api), [])
    key = local.api.TransferWithCacheKeyConfig(local.api.BlocksCacheKey(2), range(1), range(1))
    with pytest.raises(TypeError):
        local.transfer(recorder(local.api), local.allocate_rows(), [key])


def test_unlink_beside_a_running_transfer(linked: Linked) -> None:
    """The transfer waits for its second layer, so no call on the link is under way."""
    local, peer = linked
    source, target = local.allocate_rows(seed=100), peer.allocate_rows()
    before = peer.dump(target)
    held = Held(first=1)
    task = local.transfer(
        recorder(local.api, held), source, [local.api.TransferConfig(2, peer.addrs(target))]
    )
    held.reached.wait()
    info = local._info(2, peer.listen_port)
    for force in (False, True):
        status, statuses = local.datadist.unlink_clusters([info], 1000, force)
        assert status.name == "LLM_UNLINK_FAILED"
        assert [entry.name for entry in statuses] == ["LLM_LINK_BUSY"]
    held.release()
    assert names(task) == ["LLM_SUCCESS"]
    assert peer.dump(target) == moved(before, local.dump(source), [(0, 0, 256)])
    assert local.datadist.unlink_clusters([info])[0].name == "LLM_SUCCESS"


def test_pull_beside_a_running_transfer(linked: Linked) -> None:
    """The peer pulls another row of the same cache between two layers.

    The vendor's answers LLM_LINK_BUSY if it finds the link in use: see ``test_link_sharing``.
    """
    local, peer = linked
    source, target = local.allocate_rows(seed=100), peer.allocate_rows()
    before = peer.dump(target)
    held = Held(first=1)
    task = local.transfer(
        recorder(local.api, held), source, [local.api.TransferConfig(2, peer.addrs(target))]
    )
    held.reached.wait()
    peer.pull_cache(local.api.CacheKeyByIdAndIndex(1, source, 2), target, 3)
    held.release()
    assert names(task) == ["LLM_SUCCESS"]
    assert peer.dump(target) == moved(before, local.dump(source), [(0, 0, 256), (512, 768, 256)])


def test_link_is_free_after_a_failed_transfer(linked: Linked) -> None:
    local, peer = linked
    source, target = local.allocate_rows(), peer.allocate_rows()
    configs = [local.api.TransferConfig(2, peer.addrs(target))]
    task = local.transfer(recorder(local.api, lambda layer: False), source, configs)
    assert names(task) == ["LLM_PARAM_INVALID"]
    status, _ = local.datadist.unlink_clusters([local._info(2, peer.listen_port)])
    assert status.name == "LLM_SUCCESS"

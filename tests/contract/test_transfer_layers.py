"""transfer_cache_async: order of layers, what the synchronizer is asked, and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from contract.actions import link_later
from contract.cluster import Cluster
from contract.engines import message_mode
from contract.errors import refused
from contract.fixtures import MakePeer, Pair
from contract.layerwise import ROW, Held, recorder, rows_of
from contract.memory import moved, pattern
from contract.peer import Peer


def names(results: list[Any]) -> list[str | None]:
    return [None if status is None else status.name for status in results]


@pytest.fixture
def third(make_peer: MakePeer, remote: bool) -> Callable[[Cluster], Peer]:
    """Makes cluster 3, linked like that of `pair`."""

    def make(local: Cluster) -> Peer:
        peer = make_peer(3, remote=remote)
        link_later(local, peer)
        return peer

    return make


def test_c55_each_layer_is_synchronised_once(pair: Pair, third: Any, remote: bool) -> None:
    local, peer = pair()
    other = third(local)
    source = local.add_rows(tensors=8, seed=100)
    targets = [
        rows_of(local.api, remote, cluster_id, side, tensors=8)
        for cluster_id, side in ((2, peer), (3, other))
    ]
    before = [peer.dump(targets[0].cache_id), other.dump(targets[1].cache_id)]
    synchronizer = recorder(local.api)
    configs = [target.config(range(4), row=2, src_row=1) for target in targets]
    task = local.transfer(synchronizer, source, configs)
    assert task.synchronize().name == "LLM_SUCCESS"
    assert names(task.get_results()) == ["LLM_SUCCESS"] * 2
    assert synchronizer.calls == [(layer, None) for layer in range(4)]
    content = local.dump(source)
    for side, target, old in zip((peer, other), targets, before, strict=True):
        assert side.dump(target.cache_id) == moved(old, content, [(ROW, 2 * ROW, ROW)])


def test_c56_other_layers_are_not_synchronised(pair: Pair, remote: bool) -> None:
    local, peer = pair()
    source = local.add_rows(tensors=16, seed=100)
    target = rows_of(local.api, remote, 2, peer, tensors=16)
    before = peer.dump(target.cache_id)
    synchronizer = recorder(local.api)
    configs = [target.config(range(1, 3)), target.config(range(5, 7))]
    assert local.transfer(synchronizer, source, configs).synchronize().name == "LLM_SUCCESS"
    assert synchronizer.layers() == [1, 2, 5, 6]
    sent = moved(before, local.dump(source), [(0, 0, ROW)])
    after = [sent[i] if i // 2 in (1, 2, 5, 6) else before[i] for i in range(16)]
    assert peer.dump(target.cache_id) == after


def test_c57_a_layer_leaves_after_its_synchronisation(pair: Pair, remote: bool) -> None:
    """The source is written inside the synchronizer; the next layers' memory is still old."""
    local, peer = pair()
    source = local.add_rows(tensors=8, seed=100)
    target = rows_of(local.api, remote, 2, peer, tensors=8)
    before = peer.dump(target.cache_id)
    unsent: list[bool] = []

    def compute(layer: int) -> bool:
        now = peer.dump(target.cache_id)
        unsent.append(now[2 * layer :] == before[2 * layer :])
        for tensor in (2 * layer, 2 * layer + 1):
            local.tensors[source][tensor].write(pattern(1000 + tensor, ROW))
        return True

    configs = [target.config(range(4))]
    task = local.transfer(recorder(local.api, compute), source, configs)
    assert task.synchronize().name == "LLM_SUCCESS"
    assert unsent == [True] * 4
    after = [pattern(1000 + tensor, ROW) + before[tensor][ROW:] for tensor in range(8)]
    assert peer.dump(target.cache_id) == after


def test_c58_destination_layers_count_from_the_range_start(pair: Pair, remote: bool) -> None:
    """With a cache key the vendor's engine takes `dst_layer_range` at the absolute source layer,
    and its thread dies here; ours counts from the start of the source's range."""
    local, peer = pair()
    source = local.add_rows(tensors=8, seed=100)
    target = rows_of(local.api, remote, 2, peer, tensors=8)
    before, content = peer.dump(target.cache_id), local.dump(source)
    task = local.transfer(recorder(local.api), source, [target.config(range(2, 4), first=1)])
    assert names(task.get_results()) == ["LLM_SUCCESS"]
    sent = moved(before[2:6], content[4:8], [(0, 0, ROW)])
    assert peer.dump(target.cache_id) == before[:2] + sent + before[6:]


def test_c59_addresses_and_ranges_must_fit(pair: Pair, remote: bool) -> None:
    local, peer = pair()
    source, odd = local.add_rows(tensors=8), local.add_rows(tensors=3)
    target = rows_of(local.api, remote, 2, peer, tensors=10)
    synchronizer = recorder(local.api)
    with refused(local.api):
        local.transfer(synchronizer, source, [target.config(range(3, 5))])
    if not remote:
        config = target.config(range(2))
        for addrs in ([], config.dst_addrs[:3], [*config.dst_addrs, 1]):
            config.dst_addrs = addrs
            with refused(local.api):
                local.transfer(synchronizer, source, [config])
    with refused(local.api):
        local.transfer(synchronizer, odd, [target.config(range(1))])
    assert synchronizer.calls == []


@message_mode
def test_c60_no_range_becomes_the_full_range(pair: Pair) -> None:
    local, peer = pair()
    source = local.add_rows(tensors=6, seed=100)
    target = rows_of(local.api, False, 2, peer, tensors=6)
    before = peer.dump(target.cache_id)
    config = local.api.TransferConfig(2, target.addrs)
    assert local.transfer(recorder(local.api), source, [config]).synchronize().name == "LLM_SUCCESS"
    assert config.src_layer_range == range(3)
    sent = moved(before, local.dump(source), [(0, 0, ROW)])
    assert peer.dump(target.cache_id) == sent


@pytest.mark.parametrize("row", [0, 3])
def test_c61_src_batch_index_selects_the_row(pair: Pair, remote: bool, row: int) -> None:
    local, peer = pair()
    source = local.add_rows(rows=4, seed=100)
    target = rows_of(local.api, remote, 2, peer, rows=2)
    before = peer.dump(target.cache_id)
    task = local.transfer(
        recorder(local.api), source, [target.config(range(2), row=1, src_row=row)]
    )
    assert task.synchronize().name == "LLM_SUCCESS"
    sent = moved(before, local.dump(source), [(row * ROW, ROW, ROW)])
    assert peer.dump(target.cache_id) == sent


def test_c61_row_out_of_range_is_a_result(pair: Pair, remote: bool) -> None:
    local, peer = pair()
    source = local.add_rows(rows=4)
    target = rows_of(local.api, remote, 2, peer)
    synchronizer = recorder(local.api)
    task = local.transfer(synchronizer, source, [target.config(range(2), src_row=4)])
    assert names(task.get_results()) == ["LLM_PARAM_INVALID"]
    assert synchronizer.layers() == [0]


@pytest.mark.parametrize("stop_at", [0, 1])
def test_c65_false_ends_the_job(pair: Pair, third: Any, remote: bool, stop_at: int) -> None:
    local, peer = pair()
    other = third(local)
    source = local.add_rows(tensors=8, seed=100)
    first = rows_of(local.api, remote, 2, peer, tensors=8)
    second = rows_of(local.api, remote, 3, other, tensors=8)
    before = other.dump(second.cache_id)
    synchronizer = recorder(local.api, lambda layer: layer != stop_at)
    configs = [first.config(range(3)), second.config(range(2, 4))]
    task = local.transfer(synchronizer, source, configs)
    assert names(task.get_results()) == ["LLM_PARAM_INVALID", None]
    assert task.synchronize().name == "LLM_PARAM_INVALID"
    assert synchronizer.layers() == list(range(stop_at + 1))
    assert other.dump(second.cache_id) == before


@pytest.mark.parametrize("answer", [0, None, "", []])
def test_c65_any_falsy_answer_counts(pair: Pair, remote: bool, answer: Any) -> None:
    local, peer = pair()
    source = local.add_rows()
    target = rows_of(local.api, remote, 2, peer)
    task = local.transfer(
        recorder(local.api, lambda layer: answer), source, [target.config(range(2))]
    )
    assert names(task.get_results()) == ["LLM_PARAM_INVALID"]


def test_c66_failure_stops_the_job(pair: Pair, remote: bool) -> None:
    """Two configs of one cluster: the vendor's engine keeps one result per cluster, ours one per
    config."""
    local, peer = pair()
    source = local.add_rows(tensors=8, seed=100)
    target = rows_of(local.api, remote, 2, peer, tensors=8)
    before = peer.dump(target.cache_id)
    synchronizer = recorder(local.api)
    configs = [
        target.config(range(1)),
        target.config(range(1, 4), src_row=9),
        target.config(range(1, 4)),
        target.config(range(3, 4)),
    ]
    task = local.transfer(synchronizer, source, configs)
    assert names(task.get_results()) == ["LLM_SUCCESS", "LLM_PARAM_INVALID", None, None]
    assert task.synchronize().name == "LLM_PARAM_INVALID"
    assert synchronizer.layers() == [0, 1]
    sent = moved(before[:2], local.dump(source)[:2], [(0, 0, ROW)])
    assert peer.dump(target.cache_id) == sent + before[2:]


def test_c67_c68_timeouts_while_running(pair: Pair, remote: bool) -> None:
    local, peer = pair()
    source = local.add_rows(seed=100)
    target = rows_of(local.api, remote, 2, peer)
    held = Held(first=1)
    configs = [target.config(range(2)), target.config(range(1))]
    task = local.transfer(recorder(local.api, held), source, configs)
    held.reached.wait()
    assert task.synchronize(0).name == "LLM_TIMEOUT"
    assert names(task.get_results(0)) == ["LLM_TIMEOUT"] * 2
    assert task.synchronize(5).name == "LLM_TIMEOUT"
    assert names(task.get_results(timeout_in_millis=1)) == ["LLM_TIMEOUT"] * 2
    held.release()
    assert task.synchronize().name == "LLM_SUCCESS"
    assert task.synchronize(0).name == "LLM_SUCCESS"
    assert names(task.get_results(2**32 - 1)) == ["LLM_SUCCESS"] * 2


def test_c69_timeouts_are_checked(pair: Pair) -> None:
    local, _ = pair()
    task = local.transfer(recorder(local.api), local.add_rows(), [])
    for wait in (task.synchronize, task.get_results):
        with pytest.raises(TypeError):
            wait("1")
        for timeout in (-1, 2**32):
            with pytest.raises(ValueError):
                wait(timeout)


def test_no_configs_end_in_success(pair: Pair) -> None:
    local, _ = pair()
    synchronizer = recorder(local.api)
    task = local.transfer(synchronizer, local.add_rows(), [])
    assert task.synchronize().name == "LLM_SUCCESS"
    assert task.get_results() == []
    assert synchronizer.calls == []

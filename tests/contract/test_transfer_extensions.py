"""Extensions of the host engine: tensors per layer, the native synchronizer, reservations."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from contract.cluster import Cluster, block_pieces, moved
from contract.errors import refused, wait_until
from contract.layerwise import BLOCK, ROW, Held, recorder, rows_of
from contract.peer import Peer

Pair = Callable[..., tuple[Cluster, Peer]]
MakePeer = Callable[..., Peer]

MIB = 1 << 20


def names(task: Any) -> list[str | None]:
    return [None if status is None else status.name for status in task.get_results()]


def by_key(local: Cluster, layers: int, token: int | None = None, cluster_id: int = 2) -> Any:
    key = local.api.BlocksCacheKey(cluster_id)
    return local.api.TransferWithCacheKeyConfig(key, range(layers), range(layers), token=token)


class TestTensorsPerLayer:
    @pytest.mark.parametrize(("tensors", "per_layer"), [(3, 1), (6, 3), (5, 5)])
    def test_any_number(self, pair: Pair, remote: bool, tensors: int, per_layer: int) -> None:
        local, peer = pair(remote=remote)
        source = local.add_rows(tensors=tensors, seed=100)
        target = rows_of(local.api, remote, 2, peer, tensors=tensors)
        before = peer.dump(target.cache_id)
        layers = range(tensors // per_layer)
        config = (
            target.config(layers) if remote else local.api.TransferConfig(2, target.addrs, layers)
        )
        synchronizer = recorder(local.api)
        task = local.transfer(synchronizer, source, [config], tensor_num_per_layer=per_layer)
        assert names(task) == ["LLM_SUCCESS"]
        assert synchronizer.layers() == list(layers)
        sent = moved(before, local.dump(source), [(0, 0, ROW)])
        assert peer.dump(target.cache_id) == sent

    def test_is_checked(self, pair: Pair) -> None:
        local, _ = pair()
        source = local.add_rows(tensors=4)
        synchronizer = recorder(local.api)
        for value in (0, 3):
            with refused(local.api):
                local.transfer(synchronizer, source, [], tensor_num_per_layer=value)
        with pytest.raises(TypeError):
            local.transfer(synchronizer, source, [], tensor_num_per_layer="2")
        with pytest.raises(ValueError):
            local.transfer(synchronizer, source, [], tensor_num_per_layer=-1)


class TestNativeSynchronizer:
    def test_layers_leave_as_they_are_marked(self, pair: Pair) -> None:
        local, peer = pair()
        source, target = local.add_blocks(seed=100), peer.add_blocks()
        before = peer.dump(target)
        sent = moved(before, local.dump(source), block_pieces([1], [2], BLOCK))
        synchronizer = local.api.NativeLayerSynchronizer(2)
        assert isinstance(synchronizer, local.api.LayerSynchronizer)
        synchronizer.mark(1)
        task = local.transfer(synchronizer, source, [by_key(local, 2)], [1], [2])
        assert task.synchronize(20).name == "LLM_TIMEOUT"
        assert peer.dump(target) == before
        synchronizer.mark(0)
        assert names(task) == ["LLM_SUCCESS"]
        assert peer.dump(target) == sent

    def test_next_step_does_not_disturb_what_was_marked(self, pair: Pair) -> None:
        local, peer = pair()
        source, target = local.add_blocks(seed=100), peer.add_blocks()
        sent = moved(peer.dump(target), local.dump(source), block_pieces([1], [2], BLOCK))
        synchronizer = local.api.NativeLayerSynchronizer(2)
        peer.stop()
        task = local.transfer(synchronizer, source, [by_key(local, 2)], [1], [2])
        synchronizer.mark_all()
        synchronizer.reset()
        peer.resume()
        assert names(task) == ["LLM_SUCCESS"]
        assert peer.dump(target) == sent

    def test_marks_are_of_one_step(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks()
        source = local.add_blocks()
        synchronizer = local.api.NativeLayerSynchronizer(2)
        synchronizer.mark_all()
        synchronizer.reset()
        task = local.transfer(synchronizer, source, [by_key(local, 2)], [1], [2])
        synchronizer.mark(0)
        assert task.synchronize(20).name == "LLM_TIMEOUT"
        synchronizer.reset()
        synchronizer.mark_all()
        assert names(task) == ["LLM_PARAM_INVALID"]
        again = local.transfer(synchronizer, source, [by_key(local, 2)], [1], [2])
        assert names(again) == ["LLM_SUCCESS"]

    def test_abort(self, pair: Pair) -> None:
        local, peer = pair()
        target = peer.add_blocks()
        before = peer.dump(target)
        source = local.add_blocks(seed=100)
        synchronizer = local.api.NativeLayerSynchronizer(2)
        task = local.transfer(synchronizer, source, [by_key(local, 2)], [1], [2])
        synchronizer.abort()
        synchronizer.mark_all()
        assert names(task) == ["LLM_PARAM_INVALID"]
        assert peer.dump(target) == before
        late = local.transfer(synchronizer, source, [by_key(local, 2)], [1], [2])
        assert names(late) == ["LLM_PARAM_INVALID"]
        synchronizer.reset()
        synchronizer.mark_all()
        task = local.transfer(synchronizer, source, [by_key(local, 2)], [1], [2])
        assert names(task) == ["LLM_SUCCESS"]

    def test_dropped_one_ends_the_transfer(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks()
        source = local.add_blocks()
        synchronizer = local.api.NativeLayerSynchronizer(2)
        task = local.transfer(synchronizer, source, [by_key(local, 2)], [1], [2])
        del synchronizer
        assert names(task) == ["LLM_PARAM_INVALID"]

    def test_too_few_layers(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks()
        synchronizer = local.api.NativeLayerSynchronizer(1)
        synchronizer.mark_all()
        task = local.transfer(synchronizer, local.add_blocks(), [by_key(local, 2)], [1], [2])
        assert names(task) == ["LLM_PARAM_INVALID"]
        with pytest.raises(IndexError):
            synchronizer.mark(1)

    def test_used_from_python(self, api: Any) -> None:
        synchronizer = api.NativeLayerSynchronizer(3)
        assert synchronizer.synchronize_layer(0, 1) is False
        synchronizer.mark(0)
        assert synchronizer.synchronize_layer(0, None) is True
        waiting = threading.Thread(target=synchronizer.synchronize_layer, args=(1, None))
        waiting.start()
        synchronizer.mark(1)
        waiting.join()

    def test_subclass_that_overrides_is_asked(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks()
        asked: list[int] = []

        class Own(local.api.NativeLayerSynchronizer):  # type: ignore[misc]
            def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
                asked.append(layer_index)
                return bool(super().synchronize_layer(layer_index, timeout_in_millis))

        synchronizer = Own(2)
        synchronizer.mark_all()
        task = local.transfer(synchronizer, local.add_blocks(), [by_key(local, 2)], [1], [2])
        assert names(task) == ["LLM_SUCCESS"]
        assert asked == [0, 1]

    def test_overlapping_pushes_are_judged_in_order(self, pair: Pair) -> None:
        """The second config fails as soon as it is started, when the first one is under way."""
        local, peer = pair()
        source, target = local.add_rows(seed=100), rows_of(local.api, True, 2, peer)
        before = peer.dump(target.cache_id)
        synchronizer = local.api.NativeLayerSynchronizer(2)
        synchronizer.mark_all()
        configs = [
            target.config(range(1)),
            target.config(range(1), row=1),
            target.config(range(1), src_row=9),
            target.config(range(2), row=2),
        ]
        task = local.transfer(synchronizer, source, configs)
        assert names(task) == ["LLM_SUCCESS", "LLM_SUCCESS", "LLM_PARAM_INVALID", None]
        sent = moved(before[:2], local.dump(source)[:2], [(0, 0, ROW), (0, ROW, ROW)])
        assert peer.dump(target.cache_id) == sent + before[2:]

    def test_first_of_overlapping_failures_counts(self, pair: Pair) -> None:
        """The peer refuses the first config, this process the second."""
        local, peer = pair()
        source, target = local.add_rows(), rows_of(local.api, True, 2, peer)
        synchronizer = local.api.NativeLayerSynchronizer(2)
        synchronizer.mark_all()
        configs = [target.config(range(2), row=9), target.config(range(2), src_row=9)]
        task = local.transfer(synchronizer, source, configs)
        assert names(task) == ["LLM_PARAM_INVALID", None]

    def test_many_layers(self, pair: Pair) -> None:
        local, peer = pair()
        source = local.add_blocks(tensors=200, blocks=4, seed=100)
        target = peer.add_blocks(tensors=200, blocks=4)
        before = peer.dump(target)
        synchronizer = local.api.NativeLayerSynchronizer(100)
        task = local.transfer(synchronizer, source, [by_key(local, 100)], [1, 3], [0, 2])
        for layer in reversed(range(100)):
            synchronizer.mark(layer)
        assert names(task) == ["LLM_SUCCESS"]
        pieces = block_pieces([1, 3], [0, 2], BLOCK)
        assert peer.dump(target) == moved(before, local.dump(source), pieces)

    def test_stopped_destination_times_out_with_overlap(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=300)
        peer.add_blocks(tensors=40)
        source = local.add_blocks(tensors=40)
        synchronizer = local.api.NativeLayerSynchronizer(20)
        synchronizer.mark_all()
        peer.stop()
        task = local.transfer(synchronizer, source, [by_key(local, 20)], [1], [2])
        assert names(task) == ["LLM_TIMEOUT"]
        peer.resume()

    def test_runs_while_this_thread_keeps_the_gil(self, pair: Pair) -> None:
        """`results` of the native task does not release the GIL, and Python is told not to."""
        local, peer = pair()
        peer.add_blocks()
        synchronizer = local.api.NativeLayerSynchronizer(2)
        task = local.transfer(synchronizer, local.add_blocks(), [by_key(local, 2)], [1], [2])
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000.0)
        try:
            synchronizer.mark_all()
            end = time.monotonic() + 30
            while task._task.results() == [None] and time.monotonic() < end:
                pass
            assert task._task.results() == [0]
        finally:
            sys.setswitchinterval(interval)

    def test_one_for_several_transfers(self, pair: Pair) -> None:
        local, peer = pair()
        source, target = local.add_blocks(seed=100), peer.add_blocks()
        before = peer.dump(target)
        synchronizer = local.api.NativeLayerSynchronizer(2)
        tasks = [
            local.transfer(synchronizer, source, [by_key(local, 2)], [i], [15 - i])
            for i in range(8)
        ]
        synchronizer.mark_all()
        assert [names(task) for task in tasks] == [["LLM_SUCCESS"]] * 8
        pieces = block_pieces(range(8), [15 - i for i in range(8)], BLOCK)
        assert peer.dump(target) == moved(before, local.dump(source), pieces)


class TestReservations:
    def test_blocks_are_named_by_position(self, pair: Pair) -> None:
        local, peer = pair()
        source, target = local.add_blocks(seed=100), peer.add_blocks()
        before, content = peer.dump(target), local.dump(source)
        token = peer.open_reservation(target, [9, 4, 5, 6, 2])
        assert token > 0
        local.push_blocks(local.api.BlocksCacheKey(2), source, [0, 1], [3, 0], token=token)
        pushed = moved(before, content, block_pieces([0, 1], [6, 9], BLOCK))
        assert peer.dump(target) == pushed
        task = local.transfer(
            recorder(local.api), source, [by_key(local, 2, token)], [10, 11, 12], [1, 2, 4]
        )
        assert names(task) == ["LLM_SUCCESS"]
        after = moved(pushed, content, block_pieces([10, 11, 12], [4, 5, 2], BLOCK))
        assert peer.dump(target) == after
        peer.close_reservation(token)

    def test_row_goes_to_positions(self, pair: Pair) -> None:
        local, peer = pair()
        source, target = local.add_rows(row_bytes=150, seed=100), peer.add_blocks()
        before = peer.dump(target)
        token = peer.open_reservation(target, [9, 4, 5])
        task = local.transfer(
            recorder(local.api), source, [by_key(local, 2, token)], None, [0, 1, 2], BLOCK
        )
        assert names(task) == ["LLM_SUCCESS"]
        pieces = [(0, 9 * BLOCK, 64), (64, 4 * BLOCK, 64), (128, 5 * BLOCK, 22)]
        assert peer.dump(target) == moved(before, local.dump(source), pieces)

    @pytest.mark.parametrize("dst", [[3], [0, 3], [2**64 - 1]])
    def test_position_outside(self, pair: Pair, dst: list[int]) -> None:
        local, peer = pair()
        source, target = local.add_blocks(seed=100), peer.add_blocks()
        before = peer.dump(target)
        token = peer.open_reservation(target, [9, 4, 5])
        with refused(local.api):
            local.push_blocks(
                local.api.BlocksCacheKey(2), source, list(range(len(dst))), dst, token=token
            )
        assert peer.dump(target) == before

    def test_closed_or_unknown_token_copies_nothing(self, pair: Pair) -> None:
        local, peer = pair()
        source, target = local.add_blocks(seed=100), peer.add_blocks()
        before = peer.dump(target)
        token = peer.open_reservation(target, [9, 4, 5])
        peer.close_reservation(token)
        peer.close_reservation(token)
        for wrong in (token, 12345):
            with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
                local.push_blocks(local.api.BlocksCacheKey(2), source, [1], [1], token=wrong)
            task = local.transfer(recorder(local.api), source, [by_key(local, 2, wrong)], [1], [1])
            assert names(task) == ["LLM_KV_CACHE_NOT_EXIST"]
        assert peer.dump(target) == before

    def test_closing_ends_one_destination_only(self, pair: Pair, make_peer: MakePeer) -> None:
        local, peer = pair()
        other = make_peer(3)
        assert local.link(3, other.listen_port).name == "LLM_SUCCESS"
        source = local.add_blocks(tensors=8, seed=100)
        targets = [side.add_blocks(tensors=8) for side in (peer, other)]
        before, content = peer.dump(targets[0]), local.dump(source)
        tokens = [
            side.open_reservation(target, [7])
            for side, target in zip((peer, other), targets, strict=True)
        ]

        def close_at_2(layer: int) -> bool:
            if layer == 2:
                peer.close_reservation(tokens[0])
            return True

        synchronizer = recorder(local.api, close_at_2)
        configs = [by_key(local, 4, tokens[0], 2), by_key(local, 4, tokens[1], 3)]
        task = local.transfer(synchronizer, source, configs, [3], [0])
        assert names(task) == ["LLM_KV_CACHE_NOT_EXIST", "LLM_SUCCESS"]
        assert synchronizer.layers() == [0, 1, 2, 3]
        sent = moved(before, content, block_pieces([3], [7], BLOCK))
        assert peer.dump(targets[0]) == sent[:4] + before[4:]
        assert other.dump(targets[1]) == sent

    def test_layers_end_when_nobody_wants_them(self, pair: Pair) -> None:
        local, peer = pair()
        source, target = local.add_blocks(tensors=8), peer.add_blocks(tensors=8)
        token = peer.open_reservation(target, [7])
        peer.close_reservation(token)
        synchronizer = recorder(local.api)
        task = local.transfer(synchronizer, source, [by_key(local, 4, token)], [3], [0])
        assert names(task) == ["LLM_KV_CACHE_NOT_EXIST"]
        assert synchronizer.layers() == [0]

    def test_closing_stops_a_copy_in_progress(self, pair: Pair) -> None:
        """Here the destination is this process: once it has closed, none of its bytes change."""
        local, peer = pair(timeout_ms=600_000)
        blocks = 64
        source = peer.add_blocks(tensors=2, blocks=blocks, block_bytes=MIB, seed=50)
        target = local.add_blocks(tensors=2, blocks=blocks, block_bytes=MIB, seed=1)
        first = local.dump(target)[0][:MIB]
        token = local.open_reservation(target, list(range(blocks)))
        scattered = list(range(0, blocks, 2)) + list(range(1, blocks, 2))
        peer.start(
            "push_blocks", local.api.BlocksCacheKey(1), source, scattered, scattered, token=token
        )
        memory = local.tensors[target][0]
        wait_until(lambda: memory.byte(0) != first[0] or memory.byte(MIB - 1) != first[MIB - 1])
        local.close_reservation(token)
        after = local.dump(target)
        try:
            peer.result()
        except local.api.LLMException as error:
            assert error.status_code.name == "LLM_KV_CACHE_NOT_EXIST"  # noqa: PT017
        assert local.dump(target) == after

    def test_stopped_source_cannot_change_reused_blocks(self, pair: Pair) -> None:
        """It sends its push when it runs again; the reservation has been closed meanwhile."""
        local, peer = pair(timeout_ms=600_000)
        target = local.add_blocks(seed=1)
        source = peer.add_blocks(seed=50)
        token = local.open_reservation(target, [7, 8])
        peer.stop()
        peer.start("push_blocks", local.api.BlocksCacheKey(1), source, [1, 2], [0, 1], token=token)
        local.close_reservation(token)
        before = local.dump(target)
        peer.resume()
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            peer.result()
        assert local.dump(target) == before

    def test_token_is_for_one_cache(self, pair: Pair) -> None:
        local, peer = pair()
        source, target = local.add_blocks(seed=100), peer.add_blocks()
        other = peer.add_blocks(model_id=1)
        before = peer.dump(target), peer.dump(other)
        token = peer.open_reservation(other, [1])
        with refused(local.api):
            local.push_blocks(local.api.BlocksCacheKey(2), source, [1], [0], token=token)
        peer.unregister(other)
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.push_blocks(local.api.BlocksCacheKey(2, 1), source, [1], [0], token=token)
        assert (peer.dump(target), peer.dump(other)) == before

    def test_arguments(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks()
        cache, rows = local.add_blocks(), local.add_rows()
        for blocks in ([], [16]):
            with refused(local.api):
                local.open_reservation(cache, blocks)
        with refused(local.api):
            local.open_reservation(rows, [0])
        with pytest.raises(TypeError):
            local.open_reservation(cache, [-1])
        with pytest.raises(TypeError):
            local.manager.open_reservation(7, [0])
        local.unregister(cache)
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.open_reservation(cache, [0])
        for call in (
            local.close_reservation,
            lambda token: local.push_blocks(
                local.api.BlocksCacheKey(2), cache, [0], [0], token=token
            ),
            lambda token: by_key(local, 1, token),
        ):
            with pytest.raises(TypeError):
                call("1")
            with refused(local.api):
                call(-1)
        with refused(local.api):
            local.transfer(recorder(local.api), rows, [by_key(local, 2, 7)])

    def test_closing_waits_for_no_other_process(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=600_000)
        target = local.add_blocks()
        token = local.open_reservation(target, [1])
        peer.stop()
        local.close_reservation(token)
        peer.resume()


def test_held_layer_of_an_old_attempt_changes_nothing(pair: Pair) -> None:
    """The last layer of a first attempt comes after its blocks were given to a second one."""
    local, peer = pair()
    source, target = local.add_blocks(seed=100), peer.add_blocks()
    first = peer.open_reservation(target, [3])
    held = Held(first=1)
    old = local.transfer(recorder(local.api, held), source, [by_key(local, 2, first)], [0], [0])
    held.reached.wait()
    peer.close_reservation(first)
    second = peer.open_reservation(target, [3])
    new = local.transfer(recorder(local.api), source, [by_key(local, 2, second)], [5], [0])
    assert names(new) == ["LLM_SUCCESS"]
    before = peer.dump(target)
    held.release()
    assert names(old) == ["LLM_KV_CACHE_NOT_EXIST"]
    assert peer.dump(target) == before

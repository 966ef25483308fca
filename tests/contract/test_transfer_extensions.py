"""Extensions of the host engine: tensors per layer, the native synchronizer, reservations."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest

from contract.actions import by_key, names
from contract.engines import Restriction, refused_by_vendor, remote_mode
from contract.errors import refused
from contract.fixtures import Pair
from contract.layerwise import BLOCK, ROW, recorder, rows_of
from contract.memory import block_pieces, moved


@refused_by_vendor(Restriction.NO_EXTENSIONS)
class TestTensorsPerLayer:
    @pytest.mark.parametrize(("tensors", "per_layer"), [(3, 1), (6, 3), (5, 5)])
    def test_any_number(self, pair: Pair, remote: bool, tensors: int, per_layer: int) -> None:
        local, peer = pair()
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

    @remote_mode
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


@refused_by_vendor(Restriction.NO_EXTENSIONS)
@remote_mode
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


@refused_by_vendor(Restriction.NO_EXTENSIONS)
def test_native_synchronizer_used_from_python(api: Any) -> None:
    synchronizer = api.NativeLayerSynchronizer(3)
    assert synchronizer.synchronize_layer(0, 1) is False
    synchronizer.mark(0)
    assert synchronizer.synchronize_layer(0, None) is True
    waiting = threading.Thread(target=synchronizer.synchronize_layer, args=(1, None))
    waiting.start()
    synchronizer.mark(1)
    waiting.join()

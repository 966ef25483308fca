"""transfer_cache_async: dead and stopped destinations, failing synchronizers, ends of processes."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest

from contract.actions import link_later, names
from contract.engines import Restriction, refused_by_vendor, remote_mode
from contract.errors import refused, wait_until
from contract.fixtures import MakePeer, Pair
from contract.layerwise import ROW, Held, recorder, rows_of
from contract.memory import moved
from contract.peer import Peer


class TestDestinations:
    def test_killed_in_the_middle(self, pair: Pair, remote: bool) -> None:
        local, peer = pair(timeout_ms=600_000)
        target = rows_of(local.api, remote, 2, peer)

        def kill_at_1(layer: int) -> bool:
            if layer == 1:
                peer.kill()
            return True

        synchronizer = recorder(local.api, kill_at_1)
        task = local.transfer(synchronizer, local.add_rows(), [target.config(range(2))])
        assert names(task) == ["LLM_FAILED"]
        assert task.synchronize().name == "LLM_FAILED"

    def test_killed_while_a_layer_waits_for_it(self, pair: Pair, remote: bool) -> None:
        """Nothing waits for the ten minutes of sync_kv_timeout."""
        local, peer = pair(timeout_ms=600_000)
        target = rows_of(local.api, remote, 2, peer)
        source = local.add_rows()
        peer.stop()
        task = local.transfer(recorder(local.api), source, [target.config(range(2))])
        assert task.synchronize(50).name == "LLM_TIMEOUT"
        peer.kill()
        assert names(task) == ["LLM_FAILED"]

    def test_stopped_in_the_middle(self, pair: Pair, remote: bool) -> None:
        local, peer = pair(timeout_ms=300)
        source = local.add_rows(tensors=8, seed=100)
        target = rows_of(local.api, remote, 2, peer, tensors=8)
        before = peer.dump(target.cache_id)

        def stop_at_2(layer: int) -> bool:
            if layer == 2:
                peer.stop()
            return True

        synchronizer = recorder(local.api, stop_at_2)
        task = local.transfer(synchronizer, source, [target.config(range(4))])
        assert names(task) == ["LLM_TIMEOUT"]
        assert synchronizer.layers() == [0, 1, 2]
        peer.resume()
        sent = moved(before, local.dump(source), [(0, 0, ROW)])
        assert peer.dump(target.cache_id) == sent[:4] + before[4:]

        assert names(local.transfer(recorder(local.api), source, [target.config(range(4))])) == [
            "LLM_FAILED"
        ]
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        again = local.transfer(recorder(local.api), source, [target.config(range(4))])
        assert names(again) == ["LLM_SUCCESS"]
        assert peer.dump(target.cache_id) == sent

    @refused_by_vendor(Restriction.IDLE_FINALIZE)
    def test_unlinked_in_the_middle(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        target = rows_of(local.api, remote, 2, peer)

        def unlink_at_1(layer: int) -> bool:
            return layer == 0 or local.unlink(2).name == "LLM_SUCCESS"

        task = local.transfer(
            recorder(local.api, unlink_at_1), local.add_rows(), [target.config(range(2))]
        )
        assert names(task) == ["LLM_NOT_YET_LINK"]

    def test_source_unregistered_in_the_middle(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        source = local.add_rows()
        target = rows_of(local.api, remote, 2, peer)

        def unregister_at_1(layer: int) -> bool:
            if layer == 1:
                local.unregister(source)
            return True

        task = local.transfer(
            recorder(local.api, unregister_at_1), source, [target.config(range(2))]
        )
        assert names(task) == ["LLM_KV_CACHE_NOT_EXIST"]

    def test_one_dead_destination_ends_the_others(
        self, pair: Pair, make_peer: MakePeer, remote: bool
    ) -> None:
        local, peer = pair()
        other = make_peer(3, remote=remote)
        link_later(local, other)
        source = local.add_rows()
        configs = [
            rows_of(local.api, remote, 2, peer).config(range(2)),
            rows_of(local.api, remote, 3, other).config(range(2)),
        ]
        peer.kill()
        task = local.transfer(recorder(local.api), source, configs)
        assert names(task) == ["LLM_FAILED", None]


class TestSynchronizers:
    def test_exception_ends_in_failed_and_is_logged(
        self, pair: Pair, remote: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The vendor's engine reports LLM_SUCCESS after its thread has died."""
        local, peer = pair()
        source = local.add_rows(tensors=8)
        target = rows_of(local.api, remote, 2, peer, tensors=8)

        def fail_at_1(layer: int) -> bool:
            if layer == 1:
                raise ValueError("no event for this layer")
            return True

        configs = [target.config(range(4)), target.config(range(1)), target.config(range(2, 4))]
        with caplog.at_level(logging.ERROR):
            task = local.transfer(recorder(local.api, fail_at_1), source, configs)
            assert task.synchronize().name == "LLM_FAILED"
        assert names(task) == ["LLM_FAILED", "LLM_SUCCESS", None]
        assert "no event for this layer" in caplog.text
        assert "fail_at_1" in caplog.text

    def test_answer_without_a_truth_value(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        target = rows_of(local.api, remote, 2, peer)

        class Neither:
            def __bool__(self) -> bool:
                raise ValueError("neither")

        task = local.transfer(
            recorder(local.api, lambda layer: Neither()),
            local.add_rows(),
            [target.config(range(2))],
        )
        assert names(task) == ["LLM_FAILED"]

    @refused_by_vendor(Restriction.ONE_CALL_PER_LINK)
    def test_blocked_one_leaves_everything_else_running(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        source, cache = local.add_rows(seed=100), local.add_rows()
        target = rows_of(local.api, remote, 2, peer)
        held = Held()
        task = local.transfer(recorder(local.api, held), source, [target.config(range(2))])
        held.reached.wait()
        other = local.transfer(recorder(local.api), source, [target.config(range(2), row=1)])
        assert names(other) == ["LLM_SUCCESS"]
        local.pull_cache(local.api.CacheKeyByIdAndIndex(2, target.cache_id), cache)
        assert task.synchronize(0).name == "LLM_TIMEOUT"
        held.release()
        assert names(task) == ["LLM_SUCCESS"]

    def test_thread_local_values_last_for_the_task(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        target = rows_of(local.api, remote, 2, peer, tensors=8)
        values = threading.local()
        seen: list[int] = []

        def count(layer: int) -> bool:
            values.count = getattr(values, "count", 0) + 1
            seen.append(values.count)
            return True

        task = local.transfer(
            recorder(local.api, count), local.add_rows(tensors=8), [target.config(range(4))]
        )
        assert names(task) == ["LLM_SUCCESS"]
        assert seen == [1, 2, 3, 4]

    def test_synchronizer_is_given_back(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        target = rows_of(local.api, remote, 2, peer)
        synchronizer = recorder(local.api)
        gone = weakref.ref(synchronizer)
        task = local.transfer(synchronizer, local.add_rows(), [target.config(range(2))])
        assert names(task) == ["LLM_SUCCESS"]
        del synchronizer
        gc.collect()
        assert gone() is None


class TestTasks:
    def test_dropped_task_goes_on(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        source = local.add_rows(seed=100)
        target = rows_of(local.api, remote, 2, peer)
        after = moved(peer.dump(target.cache_id), local.dump(source), [(0, 0, ROW)])
        held = Held()
        local.transfer(recorder(local.api, held), source, [target.config(range(2))])
        gc.collect()
        held.release()
        wait_until(lambda: peer.dump(target.cache_id) == after)

    def test_tasks_leave_no_thread_and_no_memory(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        source = local.add_rows()
        target = rows_of(local.api, remote, 2, peer)

        def cycle() -> None:
            task = local.transfer(recorder(local.api), source, [target.config(range(2))])
            assert names(task) == ["LLM_SUCCESS"]

        for _ in range(100):
            cycle()
        before = local.descriptors(), local.native_threads(), local.resident_kib()
        for _ in range(500):
            cycle()
        assert local.descriptors() <= before[0]
        assert local.native_threads() <= before[1] + 1
        assert local.resident_kib() < before[2] + 4096

    @refused_by_vendor(Restriction.ONE_CALL_PER_LINK)
    def test_several_at_once(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        source = local.add_rows(tensors=8, rows=8, seed=100)
        target = rows_of(local.api, remote, 2, peer, tensors=8, rows=8)
        tasks = [
            local.transfer(
                recorder(local.api), source, [target.config(range(4), row=row, src_row=7 - row)]
            )
            for row in range(8)
        ]
        assert [names(task) for task in tasks] == [["LLM_SUCCESS"]] * 8
        pieces = [((7 - row) * ROW, row * ROW, ROW) for row in range(8)]
        content = local.dump(source)
        assert peer.dump(target.cache_id) == moved(content, content, pieces)

    @remote_mode
    def test_both_ends_transfer_to_each_other(self, pair: Pair) -> None:
        local, peer = pair()
        mine, theirs = local.add_blocks(seed=100), peer.add_blocks()
        key = local.api.BlocksCacheKey(2)
        config = local.api.TransferWithCacheKeyConfig(key, range(2), range(2))
        for _ in range(30):
            peer.start("push_blocks", local.api.BlocksCacheKey(1), theirs, [1], [2])
            task = local.transfer(recorder(local.api), mine, [config], [3], [4])
            assert names(task) == ["LLM_SUCCESS"]
            peer.result()


class TestFinalize:
    @refused_by_vendor(Restriction.IDLE_FINALIZE)
    def test_ends_a_running_transfer(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        target = rows_of(local.api, remote, 2, peer)
        before = peer.dump(target.cache_id)
        held = Held()
        manager, source = local.manager, local.add_rows(seed=100)
        task = local.transfer(recorder(local.api, held), source, [target.config(range(2))])
        held.reached.wait()
        threads = local.native_threads()
        finalize = threading.Thread(target=local.finalize)
        finalize.start()
        # One thread more, and the listening one and the link's are gone.
        wait_until(lambda: local.native_threads() == threads - 1)
        held.release()
        finalize.join()
        assert names(task) == ["LLM_FAILED"]
        assert peer.dump(target.cache_id) == before
        with refused(local.api):
            manager.transfer_cache_async(local.caches[source], recorder(local.api), [])

    @refused_by_vendor(Restriction.IDLE_FINALIZE)
    def test_does_not_wait_for_ever_for_a_synchronizer(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        target = rows_of(local.api, remote, 2, peer)
        held = Held()
        task = local.transfer(
            recorder(local.api, held), local.add_rows(), [target.config(range(2))]
        )
        held.reached.wait()
        local.finalize()
        assert task.synchronize(0).name == "LLM_TIMEOUT"
        held.release()
        assert names(task) == ["LLM_FAILED"]

    @refused_by_vendor(Restriction.IDLE_FINALIZE)
    def test_while_a_stopped_destination_is_waited_for(self, pair: Pair, remote: bool) -> None:
        local, peer = pair(timeout_ms=600_000)
        target = rows_of(local.api, remote, 2, peer)
        source = local.add_rows()
        peer.stop()
        task = local.transfer(recorder(local.api), source, [target.config(range(2))])
        assert task.synchronize(20).name == "LLM_TIMEOUT"
        local.finalize()
        peer.resume()
        assert names(task) == ["LLM_FAILED"]


SCRIPT = """
import os, sys, threading
from contract.cluster import Cluster
from contract.layerwise import recorder
from vllm_llmdd_connector import datadist

local = Cluster(1)
source = local.add_blocks()
assert local.link(2, int(sys.argv[1])).name == "LLM_SUCCESS"
key = datadist.BlocksCacheKey(2)
config = datadist.TransferWithCacheKeyConfig(key, range(2), range(2))
reached = threading.Event()

def wait(layer):
    reached.set()
    threading.Event().wait()

def start(synchronizer):
    return local.transfer(synchronizer, source, [config], [1], [2])
"""

ENDS = {
    "finished": "assert start(recorder(datadist)).synchronize().name == 'LLM_SUCCESS'",
    "blocked": "task = start(recorder(datadist, wait)); reached.wait()",
    "native": "task = start(datadist.NativeLayerSynchronizer(2))",
    "dropped": "start(datadist.NativeLayerSynchronizer(2))",
    "kept synchronizer": "s = datadist.NativeLayerSynchronizer(2); start(s)",
}

FORK = """
synchronizer = datadist.NativeLayerSynchronizer(2)
task = start(synchronizer)
# Its thread sleeps by then: a lock of malloc that it held would stay locked in the child.
assert task.synchronize(100).name == "LLM_TIMEOUT"
child = os.fork()
if child == 0:
    for call in (task.synchronize, task.get_results, lambda: start(recorder(datadist))):
        try:
            call()
        except datadist.LLMException as error:
            assert error.status_code.name == "LLM_FAILED"
        else:
            os._exit(1)
    del task, synchronizer
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
synchronizer.mark_all()
assert task.synchronize().name == "LLM_SUCCESS"
"""


class TestProcesses:
    def run(self, peer: Peer, body: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", SCRIPT + textwrap.dedent(body), str(peer.listen_port)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @pytest.mark.parametrize("end", ENDS)
    def test_exit_without_finalize_is_clean(self, make_peer: MakePeer, end: str) -> None:
        peer = make_peer(2)
        peer.add_blocks()
        done = self.run(peer, ENDS[end])
        assert done.returncode == 0, done.stderr

    def test_forked_child_refuses_and_leaves_the_parent_alone(self, make_peer: MakePeer) -> None:
        peer = make_peer(2)
        peer.add_blocks()
        done = self.run(peer, FORK)
        assert done.returncode == 0, done.stderr

    def test_ctrl_c_ends_a_wait(self, make_peer: MakePeer) -> None:
        peer = make_peer(2)
        peer.add_blocks()
        body = """
        import signal
        synchronizer = datadist.NativeLayerSynchronizer(2)
        task = start(synchronizer)
        signal.alarm(1)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            task.synchronize()
        except KeyboardInterrupt:
            sys.exit(7)
        """
        done = self.run(peer, body)
        assert done.returncode == 7, done.stderr

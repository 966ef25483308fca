"""Peers that die, stop or are too slow; memory that is not there."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from contract.cluster import Cluster, block_pieces, moved
from contract.errors import refused, wait_until
from contract.peer import Peer

Pair = Callable[..., tuple[Cluster, Peer]]
MakeLocal = Callable[..., Cluster]
MakePeer = Callable[..., Peer]

MIB = 1 << 20


class BackgroundPull:
    """A pull of many gigabytes into two megabytes: the same block again and again.

    `wait_until_copying` returns when the first block has arrived.
    """

    def __init__(self, local: Cluster, pairs: int = 20_000) -> None:
        self._pairs = pairs
        self._local = local
        self._cache = local.add_blocks(tensors=1, blocks=2, block_bytes=MIB, seed=1)
        self._old = local.dump(self._cache)[0][:MIB]
        self._thread = threading.Thread(target=self._run)
        self.error: Any = None
        self._thread.start()

    def _run(self) -> None:
        # Alternating blocks, so that no two pairs make one run.
        dst = [0, 1] * (self._pairs // 2)
        try:
            self._local.pull_blocks(self._local.api.BlocksCacheKey(2), self._cache, dst, dst)
        except self._local.api.LLMException as error:
            self.error = error

    def wait_until_copying(self) -> None:
        memory = self._local.tensors[self._cache][0]
        while memory.byte(MIB - 1) == self._old[MIB - 1] and self._thread.is_alive():
            pass
        assert self._thread.is_alive()

    def status(self) -> str:
        self._thread.join()
        assert self.error is not None
        return str(self.error.status_code.name)

    def dump(self) -> list[bytes]:
        return self._local.dump(self._cache)


def large_source(peer: Peer) -> int:
    return int(peer.add_blocks(tensors=1, blocks=2, block_bytes=MIB, seed=50))


class TestKilledPeer:
    def test_pull_from_a_dead_peer_fails(self, pair: Pair, remote: bool) -> None:
        local, peer = pair(remote=remote)
        peer.add_blocks()
        cache = local.add_blocks()
        before = local.dump(cache)
        peer.kill()
        with refused(local.api, "LLM_FAILED"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        assert local.dump(cache) == before

    def test_waiting_pull_ends_at_once(self, pair: Pair) -> None:
        """The bound of 10 minutes shows that nothing waits for sync_kv_timeout."""
        local, peer = pair(timeout_ms=600_000)
        large_source(peer)
        peer.stop()
        pull = BackgroundPull(local)
        peer.kill()
        assert pull.status() == "LLM_FAILED"

    def test_pull_that_is_copying_fails(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=600_000)
        large_source(peer)
        pull = BackgroundPull(local)
        pull.wait_until_copying()
        peer.kill()
        assert pull.status() == "LLM_FAILED"

    def test_waiting_push_ends_at_once(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=600_000)
        peer.add_blocks()
        cache = local.add_blocks()
        peer.stop()
        killer = threading.Thread(target=peer.kill)
        killer.start()
        with refused(local.api, "LLM_FAILED"):
            local.push_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        killer.join()

    def test_unlink_needs_force(self, pair: Pair) -> None:
        local, peer = pair()
        peer.kill()
        assert local.unlink(2).name == "LLM_UNLINK_FAILED"
        assert local.link_error(2) != ""
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"
        assert local.unlink(2).name == "LLM_SUCCESS"

    def test_restarted_peer_links_again(self, pair: Pair, make_peer: MakePeer) -> None:
        local, peer = pair()
        cache = local.add_blocks()
        peer.kill()
        successor = make_peer(2)
        source = successor.add_blocks(seed=100)
        assert local.link(2, successor.listen_port).name == "LLM_ALREADY_LINK"
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"
        assert local.link(2, successor.listen_port).name == "LLM_SUCCESS"
        before = local.dump(cache)
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [1], [2])
        assert local.dump(cache) == moved(
            before, successor.dump(source), block_pieces([1], [2], 64)
        )

    def test_restarted_peer_may_dial_without_an_unlink(
        self, pair: Pair, make_peer: MakePeer
    ) -> None:
        local, peer = pair()
        peer.kill()
        successor = make_peer(2)
        cache = local.add_blocks(seed=100)
        target = successor.add_blocks()
        assert successor.link(1, local.port()).name == "LLM_SUCCESS"
        before = successor.dump(target)
        successor.pull_blocks(local.api.BlocksCacheKey(1), target, [1], [2])
        assert successor.dump(target) == moved(
            before, local.dump(cache), block_pieces([1], [2], 64)
        )

    def test_peer_that_finalizes_in_order_is_gone_too(self, pair: Pair) -> None:
        local, peer = pair()
        cache = local.add_blocks()
        peer.finalize()
        with refused(local.api, "LLM_FAILED"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])


class TestStoppedPeer:
    @pytest.fixture
    def stopped(self, pair: Pair) -> Iterator[tuple[Cluster, Peer]]:
        local, peer = pair(timeout_ms=300)
        yield local, peer
        peer.resume()

    def test_pull_times_out_and_nothing_changes_later(self, stopped: tuple[Cluster, Peer]) -> None:
        local, peer = stopped
        source, cache = peer.add_blocks(seed=100), local.add_blocks()
        before = local.dump(cache)
        peer.stop()
        with refused(local.api, "LLM_TIMEOUT"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        peer.resume()
        assert peer.dump(source)  # it runs again and has seen the end of the link
        assert local.dump(cache) == before

    def test_pull_that_is_copying_times_out(self, pair: Pair) -> None:
        """The kernel copies from a stopped process; only the source's answer makes it count."""
        local, peer = pair(timeout_ms=3000)
        large_source(peer)
        pull = BackgroundPull(local)
        pull.wait_until_copying()
        peer.stop()
        assert pull.status() == "LLM_TIMEOUT"
        after = pull.dump()
        peer.resume()
        assert peer.port() == peer.listen_port
        assert pull.dump() == after

    def test_timed_out_link_refuses_until_it_is_linked_again(
        self, stopped: tuple[Cluster, Peer]
    ) -> None:
        local, peer = stopped
        source, cache = peer.add_blocks(seed=100), local.add_blocks()
        key = local.api.BlocksCacheKey(2)
        peer.stop()
        with refused(local.api, "LLM_TIMEOUT"):
            local.pull_blocks(key, cache, [0], [0])
        peer.resume()
        with refused(local.api, "LLM_FAILED") as caught:
            local.pull_blocks(key, cache, [0], [0])
        assert "link again" in str(caught.value)
        assert local.unlink(2).name == "LLM_UNLINK_FAILED"
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        before = local.dump(cache)
        local.pull_blocks(key, cache, [0], [0])
        assert local.dump(cache) == moved(before, peer.dump(source), block_pieces([0], [0], 64))

    def test_push_times_out_and_is_not_done_later(self, stopped: tuple[Cluster, Peer]) -> None:
        """The source may reuse its memory after the timeout, so the peer must not read it then."""
        local, peer = stopped
        target, cache = peer.add_blocks(), local.add_blocks(seed=100)
        before = peer.dump(target)
        peer.stop()
        with refused(local.api, "LLM_TIMEOUT"):
            local.push_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        peer.resume()
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"
        # A new link is accepted only after the old one has ended at the peer.
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        assert peer.dump(target) == before

    def test_unlink_times_out_and_force_does_not_wait(self, stopped: tuple[Cluster, Peer]) -> None:
        local, peer = stopped
        peer.stop()
        assert local.unlink(2, timeout_ms=100).name == "LLM_UNLINK_FAILED"
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"

    def test_link_to_a_stopped_peer_ends_at_its_timeout(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(), make_local()
        peer.stop()
        try:
            assert local.link(2, peer.listen_port, timeout_ms=200).name == "LLM_LINK_FAILED"
        finally:
            peer.resume()
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"


class TestSlowCopy:
    def test_pull_over_its_time_ends_the_link(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=100)
        large_source(peer)
        pull = BackgroundPull(local)
        assert pull.status() == "LLM_TIMEOUT"
        assert "sync_kv_timeout" in str(pull.error)
        with refused(local.api, "LLM_FAILED"):
            local.pull_blocks(local.api.BlocksCacheKey(2), 1, [0], [0])

    def test_push_over_its_time_ends_the_link(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=100)
        large_source(peer)
        cache = local.add_blocks(tensors=1, blocks=2, block_bytes=MIB)
        blocks = [0, 1] * 10_000
        key = local.api.BlocksCacheKey(2)
        with refused(local.api, "LLM_TIMEOUT"):
            local.push_blocks(key, cache, blocks, blocks, tensor_num_per_layer=1)
        with refused(local.api, "LLM_FAILED"):
            local.push_blocks(key, cache, [0], [0], tensor_num_per_layer=1)


class TestUnregisteringWaitsForNobodyElse:
    """A cache can be given up while a peer is stopped; the calls' bound of 10 minutes shows it."""

    @pytest.mark.parametrize("name", ["pull_blocks", "push_blocks"])
    def test_call_that_waits_for_a_stopped_peer(self, pair: Pair, name: str) -> None:
        local, peer = pair(timeout_ms=600_000)
        peer.add_blocks()
        cache = local.add_blocks()
        peer.stop()
        caught: list[BaseException] = []

        def run() -> None:
            try:
                getattr(local, name)(local.api.BlocksCacheKey(2), cache, [0], [0])
            except local.api.LLMException as error:
                caught.append(error)

        waiting = threading.Thread(target=run)
        waiting.start()
        local.unregister(cache)
        peer.resume()
        waiting.join()
        assert [error.status_code.name for error in caught] == ["LLM_KV_CACHE_NOT_EXIST"]


class TestEndDuringACopy:
    def test_unregistering_the_destination_stops_the_pull(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=600_000)
        large_source(peer)
        pull = BackgroundPull(local)
        pull.wait_until_copying()
        local.unregister(1)
        after = pull.dump()
        assert pull.status() == "LLM_KV_CACHE_NOT_EXIST"
        assert pull.dump() == after

    def test_unregistering_the_source_voids_the_pull(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=600_000)
        source = large_source(peer)
        pull = BackgroundPull(local, pairs=6000)  # this one runs to its end
        pull.wait_until_copying()
        peer.unregister(source)
        assert pull.status() == "LLM_KV_CACHE_NOT_EXIST"

    def test_forced_unlink_stops_the_pull(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=600_000)
        large_source(peer)
        pull = BackgroundPull(local)
        pull.wait_until_copying()
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"
        assert pull.status() == "LLM_FAILED"

    def test_finalize_stops_the_pull(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=600_000)
        large_source(peer)
        pull = BackgroundPull(local)
        pull.wait_until_copying()
        local.finalize()
        assert pull.status() == "LLM_FAILED"

    def test_unregistering_the_destination_stops_a_push(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=600_000)
        source = large_source(peer)
        cache = local.add_blocks(tensors=1, blocks=2, block_bytes=MIB, seed=1)
        memory, old = local.tensors[cache][0], local.dump(cache)[0]
        blocks = [0, 1] * 10_000
        key = local.api.BlocksCacheKey(1)
        peer.start("push_blocks", key, source, blocks, blocks, tensor_num_per_layer=1)
        while memory.byte(MIB - 1) == old[MIB - 1]:
            pass
        local.unregister(cache)
        after = local.dump(cache)
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            peer.result()
        assert local.dump(cache) == after


class TestMemoryThatIsNotThere:
    def test_unmapped_source_fails_this_call_only(self, pair: Pair) -> None:
        local, peer = pair()
        source = peer.add_blocks(seed=100)
        peer.register_unmapped(model_id=9)
        cache = local.add_blocks()
        with refused(local.api, "LLM_FAILED") as caught:
            local.pull_blocks(local.api.BlocksCacheKey(2, 9), cache, [0], [0])
        assert "not mapped" in str(caught.value)
        before = local.dump(cache)
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        assert local.dump(cache) == moved(before, peer.dump(source), block_pieces([0], [0], 64))

    def test_unmapped_destination_fails_this_call_only(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks()
        cache = local.register_unmapped(model_id=9)
        with refused(local.api, "LLM_FAILED"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        with refused(local.api, "LLM_FAILED"):
            peer.push_blocks(local.api.BlocksCacheKey(1, 9), 1, [0], [0])
        local.pull_blocks(local.api.BlocksCacheKey(2), local.add_blocks(), [0], [0])


class TestReachability:
    """The sentences for processes that cannot read each other's memory."""

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (errno.EPERM, ["kernel.yama.ptrace_scope", "SYS_PTRACE"]),
            (errno.ESRCH, ["PID namespace", "--pid="]),
            (errno.ENOSYS, ["seccomp"]),
        ],
    )
    def test_probe_of_the_dialling_side(
        self, make_local: MakeLocal, make_peer: MakePeer, error: int, words: list[str]
    ) -> None:
        peer, local = make_peer(), make_local()
        local.inject_probe_errno(error)
        assert local.link(2, peer.listen_port).name == "LLM_LINK_FAILED"
        assert all(word in local.link_error(2) for word in words)
        wait_until(lambda: all(word in peer.link_error(1) for word in words))
        local.inject_probe_errno(0)
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"

    @pytest.mark.parametrize(
        ("error", "words"),
        [(errno.EPERM, ["kernel.yama.ptrace_scope"]), (errno.ESRCH, ["PID namespace"])],
    )
    def test_probe_of_the_listening_side(
        self, make_local: MakeLocal, make_peer: MakePeer, error: int, words: list[str]
    ) -> None:
        peer, local = make_peer(), make_local()
        peer.inject_probe_errno(error)
        assert local.link(2, peer.listen_port).name == "LLM_LINK_FAILED"
        assert all(word in local.link_error(2) for word in words)
        peer.inject_probe_errno(0)
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_process_of_another_user(self, make_local: MakeLocal, engine: str) -> None:
        stranger = Peer()
        try:
            stranger.create(2, api=engine, user=65534)
            local = make_local()
            assert local.link(2, stranger.listen_port).name == "LLM_LINK_FAILED"
            assert "user 65534" in local.link_error(2)
            assert stranger.link(1, local.port()).name == "LLM_LINK_FAILED"
            assert "run both processes as the same user" in stranger.link_error(1)
        finally:
            stranger.release()
            stranger.close()

    @pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None,
        reason="needs root and unshare(1) for a PID namespace",
    )
    def test_process_of_another_pid_namespace(self, make_local: MakeLocal, engine: str) -> None:
        """The parent namespace sees the child's processes, but not the other way round."""
        code = f"""
import sys
import {engine} as api
d = api.LLMDataDist(api.LLMRole.MIX, 2)
d.init({{"llm.LocalCommRes": "x", "llm.listenIpInfo": "127.0.0.1:0"}})
print(d.listen_port, flush=True)
sys.stdin.read()
"""
        with subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as hidden:
            assert hidden.stdout is not None
            line = hidden.stdout.readline()
            if not line:
                pytest.skip("this machine does not allow a new PID namespace")
            local = make_local()
            assert local.link(2, int(line)).name == "LLM_LINK_FAILED"
            assert "PID namespace" in local.link_error(2)
            hidden.communicate("")


class TestStrangers:
    """Bytes that are not from an engine, sent to the listening port."""

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\x00",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\xff" * 4096,
            os.urandom(1000),
        ],
        ids=["nothing", "one byte", "http", "ones", "random"],
    )
    def test_listener_goes_on(
        self, make_local: MakeLocal, make_peer: MakePeer, data: bytes
    ) -> None:
        peer, local = make_peer(), make_local()
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", peer.listen_port)) as stranger:
                stranger.sendall(data)
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS", local.link_error(2)

    def test_silent_strangers_delay_nobody(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(), make_local()
        silent = [socket.create_connection(("127.0.0.1", peer.listen_port)) for _ in range(30)]
        try:
            assert local.link(2, peer.listen_port).name == "LLM_SUCCESS", local.link_error(2)
        finally:
            for stranger in silent:
                stranger.close()

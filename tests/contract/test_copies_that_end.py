"""Copies that are under way when a cache, a link or the engine ends; memory that is not there."""

from __future__ import annotations

import threading

import pytest

from contract.actions import MIB, BackgroundPull, large_source
from contract.engines import Restriction, refused_by_vendor, remote_mode
from contract.errors import check_sentence, refused
from contract.fixtures import Pair
from contract.memory import block_pieces, moved

TOO_MANY = 200_000
"""Blocks of 1 MiB that no machine copies within a second."""


class TestSlowCopy:
    def test_pull_over_its_time_ends_the_link(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=1000)
        large_source(peer)
        pull = BackgroundPull(local, pairs=TOO_MANY)
        assert pull.status() == "LLM_TIMEOUT"
        check_sentence(local.api, str(pull.error), "sync_kv_timeout")
        with refused(local.api, "LLM_FAILED"):
            local.pull_blocks(local.api.BlocksCacheKey(2), 1, [0], [0])

    @remote_mode
    def test_push_over_its_time_ends_the_link(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=1000)
        large_source(peer)
        cache = local.add_blocks(tensors=1, blocks=2, block_bytes=MIB)
        blocks = [0, 1] * (TOO_MANY // 2)
        key = local.api.BlocksCacheKey(2)
        with refused(local.api, "LLM_TIMEOUT"):
            local.push_blocks(key, cache, blocks, blocks, tensor_num_per_layer=1)
        with refused(local.api, "LLM_FAILED"):
            local.push_blocks(key, cache, [0], [0], tensor_num_per_layer=1)


class TestUnregisteringWaitsForNobodyElse:
    """A cache can be given up while a peer is stopped; the calls' bound of 10 minutes shows it."""

    @pytest.mark.parametrize("name", ["pull_blocks", "push_blocks"])
    def test_call_that_waits_for_a_stopped_peer(self, pair: Pair, remote: bool, name: str) -> None:
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
        pushed = name == "push_blocks" and not remote  # refused before it waits
        expected = "LLM_PARAM_INVALID" if pushed else "LLM_KV_CACHE_NOT_EXIST"
        assert [error.status_code.name for error in caught] == [expected]


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

    @refused_by_vendor(Restriction.IDLE_FINALIZE)
    def test_forced_unlink_stops_the_pull(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=600_000)
        large_source(peer)
        pull = BackgroundPull(local)
        pull.wait_until_copying()
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"
        assert pull.status() == "LLM_FAILED"

    @refused_by_vendor(Restriction.IDLE_FINALIZE)
    def test_finalize_stops_the_pull(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=600_000)
        large_source(peer)
        pull = BackgroundPull(local)
        pull.wait_until_copying()
        local.finalize()
        assert pull.status() == "LLM_FAILED"

    @remote_mode
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
        with refused(local.api, "LLM_FAILED", says="not mapped"):
            local.pull_blocks(local.api.BlocksCacheKey(2, 9), cache, [0], [0])
        before = local.dump(cache)
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        assert local.dump(cache) == moved(before, peer.dump(source), block_pieces([0], [0], 64))

    @remote_mode
    def test_unmapped_destination_fails_this_call_only(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks()
        cache, other = local.register_unmapped(model_id=9), local.add_blocks()
        with refused(local.api, "LLM_FAILED"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        with refused(local.api, "LLM_FAILED"):
            peer.push_blocks(local.api.BlocksCacheKey(1, 9), 1, [0], [0])
        local.pull_blocks(local.api.BlocksCacheKey(2), other, [0], [0])

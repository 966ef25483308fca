"""transfer_cache_async: blocks, rows cut into blocks, and destinations that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from contract.cluster import Cluster
from contract.engines import message_mode, remote_mode
from contract.errors import refused
from contract.fixtures import Pair
from contract.layerwise import BLOCK, ROW, blocks_of, recorder, rows_of
from contract.memory import block_pieces, moved


def outcome(local: Cluster, source: int, configs: list[Any], *args: Any) -> list[str | None]:
    """Results of one transfer that no layer holds back."""
    task = local.transfer(recorder(local.api), source, configs, *args)
    return [None if status is None else status.name for status in task.get_results()]


class TestBlocksToBlocks:
    @pytest.mark.parametrize("size", [None, 0, BLOCK])
    def test_c62_block_size_given_or_not(self, pair: Pair, remote: bool, size: int | None) -> None:
        local, peer = pair()
        source = local.add_blocks(seed=100)
        target = blocks_of(local.api, remote, 2, peer)
        before = peer.dump(target.cache_id)
        src, dst = [4, 5, 6, 0, 15], [1, 2, 3, 15, 0]
        assert outcome(local, source, [target.config(range(2))], src, dst, size) == ["LLM_SUCCESS"]
        after = moved(before, local.dump(source), block_pieces(src, dst, BLOCK))
        assert peer.dump(target.cache_id) == after

    @pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK + 1, 2 * BLOCK, 2**64 - 1])
    def test_c62_other_block_size(self, pair: Pair, remote: bool, size: int) -> None:
        local, peer = pair()
        source = local.add_blocks()
        target = blocks_of(local.api, remote, 2, peer, seed=7)
        before = peer.dump(target.cache_id)
        results = outcome(local, source, [target.config(range(2))], [1], [2], size)
        assert results == ["LLM_PARAM_INVALID"]
        assert peer.dump(target.cache_id) == before

    @remote_mode
    def test_c62_destination_has_another_block_size(self, pair: Pair) -> None:
        local, peer = pair()
        source = local.add_blocks(block_bytes=32)
        target = blocks_of(local.api, True, 2, peer)
        results = outcome(local, source, [target.config(range(2))], [1], [2])
        assert results == ["LLM_PARAM_INVALID"]

    @pytest.mark.parametrize(("src", "dst"), [([16], [0]), ([0], [16]), ([0], [2**64 - 1])])
    def test_block_out_of_range(
        self, pair: Pair, remote: bool, src: list[int], dst: list[int]
    ) -> None:
        local, peer = pair()
        source = local.add_blocks()
        target = blocks_of(local.api, remote, 2, peer, seed=7)
        before = peer.dump(target.cache_id)
        results = outcome(local, source, [target.config(range(2))], src, dst)
        assert results == ["LLM_PARAM_INVALID"]
        assert peer.dump(target.cache_id) == before

    @remote_mode
    def test_destination_by_cache_id(self, pair: Pair) -> None:
        local, peer = pair()
        source = local.add_blocks(seed=100)
        target = peer.add_blocks()
        before = peer.dump(target)
        key = local.api.CacheKeyByIdAndIndex(2, target)
        config = local.api.TransferWithCacheKeyConfig(key, range(2), range(2))
        assert outcome(local, source, [config], [1], [2]) == ["LLM_SUCCESS"]
        assert peer.dump(target) == moved(before, local.dump(source), block_pieces([1], [2], BLOCK))

    def test_a_thousand_scattered_blocks(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        source = local.add_blocks(tensors=4, blocks=1024, seed=100)
        target = blocks_of(local.api, remote, 2, peer, tensors=4, blocks=1024)
        before = peer.dump(target.cache_id)
        src = [block * 7 % 1024 for block in range(1024)]
        dst = [block * 5 % 1024 for block in range(1024)]
        assert outcome(local, source, [target.config(range(2))], src, dst) == ["LLM_SUCCESS"]
        after = moved(before, local.dump(source), block_pieces(src, dst, BLOCK))
        assert peer.dump(target.cache_id) == after


class TestRowToBlocks:
    @pytest.mark.parametrize("dst", [[3, 1, 2, 0], [5, 6, 7, 8], [15, 2], [9]])
    def test_chunk_i_goes_to_block_i(self, pair: Pair, remote: bool, dst: list[int]) -> None:
        local, peer = pair()
        source = local.add_rows(seed=100)
        target = blocks_of(local.api, remote, 2, peer)
        before = peer.dump(target.cache_id)
        assert self._send(local, source, target.config(range(2)), dst) == ["LLM_SUCCESS"]
        pieces = block_pieces(range(len(dst)), dst, BLOCK)
        assert peer.dump(target.cache_id) == moved(before, local.dump(source), pieces)

    def _send(
        self, local: Cluster, source: int, config: Any, dst: list[int], size: int = BLOCK
    ) -> list[str | None]:
        return outcome(local, source, [config], None, dst, size)

    def test_row_that_does_not_divide(self, pair: Pair, remote: bool) -> None:
        """The vendor's engine cuts the last listed block to the tensor's remainder; ours sends of
        each chunk what the row has."""
        local, peer = pair()
        source = local.add_rows(rows=3, row_bytes=150, seed=100)
        target = blocks_of(local.api, remote, 2, peer)
        before = peer.dump(target.cache_id)
        for dst, lengths in (([4, 2, 7], (64, 64, 22)), ([5, 11], (64, 64))):
            assert self._send(local, source, target.config(range(2)), dst) == ["LLM_SUCCESS"]
            pieces = [
                (i * BLOCK, block * BLOCK, length)
                for i, (block, length) in enumerate(zip(dst, lengths, strict=True))
            ]
            before = moved(before, local.dump(source), pieces)
            assert peer.dump(target.cache_id) == before

    @remote_mode
    def test_row_by_batch_index(self, pair: Pair) -> None:
        local, peer = pair()
        source = local.add_rows(seed=100)
        target = peer.add_blocks()
        before = peer.dump(target)
        key = local.api.CacheKeyByIdAndIndex(2, target)
        config = local.api.TransferWithCacheKeyConfig(key, range(2), range(2), 3)
        assert outcome(local, source, [config], None, [2, 9], BLOCK) == ["LLM_SUCCESS"]
        pieces = [(3 * ROW, 2 * BLOCK, BLOCK), (3 * ROW + BLOCK, 9 * BLOCK, BLOCK)]
        assert peer.dump(target) == moved(before, local.dump(source), pieces)

    @pytest.mark.parametrize("size", [0, 4 * ROW, 4 * ROW + 1, 2**64 - 1])
    def test_size_outside_the_tensor(self, pair: Pair, remote: bool, size: int) -> None:
        local, peer = pair()
        source = local.add_rows()
        target = blocks_of(local.api, remote, 2, peer)
        results = self._send(local, source, target.config(range(2)), [1], size)
        assert results == ["LLM_PARAM_INVALID"]

    def test_list_longer_than_the_row(self, pair: Pair, remote: bool) -> None:
        """The vendor's engine runs on into the next rows."""
        local, peer = pair()
        source = local.add_rows(seed=100)
        target = blocks_of(local.api, remote, 2, peer)
        before = peer.dump(target.cache_id)
        results = self._send(local, source, target.config(range(2)), [1, 2, 3, 4, 5])
        assert results == ["LLM_PARAM_INVALID"]
        assert peer.dump(target.cache_id) == before

    @remote_mode
    def test_remote_block_size_differs(self, pair: Pair) -> None:
        local, peer = pair()
        source = local.add_rows()
        target = blocks_of(local.api, True, 2, peer)
        results = self._send(local, source, target.config(range(2)), [1], 32)
        assert results == ["LLM_PARAM_INVALID"]


@remote_mode
class TestRowToBlocksKey:
    def test_row_goes_to_the_start_of_the_tensor(self, pair: Pair) -> None:
        local, peer = pair()
        source, target = local.add_rows(seed=100), peer.add_blocks()
        before = peer.dump(target)
        key = local.api.BlocksCacheKey(2)
        config = local.api.TransferWithCacheKeyConfig(key, range(1), range(1, 2))
        assert outcome(local, source, [config]) == ["LLM_SUCCESS"]
        sent = moved(before[2:], local.dump(source)[:2], [(0, 0, ROW)])
        assert peer.dump(target) == before[:2] + sent

    def test_row_longer_than_the_tensor(self, pair: Pair) -> None:
        local, peer = pair()
        source, target = local.add_rows(row_bytes=4096), peer.add_blocks()
        before = peer.dump(target)
        key = local.api.BlocksCacheKey(2)
        config = local.api.TransferWithCacheKeyConfig(key, range(1), range(1))
        assert outcome(local, source, [config]) == ["LLM_PARAM_INVALID"]
        assert peer.dump(target) == before


class TestArguments:
    def test_c63_block_lists(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        source = local.add_blocks()
        config = blocks_of(local.api, remote, 2, peer).config(range(2))
        synchronizer = recorder(local.api)
        for src, dst, size in (
            ([1], None, None),
            ([1], [], None),
            ([1, 2], [1], None),
            (None, [1], None),
            ([], [1], None),
        ):
            with refused(local.api):
                local.transfer(synchronizer, source, [config], src, dst, size)
        assert synchronizer.calls == []

    def test_c64_size_without_blocks(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        source = local.add_rows()
        config = rows_of(local.api, remote, 2, peer).config(range(2))
        for dst in (None, []):
            with refused(local.api):
                local.transfer(recorder(local.api), source, [config], None, dst, 64)
        assert outcome(local, source, [config], None, [], 0) == ["LLM_SUCCESS"]

    @pytest.mark.parametrize(
        ("src", "dst", "size", "error"),
        [
            ("x", None, None, TypeError),
            ([1.5], [1], None, TypeError),
            ([1], {1}, None, TypeError),
            ([1], ["1"], None, TypeError),
            ([-1], [1], None, ValueError),
            ([1], [2**64], None, ValueError),
            (None, [1], "64", TypeError),
            (None, [1], -1, ValueError),
        ],
    )
    def test_types(self, pair: Pair, src: Any, dst: Any, size: Any, error: type) -> None:
        local, _ = pair()
        with pytest.raises(error):
            local.transfer(recorder(local.api), local.add_blocks(), [], src, dst, size)

    def test_c70_synchronizer_and_config_types(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        source = local.add_rows()
        fitting = rows_of(local.api, remote, 2, peer).config(range(2))
        other = rows_of(local.api, not remote, 2, peer).config(range(2))

        class Duck:
            def synchronize_layer(self, layer_index: int, timeout_in_millis: Any) -> bool:
                return True

        for synchronizer in (Duck(), None, lambda layer, timeout: True):
            with pytest.raises(TypeError):
                local.transfer(synchronizer, source, [fitting])
        for configs in ([other], [fitting, other], [None], None, fitting, {fitting}):
            with pytest.raises(TypeError):
                local.transfer(recorder(local.api), source, configs)

    def test_source_caches(self, pair: Pair) -> None:
        local, _ = pair()
        with pytest.raises(TypeError):
            local.manager.transfer_cache_async(None, recorder(local.api), [])
        with refused(local.api):
            local.transfer(recorder(local.api), local.add_rows(host=True), [])

    @remote_mode
    def test_source_blocks_need_batch_index_0(self, pair: Pair) -> None:
        local, peer = pair()
        target = peer.add_blocks()
        key = local.api.CacheKeyByIdAndIndex(2, target)
        config = local.api.TransferWithCacheKeyConfig(key, range(2), range(2), 1)
        with refused(local.api):
            local.transfer(recorder(local.api), local.add_blocks(), [config], [1], [1])

    @remote_mode
    def test_ranges_changed_after_construction(self, pair: Pair) -> None:
        local, peer = pair()
        config = blocks_of(local.api, True, 2, peer).config(range(2))
        config.dst_layer_range = range(1)
        with refused(local.api):
            local.transfer(recorder(local.api), local.add_blocks(), [config], [1], [1])


class TestDestinations:
    @message_mode
    @pytest.mark.parametrize("offset", [-1, 1, 3 * ROW + 1, 4 * ROW, 2**40, -(2**12)])
    def test_c71_address_outside_registered_memory(self, pair: Pair, offset: int) -> None:
        """The vendor's engine writes wherever the link reaches."""
        local, peer = pair()
        source = local.add_rows(tensors=2)
        target = peer.add_rows(tensors=2, seed=7)
        addrs = peer.addrs(target)
        before = peer.dump(target)
        config = local.api.TransferConfig(2, [addrs[0], addrs[1] + offset])
        results = outcome(local, source, [config])
        if 0 <= offset <= 3 * ROW:
            assert results == ["LLM_SUCCESS"]
        else:
            assert results == ["LLM_PARAM_INVALID"]
            assert peer.dump(target) == before

    @message_mode
    @pytest.mark.parametrize("addr", [0, 1, 2**64 - 1, 2**64 - ROW])
    def test_c71_addresses_that_cannot_be(self, pair: Pair, addr: int) -> None:
        local, peer = pair()
        peer.add_rows(tensors=2)
        config = local.api.TransferConfig(2, [addr, addr])
        assert outcome(local, local.add_rows(tensors=2), [config]) == ["LLM_PARAM_INVALID"]

    @message_mode
    def test_c71_address_of_an_unregistered_cache(self, pair: Pair) -> None:
        local, peer = pair()
        target = rows_of(local.api, False, 2, peer)
        before = peer.dump(target.cache_id)
        peer.unregister(target.cache_id)
        results = outcome(local, local.add_rows(), [target.config(range(2))])
        assert results == ["LLM_PARAM_INVALID"]
        assert peer.dump(target.cache_id) == before

    @message_mode
    def test_c71_blocks_past_the_tensor(self, pair: Pair) -> None:
        local, peer = pair()
        target = blocks_of(local.api, False, 2, peer, seed=7)
        before = peer.dump(target.cache_id)
        results = outcome(local, local.add_blocks(), [target.config(range(2))], [1, 2], [15, 16])
        assert results == ["LLM_PARAM_INVALID"]
        assert peer.dump(target.cache_id) == before

    def test_c72_not_linked(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        source = local.add_rows()
        target = rows_of(local.api, remote, 3, peer)
        synchronizer = recorder(local.api)
        task = local.transfer(synchronizer, source, [target.config(range(2))])
        assert [status.name for status in task.get_results()] == ["LLM_NOT_YET_LINK"]
        assert synchronizer.layers() == [0]

    def test_c72_own_cluster(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        target = rows_of(local.api, remote, 1, peer)
        results = outcome(local, local.add_rows(), [target.config(range(2))])
        assert results == ["LLM_PARAM_INVALID"]

    def test_unknown_caches(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        source = local.add_rows()
        target = rows_of(local.api, remote, 2, peer)
        if remote:
            peer.unregister(target.cache_id)
            results = outcome(local, source, [target.config(range(2))])
            assert results == ["LLM_KV_CACHE_NOT_EXIST"]
        local.unregister(source)
        results = outcome(local, source, [target.config(range(2))])
        assert results == ["LLM_KV_CACHE_NOT_EXIST"]

    @remote_mode
    def test_layers_and_rows_out_of_range(self, pair: Pair) -> None:
        local, peer = pair()
        source = local.add_rows()
        target = rows_of(local.api, True, 2, peer)
        for config in (target.config(range(2), first=1), target.config(range(2), row=4)):
            assert outcome(local, source, [config]) == ["LLM_PARAM_INVALID"]

    @remote_mode
    def test_not_remote_accessible(self, pair: Pair) -> None:
        local, peer = pair()
        open_cache = rows_of(local.api, True, 2, peer)
        closed = rows_of(local.api, True, 2, peer, accessible=False)
        source, inaccessible = local.add_rows(), local.add_rows(accessible=False)
        results = outcome(local, source, [closed.config(range(2))])
        assert results == ["LLM_PARAM_INVALID"]
        results = outcome(local, inaccessible, [open_cache.config(range(2))])
        assert results == ["LLM_PARAM_INVALID"]

    @remote_mode
    def test_a_longer_row_is_refused_and_a_shorter_one_fits(self, pair: Pair) -> None:
        local, peer = pair()
        target = rows_of(local.api, True, 2, peer)
        before = peer.dump(target.cache_id)
        config = target.config(range(2), row=1)
        longer = local.add_rows(row_bytes=ROW + 1)
        shorter = local.add_rows(row_bytes=ROW - 1, seed=100)
        assert outcome(local, longer, [config]) == ["LLM_PARAM_INVALID"]
        assert peer.dump(target.cache_id) == before
        assert outcome(local, shorter, [config]) == ["LLM_SUCCESS"]
        after = moved(before, local.dump(shorter), [(0, ROW, ROW - 1)])
        assert peer.dump(target.cache_id) == after

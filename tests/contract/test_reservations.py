"""Reservations of the host engine: pushes that name reserved blocks by position."""

from __future__ import annotations

import pytest

from contract.actions import MIB, by_key, names
from contract.engines import Restriction, refused_by_vendor, remote_mode
from contract.errors import refused, wait_until
from contract.fixtures import MakePeer, Pair
from contract.layerwise import BLOCK, Held, recorder
from contract.memory import block_pieces, moved


@refused_by_vendor(Restriction.NO_EXTENSIONS)
@remote_mode
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

    def test_cache_that_requires_them_takes_no_other_push(self, pair: Pair) -> None:
        """A peer by mistake named blocks of its own choice, and they were overwritten."""
        local, peer = pair()
        source, target = local.add_blocks(seed=100), peer.add_blocks()
        peer.require_reservations(target)
        before = peer.dump(target)
        with refused(local.api):
            local.push_blocks(local.api.BlocksCacheKey(2), source, [0], [0])
        task = local.transfer(recorder(local.api), source, [by_key(local, 2)], [0], [0])
        assert names(task) == ["LLM_PARAM_INVALID"]
        assert peer.dump(target) == before
        token = peer.open_reservation(target, [3])
        local.push_blocks(local.api.BlocksCacheKey(2), source, [0], [0], token=token)
        assert peer.dump(target) == moved(before, local.dump(source), block_pieces([0], [3], BLOCK))
        local.pull_blocks(local.api.BlocksCacheKey(2), source, [3], [1])

    def test_reservations_can_be_required_of_a_known_cache_only(self, pair: Pair) -> None:
        local, _ = pair()
        cache = local.add_blocks()
        local.unregister(cache)
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.require_reservations(cache)
        with pytest.raises(TypeError):
            local.manager.require_reservations(7)

    def test_closing_waits_for_no_other_process(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=600_000)
        target = local.add_blocks()
        token = local.open_reservation(target, [1])
        peer.stop()
        local.close_reservation(token)
        peer.resume()


@refused_by_vendor(Restriction.NO_EXTENSIONS)
@remote_mode
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

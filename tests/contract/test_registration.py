"""register_cache, register_blocks_cache, unregister_cache: ids, checks, keys."""

from __future__ import annotations

from typing import Any

import pytest

from contract.engines import message_mode, remote_mode
from contract.errors import none_error, refused
from contract.fixtures import MakeLocal, Pair
from contract.memory import ALIGNMENT


def desc(api: Any, tensors: int = 1, shape: tuple[int, ...] = (4, 8)) -> Any:
    return api.CacheDesc(tensors, shape, api.DataType.DT_INT8)


class TestIds:
    def test_ids_start_at_one_and_rise(self, make_local: MakeLocal) -> None:
        local = make_local()
        assert [local.add_rows(), local.add_blocks(), local.add_rows()] == [1, 2, 3]

    def test_call_refused_by_the_engine_uses_up_an_id(self, make_local: MakeLocal) -> None:
        local = make_local()
        with refused(local.api):
            local.manager.register_cache(desc(local.api, shape=(4, 0)), [ALIGNMENT])
        with refused(local.api):
            local.manager.register_blocks_cache(desc(local.api), [0])
        with refused(local.api):
            keys = [local.api.CacheKey(1, request) for request in range(5)]
            local.manager.register_cache(desc(local.api), [ALIGNMENT], keys)
        assert local.add_blocks() == 4

    def test_call_refused_earlier_uses_up_none(self, make_local: MakeLocal) -> None:
        local = make_local()
        with refused(local.api):
            local.manager.register_cache(desc(local.api), [0])
        with refused(local.api):
            local.manager.register_cache(desc(local.api), [ALIGNMENT, 2 * ALIGNMENT])
        with refused(local.api):
            local.manager.register_blocks_cache(desc(local.api), [ALIGNMENT, 2 * ALIGNMENT])
        assert local.add_blocks() == 1

    def test_unregistering_is_idempotent(self, make_local: MakeLocal) -> None:
        local = make_local()
        cache = local.add_blocks()
        for _ in range(2):
            local.unregister(cache)
        local.unregister(99)
        assert local.add_blocks() == 2


class TestArguments:
    def test_cache_object(self, make_local: MakeLocal) -> None:
        local = make_local()
        blocks = local.caches[local.add_blocks(tensors=8)]
        assert (blocks.is_blocks_cache, len(blocks.tensor_addrs)) == (True, 8)
        assert not local.caches[local.add_rows()].is_blocks_cache

    @pytest.mark.parametrize("method", ["register_cache", "register_blocks_cache"])
    def test_addresses(self, make_local: MakeLocal, method: str) -> None:
        local = make_local()
        register = getattr(local.manager, method)
        with pytest.raises(TypeError):
            register(desc(local.api), (ALIGNMENT,))
        with pytest.raises(TypeError):
            register(desc(local.api), ["4096"])
        with pytest.raises(ValueError):
            register(desc(local.api), [-1])
        with refused(local.api):
            register(desc(local.api), [])
        with refused(local.api):
            register(
                desc(local.api, shape=(4, ALIGNMENT)), [2**64 - ALIGNMENT]
            )  # the tensor ends beyond memory

    @pytest.mark.parametrize("method", ["register_cache", "register_blocks_cache"])
    @pytest.mark.parametrize("shape", [(0, 8), (4, -1), (1,) * 32, (2**40, 2**40)])
    def test_shapes(self, make_local: MakeLocal, method: str, shape: tuple[int, ...]) -> None:
        local = make_local()
        with refused(local.api):
            getattr(local.manager, method)(desc(local.api, shape=shape), [ALIGNMENT])

    def test_types(self, make_local: MakeLocal) -> None:
        local = make_local()
        with pytest.raises(none_error(local.api)):
            local.manager.register_cache(None, [ALIGNMENT])
        with pytest.raises(TypeError):
            local.manager.register_cache(desc(local.api), [ALIGNMENT], [1])
        with pytest.raises(TypeError):
            local.manager.register_cache(desc(local.api), [ALIGNMENT], None)
        with pytest.raises(TypeError):
            local.manager.register_blocks_cache(
                desc(local.api), [ALIGNMENT], local.api.CacheKey(1, 2)
            )
        with pytest.raises(TypeError):
            local.manager.register_cache(desc(local.api), [ALIGNMENT], (), 1)
        with pytest.raises(TypeError):
            local.manager.unregister_cache("1")


class TestRowKeys:
    @message_mode
    def test_first_binding_of_a_key_wins(self, pair: Pair) -> None:
        local, peer = pair()
        key = local.api.CacheKey(2, 7)
        first = peer.add_rows(keys=[key], seed=100)
        peer.add_rows(keys=[key], seed=300)
        cache = local.add_rows()
        local.pull_cache(key, cache)
        assert local.dump(cache)[0][:256] == peer.dump(first)[0][:256]

    @message_mode
    def test_placeholders_take_a_row_and_repeat(self, pair: Pair) -> None:
        local, peer = pair()
        none = local.api.CacheKey(2, 2**64 - 1)
        source = peer.add_rows(keys=[none, none, local.api.CacheKey(2, 7)], seed=100)
        cache = local.add_rows()
        local.pull_cache(local.api.CacheKey(2, 7), cache)
        assert local.dump(cache)[0][:256] == peer.dump(source)[0][512:768]

    @message_mode
    def test_registered_row_can_be_pulled_again(self, pair: Pair) -> None:
        """Only memory that the engine has allocated is consumed by a pull."""
        local, peer = pair()
        key = local.api.CacheKey(2, 7)
        peer.add_rows(keys=[key])
        cache = local.add_rows()
        for _ in range(3):
            local.pull_cache(key, cache)

    @message_mode
    def test_prefix_and_request_are_separate_names(self, pair: Pair) -> None:
        local, peer = pair()
        invalid = 2**64 - 1
        prefix = local.api.CacheKey(2, invalid, 0, 7)
        source = peer.add_rows(keys=[local.api.CacheKey(2, 7), prefix], seed=100)
        cache = local.add_rows()
        local.pull_cache(prefix, cache)
        assert local.dump(cache)[0][:256] == peer.dump(source)[0][256:512]

    @message_mode
    def test_unregistered_key_is_gone(self, pair: Pair) -> None:
        local, peer = pair()
        key = local.api.CacheKey(2, 7)
        peer.unregister(peer.add_rows(keys=[key]))
        cache = local.add_rows()
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.pull_cache(key, cache)


class TestRemoteAccess:
    """The flag of a registration counts where remote access is on, and only there."""

    @remote_mode
    @pytest.mark.parametrize(
        ("here", "there"),
        [
            ({"accessible": False}, {}),
            ({}, {"accessible": False}),
            ({"host": True}, {}),
            ({}, {"host": True}),
        ],
    )
    def test_c52_inaccessible_cache_is_refused(
        self, pair: Pair, here: dict[str, bool], there: dict[str, bool]
    ) -> None:
        local, peer = pair()
        peer.add_blocks(**there)
        cache = local.add_blocks(**here)
        key = local.api.BlocksCacheKey(2)
        with refused(local.api):
            local.pull_blocks(key, cache, [0], [0])
        with refused(local.api):
            local.push_blocks(key, cache, [0], [0])

    @remote_mode
    def test_c53_host_cache_registered_as_accessible(self, pair: Pair) -> None:
        local, peer = pair()
        source = peer.add_blocks(host=True, accessible=True, seed=100)
        cache = local.add_blocks(host=True, accessible=True)
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        assert local.dump(cache)[0][:64] == peer.dump(source)[0][:64]

    @message_mode
    def test_message_mode_does_not_look(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_blocks(accessible=False, seed=100), local.add_blocks(host=True)
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        assert local.dump(cache)[0][:64] == peer.dump(source)[0][:64]

    @message_mode
    def test_message_mode_has_no_host_to_host(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks(host=True)
        cache = local.add_blocks(host=True)
        with refused(local.api, "LLM_FEATURE_NOT_ENABLED"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])

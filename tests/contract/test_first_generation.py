"""KvCacheManager: the first generation of the API, in two processes.

The numbers in the names are those of the conformance checklist.
"""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from contract.actions import pulls
from contract.cluster import free_port
from contract.engines import is_vendor
from contract.errors import refused
from contract.fixtures import Linked, MakeFirst
from contract.memory import moved
from contract.peer import Peer


class TestInit:
    def test_c19_manager_of_the_other_generation(self, make_first: MakeFirst) -> None:
        local = make_first()
        assert local.manager.is_initialized()
        calls: list[Callable[[], object]] = [
            lambda: local.datadist.cache_manager,
            lambda: local.datadist.link("x", {1: 0, 2: 1}, "{}"),
            lambda: local.datadist.unlink(1),
            lambda: local.datadist.query_register_mem_status(1),
        ]
        for call in calls:
            with refused(local.api):
                call()

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"llm.listenIpInfo": "127.0.0.1"},
            {"llm.listenIpInfo": "127.0.0.1:9", "ge.exec.deviceId": "x"},
            {"llm.ClusterInfo": "{}"},
        ],
    )
    def test_prompt_options(self, api: Any, options: dict[str, str]) -> None:
        with refused(api):
            api.LLMDataDist(api.LLMRole.PROMPT, 1).init(options)

    @pytest.mark.parametrize("devices", [[0, 1], (3, 4, 5), [0, 0]])
    def test_several_devices_are_not_there(self, api: Any, devices: Any) -> None:
        """The option of a device list, for either role, and no matter how many addresses."""
        for role, address in (
            (api.LLMRole.DECODER, ""),
            (api.LLMRole.PROMPT, ";".join(["127.0.0.1:26000"] * len(devices))),
        ):
            config = api.LLMConfig()
            config.device_id = devices
            config.listen_ip_info = address
            options = config.generate_options()
            assert options["ge.exec.deviceId"] == ";".join(map(str, devices))
            datadist = api.LLMDataDist(role, 1)
            with refused(api, "LLM_FEATURE_NOT_ENABLED"):
                datadist.init(options)
            with pytest.raises(RuntimeError):
                _ = datadist.kv_cache_manager

    def test_list_of_one_device(self, api: Any) -> None:
        config = api.LLMConfig()
        config.device_id = [1]
        datadist = api.LLMDataDist(api.LLMRole.DECODER, 1)
        datadist.init(config.generate_options())
        assert datadist.kv_cache_manager.is_initialized()
        datadist.finalize()

    def test_address_of_the_cluster_info(self, api: Any) -> None:
        config = api.LLMConfig()
        port = free_port()
        address = {"ip": "127.0.0.1", "port": port}
        config.cluster_info = json.dumps({"listen_ip_info": [address]})
        datadist = api.LLMDataDist(api.LLMRole.PROMPT, 1)
        datadist.init(config.generate_options())
        socket.create_connection(("127.0.0.1", port)).close()
        datadist.finalize()

    def test_finalize_closes_the_manager(self, make_first: MakeFirst) -> None:
        local = make_first()
        cache = local.allocate_rows()
        manager, kept = local.manager, local.caches[cache]
        local.finalize()
        assert not manager.is_initialized()
        with refused(local.api):
            manager.deallocate_cache(kept)
        local.drop(cache)
        del kept
        gc.collect()


class TestAllocation:
    def test_c23_ids_and_addresses(self, make_first: MakeFirst) -> None:
        local = make_first()
        assert [local.allocate_rows(), local.allocate_blocks()] == [1, 2]
        (addrs,) = local.caches[1].per_device_tensor_addrs
        assert len(addrs) == 4
        assert all(addr % 512 == 0 for addr in addrs)

    def test_out_of_memory(self, make_first: MakeFirst) -> None:
        local = make_first(memory="1048576")
        with refused(local.api, "LLM_DEVICE_OUT_OF_MEMORY"):
            local.allocate_rows(row_bytes=1 << 20)

    def test_c26_last_of_equal_keys_wins_and_a_bound_one_is_refused(self, linked: Linked) -> None:
        local, peer = linked
        key = local.api.CacheKey(2, 7)
        source, cache = peer.allocate_rows(keys=[key, key], seed=100), local.allocate_rows()
        with refused(local.api, "LLM_FAILED"):
            peer.allocate_rows(keys=[key])
        before, content = local.dump(cache), peer.dump(source)
        assert pulls(local, key, cache)
        assert local.dump(cache) == moved(before, content, [(256, 0, 256)])
        peer.allocate_rows(keys=[key])

    def test_c32_roles(self, make_first: MakeFirst, prompt: Peer) -> None:
        local = make_first()
        api, cache = local.api, local.caches[local.allocate_rows()]
        calls: list[Callable[[], object]] = [
            lambda: local.allocate_rows(keys=[api.CacheKey(1, 2)]),
            lambda: local.allocate_blocks(model_id=0),
            lambda: local.remove_key(api.CacheKey(1, 2)),
        ]
        for call in calls:
            with refused(api):
                call()
        theirs = prompt.allocate_rows()
        with refused(api):
            prompt.pull_cache(api.CacheKeyByIdAndIndex(1, 1), theirs)
        with refused(api):
            prompt.pull_blocks(api.BlocksCacheKey(1), theirs, [0], [0])
        assert cache.cache_id == 1

    def test_c33_missing_key_and_second_deallocation(self, make_first: MakeFirst) -> None:
        """Vendor: LLM_KV_CACHE_NOT_EXIST for the second one, which its documentation calls a
        no-op."""
        local = make_first("PROMPT")
        local.remove_key(local.api.CacheKey(1, 9))
        cache = local.allocate_rows()
        local.deallocate(cache)
        if is_vendor(local.api):
            with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
                local.deallocate(cache)
        else:
            local.deallocate(cache)
        assert local.caches[cache].per_device_tensor_addrs == []
        assert local.pool_used() == 0

    def test_c34_collection_frees_once(self, make_first: MakeFirst) -> None:
        local = make_first()
        kept, dropped = local.allocate_rows(), local.allocate_rows()
        local.deallocate(kept)
        assert local.pool_used() == 4 * 1024
        local.drop(dropped)
        gc.collect()
        assert local.pool_used() == 0
        local.drop(kept)
        gc.collect()

    def test_placement(self, make_first: MakeFirst) -> None:
        local = make_first()
        with refused(local.api):
            local.allocate_rows(host=True)
        with refused(local.api):
            local.manager.allocate_cache(local._desc(0, 1, 1, False))

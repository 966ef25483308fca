"""KvCacheManager: the first generation of the API, in two processes.

The numbers in the names are those of the conformance checklist.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from contract.cluster import FirstCluster, Tensor, block_pieces, moved
from contract.errors import refused, wait_until
from contract.peer import Peer

NONE = 2**64 - 1
MakeLocal = Callable[..., FirstCluster]
Linked = tuple[FirstCluster, Peer]


@pytest.fixture
def make_first(engine: str) -> Iterator[MakeLocal]:
    """Makes the cluster of this process, number 1."""
    made: list[FirstCluster] = []

    def make(role: str = "DECODER", **options: Any) -> FirstCluster:
        made.append(FirstCluster(1, role=role, api=engine, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.finalize()


@pytest.fixture
def prompt(make_peer: Callable[..., Peer]) -> Peer:
    return make_peer(2, role="PROMPT")


@pytest.fixture
def linked(make_first: MakeLocal, prompt: Peer) -> Linked:
    """A DECODER here, linked to a PROMPT in another process."""
    local = make_first()
    assert local.link(2, prompt.listen_port).name == "LLM_SUCCESS"
    return local, prompt


def pulls(local: FirstCluster, key: Any, cache: int, **options: Any) -> bool:
    try:
        local.pull_cache(key, cache, **options)
    except local.api.LLMException as error:
        if error.status_code.name == "LLM_KV_CACHE_NOT_EXIST":
            return False
        raise
    return True


class TestInit:
    def test_c19_manager_of_the_other_generation(self, make_first: MakeLocal) -> None:
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
            {"llm.listenIpInfo": "127.0.0.1:0", "ge.exec.deviceId": "x"},
            {"llm.ClusterInfo": "{}"},
        ],
    )
    def test_prompt_options(self, api: Any, options: dict[str, str]) -> None:
        with refused(api):
            api.LLMDataDist(api.LLMRole.PROMPT, 1).init(options)

    def test_several_devices_are_not_there(self, api: Any) -> None:
        with refused(api, "LLM_FEATURE_NOT_ENABLED"):
            api.LLMDataDist(api.LLMRole.DECODER, 1).init({"ge.exec.deviceId": "0;1"})

    def test_address_of_the_cluster_info(self, api: Any) -> None:
        config = api.LLMConfig()
        config.cluster_info = '{"listen_ip_info": [{"ip": "127.0.0.1", "port": 0}]}'
        datadist = api.LLMDataDist(api.LLMRole.PROMPT, 1)
        datadist.init(config.generate_options())
        assert datadist.listen_port > 0
        datadist.finalize()

    def test_finalize_closes_the_manager(self, make_first: MakeLocal) -> None:
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
    def test_c23_ids_and_addresses(self, make_first: MakeLocal) -> None:
        local = make_first()
        assert [local.allocate_rows(), local.allocate_blocks()] == [1, 2]
        (addrs,) = local.caches[1].per_device_tensor_addrs
        assert len(addrs) == 4
        assert all(addr % 512 == 0 for addr in addrs)

    def test_out_of_memory(self, make_first: MakeLocal) -> None:
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

    def test_c32_roles(self, make_first: MakeLocal, prompt: Peer) -> None:
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

    def test_c33_missing_key_and_second_deallocation(self, make_first: MakeLocal) -> None:
        """Vendor: LLM_KV_CACHE_NOT_EXIST for the second one, which its documentation calls a
        no-op."""
        local = make_first("PROMPT")
        local.remove_key(local.api.CacheKey(1, 9))
        cache = local.allocate_rows()
        for _ in range(2):
            local.deallocate(cache)
        assert local.caches[cache].per_device_tensor_addrs == []
        assert local.pool_used() == 0

    def test_c34_collection_frees_once(self, make_first: MakeLocal) -> None:
        local = make_first()
        kept, dropped = local.allocate_rows(), local.allocate_rows()
        local.deallocate(kept)
        assert local.pool_used() == 4 * 1024
        local.drop(dropped)
        gc.collect()
        assert local.pool_used() == 0
        local.drop(kept)
        gc.collect()

    def test_placement(self, make_first: MakeLocal) -> None:
        local = make_first()
        with refused(local.api):
            local.allocate_rows(host=True)
        with refused(local.api):
            local.manager.allocate_cache(local._desc(0, 1, 1, False))


class TestPull:
    def test_c24_c28_keys_and_consumption(self, linked: Linked) -> None:
        local, peer = linked
        keys = [local.api.CacheKey(2, 10), local.api.CacheKey(2, NONE, 0, 20)]
        source, cache = peer.allocate_rows(keys=keys, seed=100), local.allocate_rows()
        content, before = peer.dump(source), local.dump(cache)
        peer.deallocate(source)
        assert pulls(local, keys[0], cache, batch_index=2)
        assert local.dump(cache) == moved(before, content, [(0, 512, 256)])
        assert not pulls(local, keys[0], cache)
        assert all(pulls(local, keys[1], cache) for _ in range(2))
        peer.remove_key(keys[1])
        assert peer.pool_used() == 0

    def test_c30_offset_keeps_the_key(self, linked: Linked) -> None:
        local, peer = linked
        key = local.api.CacheKey(2, 10)
        peer.allocate_rows(keys=[key])
        cache = local.allocate_rows()
        assert pulls(local, key, cache, src_cache_offset=0)
        assert pulls(local, key, cache, dst_cache_offset=0)
        assert pulls(local, key, cache)
        assert not pulls(local, key, cache, src_cache_offset=0)

    def test_c31_halves(self, linked: Linked) -> None:
        local, peer = linked
        key = local.api.CacheKey(2, 10)
        peer.allocate_rows(keys=[key])
        cache = local.allocate_rows(tensors=2)
        for layer in (0, 0, 1):
            assert pulls(local, key, cache, src_layer_range=range(layer, layer + 1))
        assert not pulls(local, key, cache, src_layer_range=range(1))

    def test_c41_offsets(self, linked: Linked) -> None:
        local, peer = linked
        source, cache = peer.allocate_rows(seed=100), local.allocate_rows(row_bytes=300)
        key = local.api.CacheKeyByIdAndIndex(2, source, 1)
        before, content = local.dump(cache), peer.dump(source)
        local.pull_cache(key, cache, 2, 50, src_cache_offset=40, dst_cache_offset=100)
        assert local.dump(cache) == moved(before, content, [(296, 700, 50)])
        before = local.dump(cache)
        local.pull_cache(key, cache, 0, dst_cache_offset=200)  # the rest of the local row
        assert local.dump(cache) == moved(before, content, [(256, 200, 100)])

    @pytest.mark.parametrize(
        ("size", "src_offset", "dst_offset"),
        [(100, 0, 201), (1, 0, 300), (100, 157, 0), (1, 256, 0), (-1, 0, 0), (301, 0, 0)],
    )
    def test_c41_offsets_that_do_not_fit(
        self, linked: Linked, size: int, src_offset: int, dst_offset: int
    ) -> None:
        local, peer = linked
        source, cache = peer.allocate_rows(), local.allocate_rows(row_bytes=300)
        key = local.api.CacheKeyByIdAndIndex(2, source)
        offsets = {"src_cache_offset": src_offset, "dst_cache_offset": dst_offset}
        with refused(local.api):
            local.pull_cache(key, cache, 0, size, **offsets)

    def test_c41_offset_types(self, linked: Linked) -> None:
        local, peer = linked
        source, cache = peer.allocate_rows(), local.allocate_rows()
        key = local.api.CacheKeyByIdAndIndex(2, source)
        for name in ("src_cache_offset", "dst_cache_offset"):
            with pytest.raises(ValueError):
                local.pull_cache(key, cache, **{name: -1})
            with pytest.raises(TypeError):
                local.pull_cache(key, cache, **{name: "0"})

    def test_c44_blocks(self, linked: Linked) -> None:
        local, peer = linked
        source, cache = peer.allocate_blocks(model_id=3, seed=100), local.allocate_blocks()
        key = local.api.BlocksCacheKey(2, 3)
        before = local.dump(cache)
        local.pull_blocks(key, cache, [5, 1, 2], [0, 8, 9])
        after = moved(before, peer.dump(source), block_pieces([5, 1, 2], [0, 8, 9], 64))
        assert local.dump(cache) == after
        for lists in (([], []), ([0], []), ([0, 1], [0]), ([16], [0]), ([0], [16])):
            with refused(local.api):
                local.pull_blocks(key, cache, *lists)

    def test_c42_unlinked(self, make_first: MakeLocal) -> None:
        local = make_first()
        cache = local.allocate_rows()
        with refused(local.api, "LLM_NOT_YET_LINK"):
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, 1), cache)

    def test_c48_stopped_peer(self, make_first: MakeLocal, prompt: Peer) -> None:
        local = make_first(timeout_ms=300)
        assert local.link(2, prompt.listen_port).name == "LLM_SUCCESS"
        source, cache = prompt.allocate_rows(), local.allocate_rows()
        key = local.api.CacheKeyByIdAndIndex(2, source)
        prompt.stop()
        try:
            with refused(local.api, "LLM_WAIT_PROCESS_TIMEOUT"):
                local.pull_cache(key, cache)
        finally:
            prompt.resume()
        assert local.unlink_force(2, prompt.listen_port).name == "LLM_SUCCESS"
        assert local.link(2, prompt.listen_port).name == "LLM_SUCCESS"
        local.pull_cache(key, cache)


class TestCopies:
    def test_c73_copy_cache_and_blocks(self, make_first: MakeLocal) -> None:
        local = make_first()
        src, dst = local.allocate_rows(seed=100), local.allocate_rows()
        before = local.dump(dst)
        local.manager.copy_cache(local.caches[dst], local.caches[src], 1, 2, 10, 20)
        assert local.dump(dst) == moved(before, local.dump(src), [(522, 266, 20)])
        blocks = local.allocate_blocks(seed=200)
        before = local.dump(blocks)
        local.manager.copy_blocks(local.caches[blocks], {3: [0, 7]})
        assert local.dump(blocks) == moved(before, before, block_pieces([3, 3], [0, 7], 64))

    def test_c73_host_cache(self, make_first: MakeLocal) -> None:
        local = make_first()
        cache = local.caches[local.allocate_rows()]
        host = cpu_cache(local, [Tensor(1024) for _ in range(4)])
        with refused(local.api):
            local.manager.copy_cache(cache, host)
        with refused(local.api):
            local.manager.copy_blocks(host, {0: [1]})

    def test_c74_swap(self, make_first: MakeLocal) -> None:
        local = make_first()
        memory = [Tensor(1024) for _ in range(4)]
        host, cache = cpu_cache(local, memory), local.allocate_blocks(seed=100)
        local.manager.swap_blocks(local.caches[cache], host, {1: 2})
        for tensor, content in zip(memory, local.dump(cache), strict=True):
            assert tensor.read()[128:192] == content[64:128]
        with refused(local.api):
            local.manager.swap_blocks(host, host, {0: 0})
        two = cpu_cache(local, memory, devices=2)
        with refused(local.api):
            local.manager.swap_blocks(local.caches[cache], two, {1: 2})

    def test_c75_cpu_cache_checks(self, api: Any) -> None:
        desc = api.CacheDesc(2, [4, 8], api.DataType.DT_INT8, api.Placement.HOST)
        assert api.KvCache.create_cpu_cache(desc, [16, 32]).per_device_tensor_addrs == [[16, 32]]
        both = [[16, 32], [48, 64]]
        assert api.KvCache.create_cpu_cache(desc, both).per_device_tensor_addrs == both
        for wrong in ([], [16], [[16, 32], 48], [[16, 32], [48]]):
            with refused(api):
                api.KvCache.create_cpu_cache(desc, wrong)
        with refused(api):
            device = api.CacheDesc(1, [4], api.DataType.DT_INT8)
            api.KvCache.create_cpu_cache(device, [16])

    def test_c75_cache_tensors(self, make_first: MakeLocal) -> None:
        numpy = pytest.importorskip("numpy")
        local = make_first()
        cache = local.allocate_rows(seed=100)
        (tensor,) = local.manager.get_cache_tensors(local.caches[cache], 2)
        array = tensor.numpy()
        assert array.tobytes() == local.dump(cache)[2]
        array[1, 3] = 77
        assert local.tensors[cache][2].byte(259) == 77
        desc = local.api.CacheDesc(1, [2, 2], local.api.DataType.DT_BF16)
        halves = local.manager.allocate_cache(desc)
        local._fill(halves, 8, 0)
        (tensor,) = local.manager.get_cache_tensors(halves)
        assert tensor.numpy().dtype == numpy.float32
        with refused(local.api):
            local.manager.get_cache_tensors(halves, 1)


def cpu_cache(local: FirstCluster, memory: list[Tensor], devices: int = 1) -> Any:
    addrs = [[tensor.addr for tensor in memory]] * devices
    return local.api.KvCache.create_cpu_cache(local._desc(4, 16, 64, True), addrs)


class TestTensor:
    def test_array_and_description(self, api: Any) -> None:
        numpy = pytest.importorskip("numpy")
        array = numpy.arange(6, dtype=numpy.int32).reshape(2, 3)
        tensor = api.Tensor(array)
        assert tensor.tensor_desc.dtype is api.DataType.DT_INT32
        assert tensor.tensor_desc.shape == [2, 3]
        assert api.Tensor(tensor).numpy() is array
        assert tensor.numpy(copy=True) is not array

    def test_refusals(self, api: Any) -> None:
        numpy = pytest.importorskip("numpy")
        array = numpy.zeros((2, 3), numpy.int32)
        kind = api.DataType.DT_INT32
        wrong = [
            (array, api.TensorDesc(kind, [3, 2])),
            (array, api.TensorDesc(api.DataType.DT_FLOAT, [2, 3])),
            (array.T, None),
            (numpy.zeros(2, numpy.complex64), None),
            (4096, None),
        ]
        for data, desc in wrong:
            with pytest.raises(RuntimeError):
                api.Tensor(data, desc)
        with pytest.raises(TypeError):
            api.Tensor([1, 2])

    def test_bf16_and_strings(self, api: Any) -> None:
        numpy = pytest.importorskip("numpy")
        ones = numpy.array([0x3F80, 0xC000], numpy.uint16).view(numpy.float16)
        tensor = api.Tensor(ones, api.TensorDesc(api.DataType.DT_BF16, [2]))
        assert tensor.numpy().tolist() == [1.0, -2.0]
        words = api.Tensor(numpy.array([b"a", b"bc"]))
        with pytest.raises(RuntimeError):
            words.numpy()
        assert words.numpy(copy=True).tolist() == [b"a", b"bc"]


class TestLinks:
    def test_c76_prompt_may_not_link(self, make_first: MakeLocal) -> None:
        local = make_first("PROMPT")
        info = local._info(2, 1)
        status, statuses = local.datadist.link_clusters([info])
        assert (status.name, statuses) == ("LLM_PARAM_INVALID", [])

    def test_c77_list_and_overall_status(self, linked: Linked) -> None:
        """Vendor: the overall status stays a success when only refusals are in the list."""
        local, peer = linked
        again, repeated = local._info(2, peer.listen_port), local._info(2, peer.listen_port)
        closed = local._info(9, 1)
        status, statuses = local.datadist.link_clusters([again, repeated])
        assert [entry.name for entry in statuses] == ["LLM_ALREADY_LINK", "LLM_REPEAT_REQUEST"]
        assert status.name == "LLM_ALREADY_LINK"
        status, statuses = local.datadist.link_clusters([again, closed])
        assert [entry.name for entry in statuses] == ["LLM_ALREADY_LINK", "LLM_LINK_FAILED"]
        assert status.name == "LLM_LINK_FAILED"

    def test_c77_number_of_clusters(self, make_first: MakeLocal) -> None:
        local = make_first()
        infos = [local._info(cluster_id, 1) for cluster_id in range(2, 19)]
        status, statuses = local.datadist.link_clusters(infos)
        assert (status.name, statuses) == ("LLM_CLUSTER_NUM_EXCEED_LIMIT", [])
        status, statuses = local.datadist.link_clusters(infos[:16])
        assert (status.name, len(statuses)) == ("LLM_LINK_FAILED", 16)

    def test_addresses_must_fit(self, make_first: MakeLocal) -> None:
        local = make_first()
        two, other = local._info(2, 1), local._info(3, 1)
        two.append_remote_ip_info("127.0.0.1", 2)
        other._local[0] = (other._local[0][0], 5)
        for infos in ([two], [local._info(2, 1), other]):
            status, statuses = local.datadist.link_clusters(infos)
            assert (status.name, statuses) == ("LLM_PARAM_INVALID", [])

    def test_silent_listener_times_out(self, make_first: MakeLocal, prompt: Peer) -> None:
        local = make_first()
        prompt.stop()
        try:
            status, statuses = local.datadist.link_clusters(
                [local._info(2, prompt.listen_port)], 200
            )
        finally:
            prompt.resume()
        assert status.name == "LLM_LINK_FAILED"
        assert [entry.name for entry in statuses] == ["LLM_WAIT_PROCESS_TIMEOUT"]

    def test_one_request_at_a_time(self, make_first: MakeLocal, prompt: Peer) -> None:
        local = make_first()
        infos = [local._info(2, prompt.listen_port)]
        links = local.datadist._require().first_links
        prompt.stop()
        try:
            waiting = threading.Thread(target=local.datadist.link_clusters, args=(infos, 1000))
            waiting.start()
            wait_until(links._running.locked)
            assert local.datadist.link_clusters(infos)[0].name == "LLM_PROCESSING_LINK"
            assert local.datadist.unlink_clusters(infos)[0].name == "LLM_PROCESSING_LINK"
            waiting.join()
        finally:
            prompt.resume()

    def test_c79_unlink_and_link_again(self, linked: Linked) -> None:
        local, peer = linked
        source, cache = peer.allocate_rows(), local.allocate_rows()
        key = local.api.CacheKeyByIdAndIndex(2, source)
        infos = [local._info(2, peer.listen_port), local._info(7, 1)]
        status, statuses = local.datadist.unlink_clusters(infos)
        assert status.name == "LLM_SUCCESS"
        assert [entry.name for entry in statuses] == ["LLM_SUCCESS", "LLM_NOT_YET_LINK"]
        with refused(local.api, "LLM_NOT_YET_LINK"):
            local.pull_cache(key, cache)
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        local.pull_cache(key, cache)

    def test_unlink_with_another_address(self, linked: Linked) -> None:
        local, _ = linked
        status, statuses = local.datadist.unlink_clusters([local._info(2, 1)])
        assert status.name == "LLM_UNLINK_FAILED"
        assert [entry.name for entry in statuses] == ["LLM_PARAM_INVALID"]

    def test_c79_killed_peer_comes_back(
        self, linked: Linked, make_peer: Callable[..., Peer]
    ) -> None:
        local, peer = linked
        peer.kill()
        status, statuses = local.datadist.unlink_clusters([local._info(2, peer.listen_port)])
        assert status.name == "LLM_UNLINK_FAILED"
        assert [entry.name for entry in statuses] == ["LLM_NOTIFY_PROMPT_UNLINK_FAILED"]
        restarted = make_peer(2, role="PROMPT")
        assert local.link(2, restarted.listen_port).name == "LLM_SUCCESS"

    def test_c83_unlink_during_a_pull(self, linked: Linked) -> None:
        local, peer = linked
        source, cache = peer.allocate_rows(), local.allocate_rows()
        peer.stop()
        key = local.api.CacheKeyByIdAndIndex(2, source)
        pulling = threading.Thread(target=local.pull_cache, args=(key, cache))
        pulling.start()
        try:
            links = local.datadist._require().first_links
            wait_until(lambda: links._link_use.busy(2))
            info = local._info(2, peer.listen_port)
            status, statuses = local.datadist.unlink_clusters([info])
            assert [entry.name for entry in statuses] == ["LLM_LINK_BUSY"]
            assert status.name == "LLM_UNLINK_FAILED"
        finally:
            peer.resume()
            pulling.join()
        assert local.datadist.unlink_clusters([info])[0].name == "LLM_SUCCESS"

    def test_c80_check_link_status(self, make_first: MakeLocal, prompt: Peer) -> None:
        local = make_first(timeout_ms=300)
        with refused(local.api, "LLM_NOT_YET_LINK"):
            local.datadist.check_link_status(2)
        assert local.link(2, prompt.listen_port).name == "LLM_SUCCESS"
        local.datadist.check_link_status(2)
        prompt.kill()
        with refused(local.api, "LLM_FAILED"):
            local.datadist.check_link_status(2)
        with pytest.raises(TypeError):
            local.datadist.check_link_status("2")


class TestSwitchRole:
    def test_c82_roles_change_sides(
        self, make_first: MakeLocal, make_peer: Callable[..., Peer]
    ) -> None:
        peer = make_peer(2, role="PROMPT", may_switch=True)
        local = make_first(may_switch=True)
        role = local.api.LLMRole
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        cache, theirs = local.allocate_rows(seed=100), peer.allocate_rows()
        address = {"llm.listenIpInfo": "127.0.0.1:0"}
        with refused(local.api, "LLM_EXIST_LINK"):
            local.switch_role(role.PROMPT, address)
        assert local.unlink_force(2, peer.listen_port).name == "LLM_SUCCESS"
        peer.unlink_force(1, 1)
        local.switch_role(role.PROMPT, address)
        peer.switch_role(role.DECODER)
        assert peer.link(1, local.port()).name == "LLM_SUCCESS"
        before = peer.dump(theirs)
        peer.pull_cache(local.api.CacheKeyByIdAndIndex(1, cache), theirs)
        assert peer.dump(theirs) == moved(before, local.dump(cache), [(0, 0, 256)])
        with refused(local.api):  # no longer a DECODER
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, theirs), cache)

    def test_c82_refusals(self, make_first: MakeLocal) -> None:
        local = make_first(may_switch=True)
        role = local.api.LLMRole
        with refused(local.api):
            local.switch_role(role.DECODER)
        with refused(local.api):
            local.switch_role(role.PROMPT)

    def test_c82_must_be_enabled(self, make_first: MakeLocal) -> None:
        local = make_first()
        with refused(local.api, "LLM_FEATURE_NOT_ENABLED"):
            local.switch_role(local.api.LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0"})


def test_c87_many_cycles_leave_memory_where_it_was(linked: Linked) -> None:
    local, peer = linked
    cache = local.allocate_rows()
    used = local.pool_used()
    began = time.monotonic()
    for request in range(300):
        key = local.api.CacheKey(2, request)
        peer.drop(peer.allocate_rows(keys=[key]))
        assert pulls(local, key, cache)
        local.drop(local.allocate_blocks())
    assert (peer.pool_used(), local.pool_used()) == (0, used)
    assert time.monotonic() - began < 60

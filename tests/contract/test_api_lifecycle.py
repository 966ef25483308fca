"""LLMDataDist: init, finalize, and the options init looks at."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from contract.cluster import Cluster, free_port
from contract.engines import Restriction, is_vendor, refused_by_vendor
from contract.errors import refused
from contract.fixtures import MakePeer
from contract.memory import Tensor


@pytest.fixture
def fresh(api: Any) -> Iterator[Any]:
    """An LLMDataDist that is not initialised; finalized at the end."""
    datadist = api.LLMDataDist(api.LLMRole.PROMPT, 5)
    yield datadist
    datadist.finalize()


V2 = {"llm.EnableCacheManager": "1"}


def with_port(options: dict[str, str]) -> dict[str, str]:
    """Port 0 of an option becomes one that is free: only our engine takes it as it is."""
    return {
        key: text.replace("127.0.0.1:0", f"127.0.0.1:{free_port()}")
        for key, text in options.items()
    }


class TestBeforeInit:
    def test_c16_everything_but_the_id_raises(self, api: Any, fresh: Any) -> None:
        assert fresh.cluster_id == 5
        calls: list[Callable[[], object]] = [
            lambda: fresh.cache_manager,
            lambda: fresh.kv_cache_manager,
            lambda: fresh.link_clusters([]),
            lambda: fresh.unlink_clusters([]),
            lambda: fresh.check_link_status(1),
        ]
        if not is_vendor(api):
            calls.append(lambda: fresh.listen_port)
        for call in calls:
            with pytest.raises(RuntimeError, match="llm datadist is not initialized"):
                call()

    def test_c18_finalize_is_harmless(self, api: Any, fresh: Any) -> None:
        """Twice before init, and twice after it: each time init works and begins anew."""
        fresh.finalize()
        fresh.finalize()
        with pytest.raises(RuntimeError, match="llm datadist is not initialized"):
            _ = fresh.cache_manager
        managers = []
        for _ in range(2):
            fresh.init(with_port({**V2, "llm.listenIpInfo": "127.0.0.1:0"}))
            managers.append(fresh.cache_manager)
            fresh.finalize()
            fresh.finalize()
        assert managers[0] is not managers[1]
        for manager in managers:
            with refused(api):
                manager.unregister_cache(1)
        assert fresh.cluster_id == 5
        other = api.LLMDataDist(api.LLMRole.MIX, 6)
        other.init(dict(V2))  # nothing is left of the first one, which would exclude another
        other.finalize()

    def test_constructor_checks(self, api: Any) -> None:
        with pytest.raises(TypeError):
            api.LLMDataDist(1, 5)
        with pytest.raises(ValueError):
            api.LLMDataDist(api.LLMRole.MIX, -1)
        with pytest.raises(TypeError):
            api.LLMDataDist(api.LLMRole.MIX, None)


class TestInit:
    def test_c17_second_init_of_one_object_has_no_effect(self, fresh: Any) -> None:
        fresh.init(dict(V2))
        manager = fresh.cache_manager
        fresh.init({"llm.EnableCacheManager": "0"})
        assert fresh.cache_manager is manager

    def test_c17_one_instance_at_a_time(self, api: Any, fresh: Any) -> None:
        fresh.init(dict(V2))
        other = api.LLMDataDist(api.LLMRole.MIX, 6)
        with refused(api, "LLM_FAILED"):
            other.init(dict(V2))
        fresh.finalize()
        other.init(dict(V2))
        other.finalize()

    def test_c20_caller_keeps_its_options(self, fresh: Any) -> None:
        options = {"llm.LocalCommRes": ""}
        fresh.init(options)
        assert options == {"llm.LocalCommRes": ""}

    def test_c19_wrong_manager_for_the_mode(self, api: Any, fresh: Any) -> None:
        fresh.init(dict(V2))
        with refused(api):
            _ = fresh.kv_cache_manager
        with refused(api):
            fresh.check_link_status(1)

    @pytest.mark.parametrize(
        ("options", "is_remote"),
        [
            ({"llm.LocalCommRes": ""}, True),
            ({"llm.LocalCommRes": "", "llm.EnableRemoteCacheAccessible": "0"}, False),
            (V2, False),
            ({**V2, "llm.EnableRemoteCacheAccessible": "1"}, True),
            ({**V2, "llm.TransferBackend": "hixl", "llm.listenIpInfo": "127.0.0.1:0"}, True),
        ],
    )
    def test_accepted_options_choose_the_mode(
        self, api: Any, fresh: Any, options: dict[str, str], is_remote: bool
    ) -> None:
        """A key of a request is for message mode only, a push for remote-access mode only."""
        fresh.init(with_port(options))
        manager = fresh.cache_manager
        memory = Tensor(64)
        cache = manager.register_cache(
            api.CacheDesc(1, [2, 32], api.DataType.DT_INT8), [memory.addr]
        )
        layers = {"tensor_num_per_layer": 1}
        if is_remote:
            with pytest.raises(TypeError):
                manager.pull_cache(api.CacheKey(9, 1), cache, **layers)
        else:
            with refused(api, "LLM_NOT_YET_LINK"):
                manager.pull_cache(api.CacheKey(9, 1), cache, **layers)
        with refused(api, "LLM_NOT_YET_LINK" if is_remote else "LLM_PARAM_INVALID"):
            manager.push_cache(api.CacheKeyByIdAndIndex(9, 1), cache, **layers)

    def test_accepted_options_of_the_hixl_backend(self, api: Any, fresh: Any) -> None:
        options = {**V2, "llm.TransferBackend": "hixl", "llm.listenIpInfo": "127.0.0.1:0"}
        fresh.init(with_port(options))
        with refused(api, "LLM_FEATURE_NOT_ENABLED"):
            fresh.link("x", {5: 0, 6: 1}, "{}")

    def test_accepted_options_of_a_pool(self, api: Any, fresh: Any) -> None:
        """Two pages: a third tensor does not fit."""
        fresh.init({**V2, "llm.MemPoolConfig": '{"memory_size": 2048, "page_shift": 10}'})
        manager, kind = fresh.cache_manager, api.DataType.DT_INT8
        cache = manager.allocate_cache(api.CacheDesc(2, [1, 8], kind))
        assert len(cache.tensor_addrs) == 2
        with refused(api, "LLM_OUT_OF_MEMORY"):
            manager.allocate_cache(api.CacheDesc(1, [1, 8], kind))
        host = api.CacheDesc(1, [1, 8], kind, api.Placement.HOST)
        with refused(api, "LLM_FEATURE_NOT_ENABLED"):
            manager.allocate_cache(host)

    @pytest.mark.parametrize(
        "option",
        [
            {"llm.SyncKvCacheWaitTime": "0"},
            {"llm.somethingElse": "x"},
            {"ge.exec.deviceId": "3"},
            {"ge.flowGraphMemMaxSize": "1024"},
        ],
    )
    def test_accepted_options_that_change_nothing(
        self, api: Any, fresh: Any, option: dict[str, str]
    ) -> None:
        """A cache can be registered, none can be allocated, and nobody listens."""
        fresh.init({**V2, **option})
        memory = Tensor(64)
        desc = api.CacheDesc(1, [2, 32], api.DataType.DT_INT8)
        assert fresh.cache_manager.register_cache(desc, [memory.addr]).cache_id == 1
        with refused(api, "LLM_FEATURE_NOT_ENABLED"):
            fresh.cache_manager.allocate_cache(desc)
        if not is_vendor(api):
            assert fresh.listen_port == 0

    def test_accepted_option_of_no_timeout_means_the_default(
        self, api: Any, fresh: Any, make_peer: MakePeer
    ) -> None:
        """No pull would succeed in zero milliseconds."""
        peer = make_peer(2)
        source = peer.add_blocks(tensors=1, blocks=2, block_bytes=32, seed=100)
        remote = {"llm.EnableRemoteCacheAccessible": "1"}
        fresh.init({**V2, **remote, "llm.SyncKvCacheWaitTime": "0"})
        memory = Tensor(64)
        desc = api.CacheDesc(1, [2, 32], api.DataType.DT_INT8)
        cache = fresh.cache_manager.register_blocks_cache(desc, [memory.addr])
        info = api.LLMClusterInfo()
        info.remote_cluster_id = 2
        info.append_local_ip_info("127.0.0.1", 1)
        info.append_remote_ip_info("127.0.0.1", peer.listen_port)
        assert fresh.link_clusters([info], 20000)[0].name == "LLM_SUCCESS"
        key = api.BlocksCacheKey(2)
        fresh.cache_manager.pull_blocks(key, cache, [1], [0], tensor_num_per_layer=1)
        assert memory.read() == peer.dump(source)[0][32:] + bytes(32)
        fresh.unlink_clusters([info], 20000)

    @pytest.mark.parametrize(
        "options",
        [
            {"llm.LocalCommRes": "", "llm.EnableCacheManager": "0"},
            {"llm.TransferBackend": "hixl"},
            {**V2, "llm.TransferBackend": "hixl"},
            {**V2, "llm.TransferBackend": "other", "llm.listenIpInfo": "127.0.0.1:0"},
            {
                **V2,
                "llm.TransferBackend": "hixl",
                "llm.listenIpInfo": "127.0.0.1:0",
                "llm.EnableRemoteCacheAccessible": "0",
            },
            {**V2, "llm.EnableRemoteCacheAccessible": "2"},
            {**V2, "llm.listenIpInfo": "1.2.3.4"},
            {**V2, "llm.listenIpInfo": "1.2.3.4:70000"},
            {**V2, "llm.MemPoolConfig": "no json"},
            {**V2, "llm.MemPoolConfig": "{}"},
            {**V2, "llm.HostMemPoolConfig": '{"memory_size": 0}'},
            {**V2, "llm.MemPoolConfig": '{"memory_size": 1, "page_shift": 9}'},
            {**V2, "ge.exec.deviceId": "0;1"},
            {**V2, "ge.exec.deviceId": "x"},
            {**V2, "ge.flowGraphMemMaxSize": "1,2"},
            {**V2, "ge.flowGraphMemMaxSize": "a"},
        ],
    )
    def test_c22_refused_options(self, api: Any, fresh: Any, options: dict[str, str]) -> None:
        with refused(api):
            fresh.init(with_port(options))

    def test_c21_c22_option_types(self, fresh: Any) -> None:
        with pytest.raises(ValueError):
            fresh.init({**V2, "llm.listenIpInfo": "1.2.3.4:x"})
        with pytest.raises(TypeError):
            fresh.init({**V2, "ge.flowGraphMemMaxSize": 5})
        with pytest.raises(TypeError):
            fresh.init({**V2, "other": 5})
        with pytest.raises(TypeError):
            fresh.init(None)


class TestListening:
    @refused_by_vendor(Restriction.PORT_ZERO)
    def test_port_zero_picks_a_free_port(self, make_local: Callable[..., Cluster]) -> None:
        port = make_local().port()
        with socket.create_connection(("127.0.0.1", port)):
            assert port > 0

    def test_no_listener_has_port_zero(self, make_local: Callable[..., Cluster]) -> None:
        assert make_local(listen=False).port() == 0

    def test_port_in_use_is_named(self, api: Any, fresh: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with refused(api, "LLM_FAILED", says=address):
                fresh.init({**V2, "llm.listenIpInfo": address})

    def test_address_of_another_host(self, api: Any, fresh: Any) -> None:
        with refused(api, "LLM_FAILED"):
            fresh.init({**V2, "llm.listenIpInfo": f"192.0.2.1:{free_port()}"})


class TestFinalize:
    def test_port_is_free_again(self, make_local: Callable[..., Cluster]) -> None:
        local = make_local()
        port = local.port()
        local.finalize()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    def test_kept_manager_refuses(self, make_local: Callable[..., Cluster]) -> None:
        local = make_local()
        cache = local.add_blocks()
        manager, memory = local.manager, local.caches[cache]
        local.finalize()
        with refused(local.api):
            manager.pull_blocks(local.api.BlocksCacheKey(2), memory, [0], [0])
        with refused(local.api):
            manager.unregister_cache(cache)

    def test_c18_exit_without_finalize_is_clean(self, engine: str) -> None:
        code = (
            f"import {engine} as api; d = api.LLMDataDist(api.LLMRole.MIX, 1); "
            "d.init({'llm.EnableCacheManager': '1', 'llm.listenIpInfo': "
            f"'127.0.0.1:{free_port()}'}})"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.skipif(
    "ASAN_OPTIONS" in os.environ,
    reason="AddressSanitizer's own locks may be taken by another thread when a process forks",
)
class TestFork:
    """A forked child has none of the engine's threads: it must neither hang nor crash."""

    @staticmethod
    def run(script: str, engine: str) -> str:
        code = f"""
import os, sys
import {engine} as api

PORT = {free_port()}
OPTIONS = {{"llm.EnableCacheManager": "1", "llm.listenIpInfo": f"127.0.0.1:{{PORT}}"}}
datadist = api.LLMDataDist(api.LLMRole.MIX, 1)
datadist.init(OPTIONS)

def child(work):
    pid = os.fork()
    if pid == 0:
        work()
        sys.exit(0)  # runs the exit handlers, as a careless child does
    print("exit", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

def attempt(work):
    try:
        work()
    except api.LLMException as error:
        print(error.status_code.name, flush=True)
{script}
"""
        ended = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
            capture_output=True,
            timeout=60,
            check=False,
            env=dict(os.environ),
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
        return ended.stdout.decode()

    def test_child_cannot_use_the_engine(self, engine: str) -> None:
        script = "child(lambda: attempt(lambda: datadist.cache_manager.unregister_cache(1)))"
        assert self.run(script, engine).split() == ["LLM_FAILED", "exit", "0"]

    def test_child_may_finalize_and_the_parent_goes_on(self, engine: str) -> None:
        script = "child(datadist.finalize); datadist.cache_manager.unregister_cache(1)"
        assert self.run(script, engine).split() == ["exit", "0"]

    def test_child_does_not_keep_the_port(self, engine: str) -> None:
        script = """
address = ("127.0.0.1", PORT)
def work():
    os.write(ready_w, b"x")
    os.read(done_r, 1)
ready_r, ready_w = os.pipe()
done_r, done_w = os.pipe()
pid = os.fork()
if pid == 0:
    work()
    os._exit(0)
os.read(ready_r, 1)
datadist.finalize()
import socket
try:
    socket.create_connection(address).close()
    print("accepted")
except ConnectionRefusedError:
    print("refused")
os.write(done_w, b"x")
os.waitpid(pid, 0)
"""
        assert self.run(script, engine).split() == ["refused"]

    def test_child_may_initialise_its_own(self, engine: str) -> None:
        script = """
def work():
    own = api.LLMDataDist(api.LLMRole.MIX, 2)
    own.init({"llm.EnableCacheManager": "1"})
    print(own.cluster_id)
child(work)
"""
        assert self.run(script, engine).split() == ["2", "exit", "0"]

"""One LLM-DataDist cluster with its memory, for the test's process and for helper processes.

Everything a method takes or returns can be pickled, so that `peer.py` can offer the same methods
from another process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contract.bulk import BulkMethods
from contract.engines import HOST_ENGINE, import_engine, is_vendor
from contract.memory import ALIGNMENT, Tensor, Window, pattern
from vllm_llmdd_connector.datadist._engine import testing

_PORT_ATTEMPTS = 5
TRANSPORT_VARIABLE = "LLMDD_TEST_TRANSPORT"

# On x86-64.
_MBIND, _SET_MEMPOLICY = 237, 238
_MPOL_BIND = 2


def free_port() -> int:
    """One that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def choose_transport(config: Any, transport: str = "") -> None:
    """This one, else that of the test run, which children inherit, else the default."""
    if chosen := transport or os.environ.get(TRANSPORT_VARIABLE):
        config.transport = chosen


class Cluster(BulkMethods):
    """An initialised `LLMDataDist` of the engine `api` (a module name)."""

    _host = "127.0.0.1"

    def __init__(
        self,
        cluster_id: int,
        *,
        api: str = HOST_ENGINE,
        remote: bool = True,
        listen: bool = True,
        timeout_ms: int = 20000,
        user: int | None = None,
        pool: str = "",
        host_pool: str = "",
        link_time_s: int = 0,
        backend: str | None = None,
        transport: str = "",
        share_minimum: int = 1,
        share_memory: bool = True,
        staging_mib: int = 0,
        link_secret: str = "",
        host: str = "127.0.0.1",
    ) -> None:
        self._host = host
        self.api: Any = import_engine(api)
        # Tests have little memory, and it should be shared all the same.
        testing.set_share_minimum(share_minimum)
        self.pending_links: list[Callable[[], None]] = []
        if user is not None:
            os.setuid(user)
        config = self.api.LLMConfig()
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = remote
        config.sync_kv_timeout = timeout_ms
        config.mem_pool_cfg = pool
        config.host_mem_pool_cfg = host_pool
        config.link_total_time = link_time_s
        choose_transport(config, transport)
        if link_secret:
            config.link_secret = link_secret
        if staging_mib:
            config.staging_mib = staging_mib
        if not share_memory:
            config.share_memory = False
        if backend is not None:
            config.transfer_backend = backend
        self.datadist = self.api.LLMDataDist(self.api.LLMRole.MIX, cluster_id)
        self._listen_port = self._init(config, listen)
        self.caches: dict[int, Any] = {}
        self.tensors: dict[int, Sequence[Tensor | Window]] = {}
        self._inaccessible: list[mmap.mmap] = []
        self._mapped: list[mmap.mmap] = []

    def _init(self, config: Any, listen: bool) -> int:
        """Initialise the engine; the port it was given, or 0."""
        if not listen or not is_vendor(self.api):
            config.listen_ip_info = f"{self._host}:0" if listen else ""
            self.datadist.init(config.generate_options())
            return 0
        for attempt in range(_PORT_ATTEMPTS):
            port = free_port()
            config.listen_ip_info = f"127.0.0.1:{port}"
            try:
                self.datadist.init(config.generate_options())
                break
            except self.api.LLMException as error:
                # Somebody may have taken the port in between.
                if error.status_code.name != "LLM_FAILED" or attempt == _PORT_ATTEMPTS - 1:
                    raise
        return port

    def connect(self) -> None:
        """Make the links that were put off until there is traffic."""
        pending, self.pending_links = self.pending_links, []
        for link in pending:
            link()

    @property
    def native(self) -> Any:
        """What runs below the API in this process. The stand-in for the vendor's engine has it,
        too, so that tests can look at memory and locks; the vendor's own has not."""
        return getattr(self.datadist, "_inner", self.datadist)._require()

    @property
    def manager(self) -> Any:
        return self.datadist.cache_manager

    def port(self) -> int:
        if is_vendor(self.api):
            return self._listen_port
        return int(self.datadist.listen_port)

    def pid(self) -> int:
        return os.getpid()

    def finalize(self) -> None:
        self.datadist.finalize()

    def discard(self) -> None:
        """The end of a test, whatever it has left running."""
        self.pending_links.clear()
        getattr(self.datadist, "_inner", self.datadist).finalize()

    # Memory.

    def _tensors(self, count: int, size: int, seed: int) -> list[Tensor]:
        tensors = [Tensor(size) for _ in range(count)]
        for index, tensor in enumerate(tensors):
            tensor.write(pattern(seed + index, size))
        return tensors

    def _desc(self, tensors: int, rows: int, row_bytes: int, host: bool) -> Any:
        placement = self.api.Placement.HOST if host else self.api.Placement.DEVICE
        return self.api.CacheDesc(tensors, [rows, row_bytes], self.api.DataType.DT_INT8, placement)

    def _keep(self, cache: Any, tensors: Sequence[Tensor | Window]) -> int:
        self.caches[cache.cache_id] = cache
        self.tensors[cache.cache_id] = tensors
        return int(cache.cache_id)

    def add_blocks(
        self,
        tensors: int = 4,
        blocks: int = 16,
        block_bytes: int = 64,
        *,
        model_id: int = 0,
        seed: int = 0,
        accessible: bool | None = None,
        host: bool = False,
    ) -> int:
        """Register a blocks cache of patterned memory; returns its cache id."""
        memory = self._tensors(tensors, blocks * block_bytes, seed)
        cache = self.manager.register_blocks_cache(
            self._desc(tensors, blocks, block_bytes, host),
            [tensor.addr for tensor in memory],
            self.api.BlocksCacheKey(self.datadist.cluster_id, model_id),
            accessible,
        )
        return self._keep(cache, memory)

    def add_rows(
        self,
        tensors: int = 4,
        rows: int = 4,
        row_bytes: int = 256,
        *,
        keys: Sequence[Any] = (),
        seed: int = 0,
        accessible: bool | None = None,
        host: bool = False,
    ) -> int:
        """Register a contiguous cache of patterned memory; returns its cache id."""
        memory = self._tensors(tensors, rows * row_bytes, seed)
        cache = self.manager.register_cache(
            self._desc(tensors, rows, row_bytes, host),
            [tensor.addr for tensor in memory],
            keys,
            accessible,
        )
        return self._keep(cache, memory)

    def add_slabs(
        self,
        tensors: int,
        blocks: int,
        block_bytes: int,
        *,
        first: int = 64,
        gap: int = 0,
        model_id: int = 0,
        seed: int = 0,
        file: str | None = None,
    ) -> int:
        """Register a blocks cache whose tensors lie in one piece of memory, from its byte `first`
        on with `gap` bytes between two, private or of a file."""
        size = blocks * block_bytes
        whole = first + tensors * (size + gap) + mmap.PAGESIZE
        if file is None:
            memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            with open(file, "w+b") as opened:
                opened.truncate(whole)
                memory = mmap.mmap(opened.fileno(), whole)
        self._mapped.append(memory)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + first
        windows = [Window(base + i * (size + gap), size) for i in range(tensors)]
        for index, window in enumerate(windows):
            window.write(pattern(seed + index, size))
        return self._register_windows(windows, blocks, block_bytes, model_id)

    def add_untouched(self, blocks: int, block_bytes: int, *, model_id: int = 0) -> int:
        """Register a blocks cache of one tensor for which the kernel has supplied no page yet."""
        size = blocks * block_bytes
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._mapped.append(memory)
        addr = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return self._register_windows([Window(addr, size)], blocks, block_bytes, model_id)

    def register_again(self, cache_id: int, *, model_id: int) -> int:
        """Register the memory of a blocks cache once more."""
        desc = self.caches[cache_id].cache_desc
        windows = [Window(addr, desc.size) for addr in self.addrs(cache_id)]
        return self._register_windows(windows, *desc.shape, model_id)

    def _register_windows(
        self, windows: Sequence[Window], blocks: int, block_bytes: int, model_id: int
    ) -> int:
        cache = self.manager.register_blocks_cache(
            self._desc(len(windows), blocks, block_bytes, False),
            [window.addr for window in windows],
            self.api.BlocksCacheKey(self.datadist.cluster_id, model_id),
        )
        return self._keep(cache, windows)

    def register_unmapped(self, *, model_id: int) -> int:
        """Register a blocks cache like `add_blocks`, whose memory is gone."""
        # Mapped without any permission, so that nothing else can come to be there.
        gone = mmap.mmap(-1, 2 * ALIGNMENT)
        self._inaccessible.append(gone)
        addr = -(-ctypes.addressof(ctypes.c_char.from_buffer(gone)) // ALIGNMENT) * ALIGNMENT
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(addr), ctypes.c_size_t(4096), 0) == 0
        cache = self.manager.register_blocks_cache(
            self._desc(4, 16, 64, False),
            [addr] * 4,
            self.api.BlocksCacheKey(self.datadist.cluster_id, model_id),
        )
        return self._keep(cache, [])

    def allocate_rows(
        self,
        tensors: int = 4,
        rows: int = 4,
        row_bytes: int = 256,
        *,
        keys: Sequence[Any] = (),
        seed: int = 0,
        host: bool = False,
    ) -> int:
        """Allocate a contiguous cache and fill it; returns its cache id."""
        cache = self.manager.allocate_cache(self._desc(tensors, rows, row_bytes, host), keys)
        return self._fill(cache, rows * row_bytes, seed)

    def allocate_blocks(
        self,
        tensors: int = 4,
        blocks: int = 16,
        block_bytes: int = 64,
        *,
        model_id: int = 0,
        seed: int = 0,
        host: bool = False,
    ) -> int:
        cache = self.manager.allocate_blocks_cache(
            self._desc(tensors, blocks, block_bytes, host),
            self.api.BlocksCacheKey(self.datadist.cluster_id, model_id),
        )
        return self._fill(cache, blocks * block_bytes, seed)

    def _fill(self, cache: Any, size: int, seed: int) -> int:
        memory = [Window(addr, size) for addr in cache.tensor_addrs]
        for index, window in enumerate(memory):
            window.write(pattern(seed + index, size))
        return self._keep(cache, memory)

    def deallocate(self, cache_id: int) -> None:
        cache = self.caches[cache_id]
        if cache.is_blocks_cache:
            self.manager.deallocate_blocks_cache(cache)
        else:
            self.manager.deallocate_cache(cache)

    def remove_key(self, key: Any) -> None:
        self.manager.remove_cache_key(key)

    def cpu_cache(
        self, tensors: int = 4, blocks: int = 16, block_bytes: int = 64, *, seed: int = 0
    ) -> tuple[Any, list[Tensor]]:
        """Host memory that is not registered, and its description."""
        memory = self._tensors(tensors, blocks * block_bytes, seed)
        cache = self.api.Cache.create_cpu_cache(
            self._desc(tensors, blocks, block_bytes, True), [tensor.addr for tensor in memory]
        )
        return cache, memory

    def pool_used(self, *, host: bool = False) -> int:
        """Bytes of the memory pool that caches hold."""
        return int(self.native.engine.pool_used_bytes(host))

    def unregister(self, cache_id: int) -> None:
        self.manager.unregister_cache(cache_id)

    def forget(self, cache_id: int) -> None:
        """Unregister a cache and free its memory."""
        self.unregister(cache_id)
        del self.caches[cache_id], self.tensors[cache_id]

    def dump(self, cache_id: int) -> list[bytes]:
        return [tensor.read() for tensor in self.tensors[cache_id]]

    def addrs(self, cache_id: int) -> list[int]:
        return [tensor.addr for tensor in self.tensors[cache_id]]

    def flip_byte(self, cache_id: int, tensor: int, offset: int) -> None:
        memory = self.tensors[cache_id][tensor]
        memory.write(bytes([memory.byte(offset) ^ 0xFF]), offset)

    # Links.

    def _info(
        self, cluster_id: int, port: int, link_secret: str = "", host: str = "127.0.0.1"
    ) -> Any:
        info = self.api.LLMClusterInfo()
        info.remote_cluster_id = cluster_id
        info.append_local_ip_info("127.0.0.1", 1)
        info.append_remote_ip_info(host, port)
        if link_secret:
            info.link_secret = link_secret
        return info

    def link(
        self,
        cluster_id: int,
        port: int,
        timeout_ms: int = 20000,
        link_secret: str = "",
        host: str = "127.0.0.1",
    ) -> Any:
        """The status of one link attempt."""
        self.connect()
        _, statuses = self.datadist.link_clusters(
            [self._info(cluster_id, port, link_secret, host)], timeout_ms
        )
        return statuses[0]

    def link_several(self, ports: dict[int, int], timeout_ms: int = 20000) -> list[Any]:
        """The statuses of links to several clusters in one call."""
        self.connect()
        infos = [self._info(cluster_id, port) for cluster_id, port in ports.items()]
        return list(self.datadist.link_clusters(infos, timeout_ms)[1])

    def unlink(self, cluster_id: int, *, force: bool = False, timeout_ms: int = 20000) -> Any:
        self.connect()
        _, statuses = self.datadist.unlink_clusters([self._info(cluster_id, 1)], timeout_ms, force)
        return statuses[0]

    def link_error(self, cluster_id: int) -> str | None:
        """The sentence; the vendor's engine has none."""
        if is_vendor(self.api):
            assert not hasattr(self.datadist, "last_link_error")
            return None
        return str(self.datadist.last_link_error(cluster_id))

    def link_members(self, name: str, members: dict[int, int]) -> int:
        self.connect()
        return int(self.datadist.link(name, members, "{}"))

    def unlink_members(self, comm_id: int) -> None:
        self.datadist.unlink(comm_id)

    def comm_status(self, comm_id: int) -> str:
        return str(self.datadist.query_register_mem_status(comm_id).name)

    def switch_role(self, role: Any, options: dict[str, str] | None = None) -> None:
        self.connect()
        self.datadist.switch_role(role, options)
        address = (options or {}).get("llm.listenIpInfo", ":0")
        self._listen_port = int(address.rpartition(":")[2])

    def inject_probe_errno(self, error: int) -> None:
        """Let the next probes of a peer fail."""
        self.native.engine.inject_probe_errno(error)

    # Transfers.

    def pull_blocks(
        self, key: Any, cache_id: int, src: Sequence[int], dst: Sequence[int], **options: Any
    ) -> None:
        self.connect()
        self.manager.pull_blocks(key, self.caches[cache_id], src, dst, **options)

    def pull_cache(self, key: Any, cache_id: int, *args: int, **options: Any) -> None:
        self.connect()
        self.manager.pull_cache(key, self.caches[cache_id], *args, **options)

    def push_blocks(
        self, key: Any, cache_id: int, src: Sequence[int], dst: Sequence[int], **options: Any
    ) -> None:
        self.connect()
        self.manager.push_blocks(key, self.caches[cache_id], src, dst, **options)

    def push_cache(self, key: Any, cache_id: int, *args: int, **options: Any) -> None:
        self.connect()
        self.manager.push_cache(key, self.caches[cache_id], *args, **options)

    def transfer(
        self, synchronizer: Any, cache_id: int, configs: Sequence[Any], *args: Any, **options: Any
    ) -> Any:
        self.connect()
        cache = self.caches[cache_id]
        return self.manager.transfer_cache_async(cache, synchronizer, configs, *args, **options)

    def transfer_to_nobody(self, cache_id: int) -> list[str]:
        """The results of a transfer to a cluster that is not linked, or why it did not start."""
        config = self.api.TransferWithCacheKeyConfig(
            self.api.BlocksCacheKey(99), range(1), range(1), 0
        )
        synchronizer = self.api.NativeLayerSynchronizer(1)
        synchronizer.mark_all()
        try:
            task = self.transfer(synchronizer, cache_id, [config], [0], [0])
        except self.api.LLMException as error:
            return [str(error)]
        return [status.name for status in task.get_results()]

    def open_reservation(self, cache_id: int, blocks: Sequence[int]) -> int:
        return int(self.manager.open_reservation(self.caches[cache_id], blocks))

    def require_reservations(self, cache_id: int) -> None:
        self.manager.require_reservations(self.caches[cache_id])

    def close_reservation(self, token: int) -> None:
        self.manager.close_reservation(token)

    # What the process holds.

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def native_threads(self) -> int:
        return len(os.listdir("/proc/self/task"))

    def wake_ups(self) -> dict[str, int]:
        """How often each thread but the main one has gone to sleep, by thread id."""
        counts = {}
        for task in Path("/proc/self/task").iterdir():
            if int(task.name) != os.getpid():
                status = (task / "status").read_text()
                counts[task.name] = int(status.partition("voluntary_ctxt_switches:")[2].split()[0])
        return counts

    def shared_pages(self) -> dict[str, int]:
        """Bytes of shared memory that are mapped here, by permissions."""
        found: dict[str, int] = {}
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/memfd:llmdd-kv" in line:
                area, permissions = line.split()[:2]
                begin, end = (int(number, 16) for number in area.split("-"))
                found[permissions] = found.get(permissions, 0) + end - begin
        return found

    def mapped_names(self) -> set[str]:
        """Names of all memfds that are mapped here."""
        return set(re.findall(r"/memfd:(\S+)", Path("/proc/self/maps").read_text()))

    def bind_thread(self, *, is_bound: bool) -> None:
        """Let the calling thread take memory of NUMA node 0 only, as vLLM's CPU workers do."""
        nodes = ctypes.c_ulong(1)
        policy = (_MPOL_BIND, ctypes.byref(nodes), 64) if is_bound else (0, None, 0)
        assert ctypes.CDLL(None).syscall(_SET_MEMPOLICY, *policy) == 0

    def add_bound(self) -> int:
        """Register a blocks cache in memory that is bound to NUMA node 0."""
        (tensor,) = self._tensors(1, 64 * mmap.PAGESIZE, 0)
        nodes = ctypes.c_ulong(1)
        arguments = (ctypes.c_void_p(tensor.addr), ctypes.c_size_t(64 * mmap.PAGESIZE))
        policy = (_MPOL_BIND, ctypes.byref(nodes), 64, 0)
        assert ctypes.CDLL(None).syscall(_MBIND, *arguments, *policy) == 0
        cache = self.manager.register_blocks_cache(
            self._desc(1, 64, mmap.PAGESIZE, False),
            [tensor.addr],
            self.api.BlocksCacheKey(self.datadist.cluster_id, 9),
        )
        return self._keep(cache, [tensor])

    def limit_shared_memory(self, size: int) -> None:
        testing.limit_shared_memory(size)

    def limit_file_size(self, size: int) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    def cpu_ms(self) -> float:
        """Processor time of all threads since the process began."""
        return time.process_time() * 1000

    def resident_kib(self) -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * mmap.PAGESIZE // 1024

"""Types of the native module (csrc/bindings).

Every call of ``HostEngine`` drops the GIL while it waits or copies. A layer range is (start, stop),
or None for all tensors; a ref is (kind, id, model_id, row) with the kinds of
csrc/model/cache_key.h.
"""

from array import array
from collections.abc import Sequence
from typing import TypeAlias

_Range: TypeAlias = tuple[int, int] | None
_Ref: TypeAlias = tuple[int, int, int, int]
_Triple: TypeAlias = tuple[int, int, int]
_Pool: TypeAlias = tuple[int, int] | None  # bytes, page shift
# Cache id (-1: not registered), then shape, element bytes and addresses for that case.
_Local: TypeAlias = tuple[int, Sequence[int], int, Sequence[int]]

class EngineError(RuntimeError):
    """A refused or failed call; args are the sentence and the LLMStatusCode value."""

class HostEngine:
    def __init__(
        self,
        cluster_id: int,
        remote_access: bool,
        sync_kv_timeout_ms: int,
        listen_ip: str,
        listen_port: int,
        device_pool: _Pool = None,
        host_pool: _Pool = None,
        link_total_time_ms: int = 120000,
        link_retries: int = 1,
        transport: str = "auto",
        link_secret: str = "",  # callers over NIXL must know it; empty: anybody may come
        nixl_library: str = "",  # path; empty: not installed
        staging_mib: int = 64,
        share_memory: bool = True,
    ) -> None: ...
    def finalize(self) -> None: ...
    @property
    def listen_port(self) -> int: ...
    def register_cache(
        self,
        shape: Sequence[int],
        element_bytes: int,
        remote_accessible: bool,
        host_placed: bool,
        addrs: Sequence[int],
        keys: Sequence[_Triple],
    ) -> int: ...
    def register_blocks_cache(
        self,
        shape: Sequence[int],
        element_bytes: int,
        remote_accessible: bool,
        host_placed: bool,
        addrs: Sequence[int],
        model_id: int | None,
    ) -> int: ...
    def unregister_cache(self, cache_id: int) -> None: ...
    def link(self, targets: Sequence[tuple[int, str, int, str]], timeout_ms: int) -> list[int]:
        """A target is (cluster id, ip, port, the peer's link secret)."""

    def unlink(self, cluster_ids: Sequence[int], timeout_ms: int, force: bool) -> list[int]: ...
    def last_link_error(self, cluster_id: int) -> str: ...
    def pull_cache(
        self,
        cluster_id: int,
        ref: _Ref,
        dst_cache_id: int,
        batch_index: int,
        size: int,
        src_layers: _Range,
        dst_layers: _Range,
        tensors_per_layer: int,
        src_offset: int | None = None,
        dst_offset: int | None = None,
    ) -> None: ...
    def pull_blocks(
        self,
        cluster_id: int,
        ref: _Ref,
        dst_cache_id: int,
        src_blocks: array[int],
        dst_blocks: array[int],
        src_layers: _Range,
        dst_layers: _Range,
        tensors_per_layer: int,
    ) -> None: ...
    def push_cache(
        self,
        cluster_id: int,
        ref: _Ref,
        src_cache_id: int,
        src_batch_index: int,
        src_layers: _Range,
        dst_layers: _Range,
        tensors_per_layer: int,
    ) -> None: ...
    def push_blocks(
        self,
        cluster_id: int,
        ref: _Ref,
        src_cache_id: int,
        src_blocks: array[int],
        dst_blocks: array[int],
        src_layers: _Range,
        dst_layers: _Range,
        tensors_per_layer: int,
        token: int = 0,
    ) -> None: ...
    def transfer(
        self,
        src_cache_id: int,
        num_layers: int,
        tensors_per_layer: int,
        src_blocks: array[int],
        dst_blocks: array[int],
        dst_block_bytes: int,
        targets: Sequence[tuple[int, _Ref, Sequence[int], tuple[int, int], int, int, int],],
        gate: object,
    ) -> LayerTask:
        """A target is (cluster id, ref, raw addresses, layers of the source, first layer of the
        destination, row, token); a gate is a LayerMarks or a ``synchronize_layer`` to call."""

    def require_reservations(self, cache_id: int) -> None: ...
    def open_reservation(self, cache_id: int, blocks: array[int]) -> int: ...
    def close_reservation(self, token: int) -> None: ...
    def allocate_cache(
        self,
        shape: Sequence[int],
        element_bytes: int,
        remote_accessible: bool,
        host_placed: bool,
        num_tensors: int,
        keys: Sequence[_Triple],
    ) -> tuple[int, list[int]]: ...
    def allocate_blocks_cache(
        self,
        shape: Sequence[int],
        element_bytes: int,
        remote_accessible: bool,
        host_placed: bool,
        num_tensors: int,
        model_id: int | None,
    ) -> tuple[int, list[int]]: ...
    def deallocate_cache(self, cache_id: int) -> None: ...
    def remove_cache_key(self, key: _Triple) -> None: ...
    def pool_used_bytes(self, host_placed: bool) -> int: ...
    def copy_row(
        self,
        dst_cache_id: int,
        src_cache_id: int,
        dst_row: int,
        src_row: int,
        offset: int,
        size: int,
    ) -> None: ...
    def copy_blocks(self, cache_id: int, src: array[int], dst: array[int]) -> None: ...
    def move_blocks(
        self, src: _Local, dst: _Local, src_blocks: array[int], dst_blocks: array[int]
    ) -> None: ...
    def link_members(self, name: str, members: Sequence[tuple[int, int]]) -> int: ...
    def unlink_members(self, comm_id: int) -> None: ...
    def comm_state(self, comm_id: int) -> int:
        """A value of RegisterMemStatus."""

    def linked(self, cluster_id: int) -> bool: ...
    def check_link(self, cluster_id: int) -> None: ...
    def listen(self, listen_ip: str, listen_port: int) -> None: ...
    def inject_probe_errno(self, error: int) -> None:
        """Tests only: probes of new links fail with this errno; 0 ends that."""

class LayerTask:
    def wait(self, timeout_ms: int | None) -> bool: ...
    def results(self) -> list[int | None]: ...
    def layer_times(self) -> list[tuple[int, int, int, int]]:
        """Target, layer, and when its push was started and acknowledged; CLOCK_MONOTONIC ns."""

class LayerMarks:
    def __init__(self, num_layers: int) -> None: ...
    def mark(self, layer: int) -> None: ...
    def mark_all(self) -> None: ...
    def reset(self) -> None: ...
    def abort(self) -> None: ...
    def wait(self, layer: int, timeout_ms: int | None) -> bool: ...

class testing:
    """Pieces of the engine by themselves, for its own tests."""

    WIRE_MAGIC: int
    WIRE_VERSION: int
    MAX_PAYLOAD: int
    @staticmethod
    def merge_blocks(src: Sequence[int], dst: Sequence[int]) -> list[_Triple]: ...
    @staticmethod
    def row_to_blocks(
        row_offset: int, row_bytes: int, block_bytes: int, dst: Sequence[int]
    ) -> list[_Triple]: ...
    @staticmethod
    def hmac_sha256(key: str, message: bytes) -> bytes: ...
    @staticmethod
    def recode(message_type: int, payload: bytes) -> bytes: ...
    @staticmethod
    def decode_header(data: bytes, max_payload: int) -> tuple[int, int, int]: ...
    @staticmethod
    def copy_blocks(
        src_addr: int, dst_addr: int, block_bytes: int, src: Sequence[int], dst: Sequence[int]
    ) -> None:
        """Bare memcpy of block pairs inside one process: the bound of the benches."""

    @staticmethod
    def set_copy_rate(bytes_per_second: int) -> None:
        """Slow this process's copies down to a link's rate; 0 takes the bound away."""

    @staticmethod
    def set_copy_width(threads: int) -> None:
        """At most this many threads work on one copy; 0 is the usual number."""

    @staticmethod
    def set_share_minimum(bytes: int) -> None:
        """The smallest piece of memory that is shared with peers, below a page also edges of pages;
        0 is the usual one."""

    @staticmethod
    def limit_shared_memory(bytes: int) -> None:
        """The system has no more for one file of shared memory; 0 ends that."""

    @staticmethod
    def memory_headroom(proc: str) -> int:
        """Bytes that the control groups of a process leave it; ``proc`` is its ``/proc/PID``."""

    @staticmethod
    def probe_sentence(pid: int, error: int) -> str: ...

    class CacheTable:
        def __init__(self) -> None: ...
        def add(
            self,
            shape: Sequence[int],
            is_blocks: bool,
            addrs: Sequence[int],
            keys: Sequence[_Triple],
            model_id: int | None,
        ) -> int: ...
        def remove(self, cache_id: int) -> None: ...
        def find(self, kind: int, id: int, model_id: int, row: int) -> tuple[int, int]: ...

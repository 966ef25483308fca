"""The engine's wire format, written a second time from its description in csrc/engine/wire.h."""

from __future__ import annotations

import struct

from vllm_llmdd_connector.datadist._engine import testing

HELLO, WELCOME, REJECT, INTRODUCE, VERDICT = 1, 2, 3, 4, 5
RESOLVE, RESOLVED, FINISH, FINISHED, PUSH, PUSHED = 16, 17, 18, 19, 20, 21
UNLINK, UNLINKED, FAILURE = 22, 23, 24
SHARE, WITHDRAW = 32, 33
STAGE, FETCH, FETCHED = 6, 26, 27
AUTO, SHM, CMA, NIXL = range(4)  # transports
SLOT_BYTES = 4 << 20
HEADER = struct.Struct("<IHHIIQ")


def frame(
    kind: int,
    payload: bytes = b"",
    call_id: int = 0,
    *,
    magic: int = testing.WIRE_MAGIC,
    version: int = testing.WIRE_VERSION,
    size: int | None = None,
) -> bytes:
    length = len(payload) if size is None else size
    return HEADER.pack(magic, version, kind, length, 0, call_id) + payload


def text(value: bytes) -> bytes:
    return struct.pack("<H", len(value)) + value


def host() -> bytes:
    return text(b"boot") + struct.pack("<QI", 1, 2)


def hello(
    cluster_id: int, wanted: int, *, remote: bool, timeout_ms: int = 5000, transport: int = CMA
) -> bytes:
    head = struct.pack("<QQBI", cluster_id, wanted, remote, timeout_ms)
    return head + host() + bytes([transport])


def welcome(cluster_id: int, path: bytes, *, remote: bool, transport: int = CMA) -> bytes:
    head = struct.pack("<QB", cluster_id, remote) + host() + bytes([transport])
    return head + text(path) + bytes(16)


def stage(token: bytes, metadata: bytes, *, addr: int = 1 << 20, slots: int = 4) -> bytes:
    return token + struct.pack("<QII", addr, slots, len(metadata)) + metadata + bytes(32)


def fetch(slot: int, pieces: list[tuple[int, int]]) -> bytes:
    packed = b"".join(struct.pack("<2Q", *piece) for piece in pieces)
    return struct.pack("<II", slot, len(pieces)) + packed


def outcome(status: int, reason: bytes = b"") -> bytes:
    return struct.pack("<I", status) + text(reason)


def introduce(token: bytes, nonce: bytes, nonce_addr: int, *, maps_shared: bool = False) -> bytes:
    return token + nonce + struct.pack("<QB", nonce_addr, maps_shared)


def share(file_id: int, size: int, ranges: list[tuple[int, int, int]]) -> bytes:
    """Each range is (address, length, offset)."""
    packed = b"".join(struct.pack("<QQQ", *one) for one in ranges)
    return struct.pack("<QQI", file_id, size, len(ranges)) + packed


def withdraw(file_id: int) -> bytes:
    return struct.pack("<Q", file_id)


def ref(kind: int, number: int = 0, model_id: int = 0, row: int = 0) -> bytes:
    return struct.pack("<BQQQ", kind, number, model_id, row)


def finish(source: bytes, cache_id: int, first: int, count: int) -> bytes:
    return source + struct.pack("<QII", cache_id, first, count)


def u64_list(values: list[int]) -> bytes:
    return struct.pack(f"<I{len(values)}Q", len(values), *values)


def resolved(addrs: list[int], *, rows: int = 16, stride: int = 64, row: int = 0) -> bytes:
    return struct.pack("<QQQQBBB", 1, row, rows, stride, 1, 1, 0) + u64_list(addrs)


def push(
    target: bytes,
    stride: int,
    addrs: list[int],
    runs: list[tuple[int, int, int]],
    *,
    dst_addrs: tuple[int, ...] = (),
    token: int = 0,
    to_blocks: bool = True,
    src_bytes: int | None = None,
) -> bytes:
    head = target + struct.pack("<BQQIQ", 0, 0, 0, 2, token) + u64_list(list(dst_addrs))
    size = min(64 * stride, 2**64 - 1) if src_bytes is None else src_bytes
    head += struct.pack("<BQQI", to_blocks, size, stride, 1000) + u64_list(addrs)
    packed = b"".join(struct.pack("<3Q", *run) for run in runs)
    return head + struct.pack("<I", len(runs)) + packed

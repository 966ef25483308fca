"""Memory of a cluster's caches, and what it should hold after a copy."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Iterable, Sequence

ALIGNMENT = 2 << 20  # of device memory, as the vendor's engine wants it
_GUARD = 4096


def pattern(seed: int, size: int) -> bytes:
    """Bytes that differ everywhere between seeds."""
    return random.Random(seed).randbytes(size)


class Tensor:
    """Private memory with a fixed address and margins that nobody may write to."""

    def __init__(self, size: int) -> None:
        # Pages that nobody touches cost nothing.
        mapped = size + 2 * ALIGNMENT
        self._map = mmap.mmap(-1, mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = ctypes.c_char.from_buffer(self._map)
        base = ctypes.addressof(self._view)
        self._start = ALIGNMENT + -base % ALIGNMENT
        self._size = size
        self.addr = base + self._start

    def read(self) -> bytes:
        """The content; fails when a margin was written to."""
        start, stop = self._start, self._start + self._size
        for margin in (self._map[start - _GUARD : start], self._map[stop : stop + _GUARD]):
            assert not any(margin), "memory beside a tensor was written to"
        return self._map[start:stop]

    def write(self, data: bytes, offset: int = 0) -> None:
        start = self._start + offset
        self._map[start : start + len(data)] = data

    def byte(self, offset: int) -> int:
        return self._map[self._start + offset]


class Window:
    """Memory of the engine, which must not be read once it is freed."""

    def __init__(self, addr: int, size: int) -> None:
        self.addr = addr
        self._size = size

    def read(self) -> bytes:
        return ctypes.string_at(self.addr, self._size)

    def write(self, data: bytes, offset: int = 0) -> None:
        ctypes.memmove(self.addr + offset, data, len(data))

    def byte(self, offset: int) -> int:
        return self.read()[offset]


def moved(
    before: Iterable[bytes],
    source: Iterable[bytes],
    pieces: Iterable[tuple[int, int, int]],
) -> list[bytes]:
    """What a destination holds after `pieces` (src offset, dst offset, length) of each tensor."""
    pieces = list(pieces)
    after = []
    for old, new in zip(before, source, strict=True):
        tensor = bytearray(old)
        for src, dst, length in pieces:
            tensor[dst : dst + length] = new[src : src + length]
        after.append(bytes(tensor))
    return after


def block_pieces(
    src: Sequence[int], dst: Sequence[int], block_bytes: int
) -> list[tuple[int, int, int]]:
    return [(a * block_bytes, b * block_bytes, block_bytes) for a, b in zip(src, dst, strict=True)]

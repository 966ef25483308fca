"""KV memory whose every word says whose it is: a prompt's, or nobody's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

BLOCK_TOKENS = 16
LAYERS = ("a", "b", "c", "d")
_TOKEN_WORDS = 32
BLOCK_LEN = BLOCK_TOKENS * _TOKEN_WORDS * 8
_MASK = (1 << 63) - 1


def num_blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


class KVMemory:
    """One tensor of shape [num_blocks, BLOCK_LEN] and type uint8 per layer."""

    def __init__(self, num_blocks: int) -> None:
        self.tensors = {
            layer: torch.zeros(num_blocks, BLOCK_LEN, dtype=torch.uint8) for layer in LAYERS
        }
        self._words = {
            layer: tensor.view(torch.int64).view(num_blocks, BLOCK_TOKENS, _TOKEN_WORDS)
            for layer, tensor in self.tensors.items()
        }

    def write(self, seed: int, layer: str, blocks: Sequence[int], first: int, end: int) -> None:
        """The KV of tokens [first, end) of prompt ``seed``, whose block table is ``blocks``."""
        rows = _rows(blocks, first, end)
        self._words[layer][rows] = _content(seed, layer, first, end)

    def wrong_blocks(self, seed: int, blocks: Sequence[int], first: int, end: int) -> list[int]:
        """Those that differ from what ``write`` of the same writes, in any layer."""
        wrong: set[int] = set()
        rows = _rows(blocks, first, end)
        for layer, words in self._words.items():
            same = (words[rows] == _content(seed, layer, first, end)).all(dim=1)
            wrong.update(rows[0][~same].tolist())
        return sorted(wrong)

    def fill(self, layer: str, block: int, value: int) -> None:
        self._words[layer][block] = value

    def fill_all(self, block: int, value: int) -> None:
        for layer in LAYERS:
            self.fill(layer, block, value)

    def holds(self, block: int, value: int) -> bool:
        """Whether every word of the block is as ``fill_all`` left it."""
        return all(bool((words[block] == value).all()) for words in self._words.values())


def _rows(blocks: Sequence[int], first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(first, end)
    return torch.tensor(blocks)[tokens // BLOCK_TOKENS], tokens % BLOCK_TOKENS


def _content(seed: int, layer: str, first: int, end: int) -> torch.Tensor:
    """Shape [tokens, words]; any two prompts, layers, tokens and words differ."""
    base = (seed * 0x9E3779B97F4A7C15 + ord(layer) * 0xC2B2AE3D27D4EB4F) & _MASK
    tokens = torch.arange(first, end)[:, None] * 0x165667B19E3779F9
    return base + tokens + torch.arange(_TOKEN_WORDS) * 0x27D4EB2F165667C5


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0


class Pool:
    """vLLM's block pool as far as the connector uses it; free blocks are used again at once."""

    def __init__(self, num_blocks: int, on_free: Callable[[int], None]) -> None:
        """``on_free``: told each block that nobody has any more. Block 0 is never given out."""
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free = list(range(1, num_blocks))
        self._on_free = on_free

    def take(self, number: int, choose: Callable[[Sequence[int]], int]) -> list[int]:
        taken = []
        for _ in range(number):
            block_id = choose(self.free)
            self.free.remove(block_id)
            self.blocks[block_id].ref_cnt = 1
            taken.append(block_id)
        return taken

    def give_back(self, block_ids: Iterable[int]) -> None:
        self.free_blocks([self.blocks[block_id] for block_id in block_ids])

    def reset_prefix_cache(self) -> bool:
        return not any(block.ref_cnt for block in self.blocks)

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert block.ref_cnt, f"block {block.block_id} was touched after it had been freed"
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, f"block {block.block_id} was freed once too often"
            if not block.ref_cnt:
                self.free.append(block.block_id)
                self._on_free(block.block_id)

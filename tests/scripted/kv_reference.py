"""What the scripted model computes, from token ids alone.

The model stands in for a transformer in the two respects that matter to a KV connector. The KV
bytes of a position depend on every token up to it, and the next token depends on every KV byte that
the attention may read. So a block that holds anything but the right bytes shows up in the bytes
themselves, in the KV computed after it, and in the tokens.

A position's *state* is a 64-bit hash chain over the tokens. In each layer and head it becomes
``2 * head_dim`` elements (K then V). The first word carries the state itself, masked, which is how
a later step finds the state of a position that another engine computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST_STATE = 0x5851F42D4C957F2D


def _mix(values: Words) -> Words:
    """Scramble 64-bit words (a bijection; overflow is wanted)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _next_state(state: int, token: int) -> int:
    value = ((state * 0x2545F4914F6CDD1D) + token + 1) & _MASK
    value = ((value ^ (value >> 29)) * _STEP) & _MASK
    return value ^ (value >> 32)


@dataclass(frozen=True)
class KVModel:
    """Shape and arithmetic of the model.

    ``windows`` has one entry per layer: its sliding window, or None for full attention.
    """

    windows: tuple[int | None, ...] = (None, None, None, None)
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 1024
    itemsize: int = 2

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def words_per_head(self) -> int:
        """64-bit words of one position in one head of one layer."""
        return 2 * self.head_dim * self.itemsize // 8

    @cached_property
    def _salts(self) -> Words:
        shape = (self.num_layers, self.num_kv_heads, self.words_per_head)
        return _mix(np.arange(1, np.prod(shape) + 1, dtype=np.uint64) * np.uint64(_STEP)).reshape(
            shape
        )

    def states(self, tokens: Sequence[int], before: int = _FIRST_STATE) -> Words:
        """States of positions that hold ``tokens``, following a position with state ``before``."""
        states = np.empty(len(tokens), dtype=np.uint64)
        for index, token in enumerate(tokens):
            before = _next_state(before, token)
            states[index] = before
        return states

    def words(self, layer: int, states: Words, heads: slice) -> Words:
        """KV of positions with these states: ``(position, head, word)``."""
        salts = self._salts[layer, heads]
        masked = states[:, None, None] ^ salts
        words = _mix(masked)
        words[:, :, 0] = masked[:, :, 0]
        return words

    def state_in(self, layer: int, head: int, words: Words) -> int:
        """State of a position, read from its words in one head (wrong KV gives a wrong state)."""
        return int(words[0] ^ self._salts[layer, head, 0])

    def digest(self, layer: int, first_position: int, words: Words, heads: slice) -> int:
        """What attention over these words adds to the logits; sums over layers and heads."""
        positions = np.arange(first_position, first_position + len(words), dtype=np.uint64)
        with np.errstate(over="ignore"):
            salted = (words ^ self._salts[layer, heads]) + (positions * np.uint64(_STEP))[
                :, None, None
            ]
            return int(_mix(salted).sum(dtype=np.uint64))

    def first_visible(self, layer: int, position: int) -> int:
        """First position that the query at ``position`` attends to."""
        window = self.windows[layer]
        return 0 if window is None else max(0, position - window + 1)

    def token(self, digest: int) -> int:
        """Token sampled for a sum of digests; never 0, which tests may use as end of sequence."""
        return 1 + (digest & _MASK) % (self.vocab_size - 1)

    def next_token(self, tokens: Sequence[int]) -> int:
        """Token that follows ``tokens`` when all KV is right."""
        states, heads = self.states(tokens), slice(None)
        total = 0
        for layer in range(self.num_layers):
            first = self.first_visible(layer, len(tokens) - 1)
            total += self.digest(layer, first, self.words(layer, states[first:], heads), heads)
        return self.token(total)

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """The ``count`` tokens that follow ``prompt``."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.next_token(tokens))
        return tokens[len(prompt) :]

    def block(
        self, layer: int, tokens: Sequence[int], index: int, block_size: int, heads: slice
    ) -> Words:
        """Words of block ``index`` of a sequence: ``(head, position, word)``, whole positions only.

        A block that ``tokens`` fill only in part gives the filled positions.
        """
        states = self.states(tokens)[index * block_size : (index + 1) * block_size]
        return np.ascontiguousarray(self.words(layer, states, heads).transpose(1, 0, 2))

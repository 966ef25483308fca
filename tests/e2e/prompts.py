"""Prompts of an exact number of tokens, made of plain English.

Meaningless tokens would do for digests, but they leave the model undecided, and then bfloat16
rounding alone moves logprobs by more than the tolerance.
"""

from __future__ import annotations

import random
from functools import cache

from conftest import MODEL
from transformers import AutoTokenizer, PreTrainedTokenizerBase

_WHO = (
    "The baker",
    "A young sailor",
    "My neighbour",
    "The old teacher",
    "Her brother",
    "The mayor",
)
_DID = ("opened the door of", "walked slowly to", "wrote a letter about", "looked at", "painted")
_WHAT = ("the small harbour", "a house on the hill", "the town library", "the morning market")
_WHEN = ("before sunrise", "on a rainy Monday", "in the first week of May", "after dinner")


@cache
def _tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Token ids of a story, different from the first sentence on for each seed."""
    rng = random.Random(seed)
    sentences = [f"This is the story number {seed} of our town."]
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        words = (rng.choice(part) for part in (_WHO, _DID, _WHAT, _WHEN))
        sentences.append(" ".join(words) + ".")
        token_ids = _tokenizer().encode(" ".join(sentences))
    return token_ids[:num_tokens]

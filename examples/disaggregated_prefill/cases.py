"""The demo's prompts: each is there for one way in which a transfer could go wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MAX_TOKENS = 16

_STORY = (
    "The lighthouse keeper wrote that the wind came from the north and the sea was high. ",
    "A ship passed at noon, and its captain waved to the people on the shore. ",
    "In the evening the lamp was lit, and its light was seen for many miles. ",
    "The supplies were counted: bread, water, oil for the lamp, and paper for letters. ",
    "Nobody slept well that night, because the storm shook the old wooden door. ",
)


@dataclass(frozen=True)
class Case:
    """One prompt. `repeats` names an earlier case whose blocks D has in its own prefix cache."""

    name: str
    path: str
    body: dict[str, Any]
    repeats: str = ""


def cases(tokenize: Callable[[str], list[int]], block_size: int, flow: str) -> list[Case]:
    """Build the prompts; those of an exact length are given as token ids.

    Each flow has prompts of its own: D has nothing of them in its prefix cache.
    """

    def story(opening: str, sentences: int) -> str:
        return _story(f"Told by {flow}. {opening}", sentences)

    boundary = tokenize(story("Two blocks exactly. ", 40))[: 2 * block_size]
    long = tokenize(story("A long night at sea. ", 200))[:2100]
    question = {"role": "user", "content": "Name the three primary colours, nothing else."}
    return [
        _completion("a few tokens", "The capital of France is"),
        _completion("two whole blocks", boundary, stream=True),
        _completion("2,100 tokens", long, stream=True),
        _completion("the same again", long, stream=True, repeats="2,100 tokens"),
        Case("chat", CHAT, {"messages": [question], "stream": True}),
        _completion("streamed text", story("Dear reader, ", 12), stream=True),
        _completion("one answer, one piece", story("Chapter one. ", 24)),
    ]


def _completion(name: str, prompt: object, stream: bool = False, repeats: str = "") -> Case:
    return Case(name, COMPLETIONS, {"prompt": prompt, "stream": stream}, repeats)


def _story(opening: str, sentences: int) -> str:
    """Return text that differs from every other prompt's from its first token on."""
    return opening + "".join(_STORY[number % len(_STORY)] for number in range(sentences))

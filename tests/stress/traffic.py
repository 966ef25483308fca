"""Requests with known answers, and what became of each: right, a clean error, wrong, or hung."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import fleet
import httpx
from flow import assert_same_generation, post
from prompts import prompt_of

MAX_TOKENS = 6
HANG_S = 120.0
"""Longer than all deadlines of a request together, a recomputed prefill included."""
GAVE_UP_S = (0.05, 1.5)
"""When an impatient client hangs up."""

Answer = dict[str, Any]


@dataclass(frozen=True)
class Question:
    body: Answer
    reference: Answer


@dataclass
class Outcomes:
    """What became of all requests; filled by many threads."""

    counts: Counter[str] = field(default_factory=Counter)
    """``right``, ``error``, ``gone`` (the client hung up), ``wrong``, ``hung``."""
    details: list[str] = field(default_factory=list)
    latencies_s: list[tuple[float, float]] = field(default_factory=list)
    """Of right ones: when they were sent, on the monotonic clock, and how long they took."""
    longest_error_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, sent_s: float, detail: str = "") -> None:
        took_s = time.monotonic() - sent_s
        with self._lock:
            self.counts[kind] += 1
            if kind == "right":
                self.latencies_s.append((sent_s, took_s))
            if kind == "error":
                self.longest_error_s = max(self.longest_error_s, took_s)
            if kind in ("wrong", "hung"):
                self.details.append(f"{kind} after {took_s:.1f} s: {detail}")

    @property
    def total(self) -> int:
        with self._lock:
            return self.counts.total()


def make_questions(server: fleet.Server, count: int, seed: int) -> list[Question]:
    """Prompts of 20 to 900 tokens and what one server alone answers."""
    lengths = random.Random(seed)
    questions = []
    for number in range(count):
        prompt = prompt_of(lengths.randint(20, 900), seed * 1000 + number)
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "logprobs": 2, "ignore_eos": True}
        questions.append(Question(body, post(server, body)))
    return questions


class Traffic:
    """Clients that ask one question after the other, each over the proxy of a random flow."""

    def __init__(
        self,
        proxies: Sequence[fleet.Server],
        questions: Sequence[Question],
        seed: int,
        impatient: float,
    ) -> None:
        """``impatient``: share of requests whose client hangs up before the answer."""
        self.outcomes = Outcomes()
        self._proxies = proxies
        self._questions = questions
        self._random = random.Random(seed)
        self._impatient = impatient
        self._number = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._clients: list[threading.Thread] = []

    def start(self, num_clients: int) -> None:
        self._clients = [threading.Thread(target=self._client) for _ in range(num_clients)]
        for client in self._clients:
            client.start()

    def wait_for_total(self, num_requests: int) -> None:
        """Until so many requests have ended."""
        while self.outcomes.total < num_requests:
            time.sleep(0.1)

    def stop(self) -> None:
        """Wait for the requests under way; no new ones are sent."""
        self._stopping.set()
        for client in self._clients:
            client.join()

    def _client(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                self._number += 1
                number = self._number
                question = self._random.choice(self._questions)
                proxy = self._random.choice(self._proxies)
                leaves = self._random.random() < self._impatient
                patience_s = self._random.uniform(*GAVE_UP_S) if leaves else HANG_S
            self.ask(proxy, question, number, patience_s)

    def ask(
        self, proxy: fleet.Server, question: Question, number: int, patience_s: float = HANG_S
    ) -> None:
        """One request. Its prompt shares no prefix with others' in the servers' caches."""
        body = {
            **question.body,
            "model": question.reference["model"],
            "cache_salt": f"stress-{number}",
            "temperature": 0,
        }
        sent_s = time.monotonic()
        try:
            response = httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=patience_s)
        except httpx.TimeoutException:
            kind = "hung" if patience_s == HANG_S else "gone"
            self.outcomes.add(kind, sent_s, f"request {number} at {proxy.spec.name}")
            return
        except httpx.HTTPError as error:
            self.outcomes.add("wrong", sent_s, f"request {number}: no answer: {error!r}")
            return
        self.outcomes.add(*_judge(response, question, number, sent_s))


def _judge(
    response: httpx.Response, question: Question, number: int, sent_s: float
) -> tuple[str, float, str]:
    name = f"request {number}"
    if response.status_code != 200:
        try:
            message = response.json()["error"]["message"]
        except (json.JSONDecodeError, KeyError, TypeError):
            text = response.text[:200]
            return (
                "wrong",
                sent_s,
                f"{name}: status {response.status_code} without a reason: {text}",
            )
        return "error", sent_s, f"{name}: {message}"
    try:
        assert_same_generation(question.reference, response.json())
    except (AssertionError, KeyError, IndexError) as error:
        return "wrong", sent_s, f"{name}: {error}"
    return "right", sent_s, name

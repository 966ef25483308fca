"""One request to an arm of real servers: what its client saw, and what the servers' times add."""

from __future__ import annotations

import bisect
import json
import random
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import paired_ratios, quantiles
from server_arms import OUR_TIMES, Arm, ask

from vllm_llmdd_connector.trace.__main__ import read_all
from vllm_llmdd_connector.trace.merge import merge

VOCABULARY = range(1000, 40_000)


@dataclass(frozen=True)
class Sample:
    """One request, as its client and the processes saw it."""

    request_id: str
    first_token_ms: float
    inter_token_ms: float
    cpu_s: float


Samples = dict[tuple[str, int], list[Sample]]
"""By arm and number of tokens."""


@dataclass(frozen=True)
class Timed:
    """Milliseconds after P's worker had the prompt's last layer."""

    exposed_ms: float
    decode_ms: float


def measure(arm: Arm, model: Path, num_tokens: int, output_tokens: int) -> Sample:
    """A prompt of random tokens, which no prefix cache has."""
    request_id = f"bench-{uuid.uuid4()}"
    body = {
        "model": str(model),
        "prompt": random.choices(VOCABULARY, k=num_tokens),
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    with arm.turn():
        before = arm.cpu_s()
        reply = ask(arm.url, "/v1/completions", body, request_id)
        used = arm.cpu_s() - before
    if reply.first_token_s is None or len(reply.tokens) != output_tokens:
        raise SystemExit(f"{arm.name}: {len(reply.tokens)} of {output_tokens} tokens came")
    later_s = (reply.total_s - reply.first_token_s) / (output_tokens - 1)
    return Sample(request_id, 1000 * reply.first_token_s, 1000 * later_s, used)


def shifted(arms: Sequence[Arm], turn: int) -> list[Arm]:
    """A different arm begins each time, so that no arm always follows the same one."""
    shift = turn % len(arms)
    return [*arms[shift:], *arms[:shift]]


def read_times(folder: Path) -> dict[str, Timed]:
    """By the client's request id, which vLLM puts its own prefix and suffix around.

    `folder` is a Setup's `times`: this connector's traces, and what timed_nixl.py wrote.
    """
    found: dict[str, Timed] = {}
    for arm in folder.iterdir() if folder.is_dir() else ():
        found |= _of_traces(arm) if arm.name == OUR_TIMES else _of_nixl(arm)
    return found


def time_of(sample: Sample, times: dict[str, Timed]) -> Timed | None:
    """What the servers noted of this request, if they did."""
    found = (timed for request, timed in times.items() if sample.request_id in request)
    return next(found, None)


def time_fields(samples: Sequence[Sample], times: Mapping[str, Timed]) -> dict[str, Any]:
    """`ttft_ms`, and the figures of what the servers noted, if they noted any."""
    fields = {"ttft_ms": quantiles([sample.first_token_ms for sample in samples])}
    timed = [found for sample in samples if (found := time_of(sample, times))]
    if timed:
        fields["exposed_ms"] = quantiles([one.exposed_ms for one in timed])
        fields["last_layer_to_decode_ms"] = quantiles([one.decode_ms for one in timed])
    return fields


def first_token_ratio(samples: Sequence[Sample], base: Sequence[Sample]) -> dict[str, Any]:
    """To another arm's request of the same turn."""
    waits = ([sample.first_token_ms for sample in of] for of in (samples, base))
    return quantiles(paired_ratios(*waits))


def _of_traces(folder: Path) -> dict[str, Timed]:
    found = {}
    for request in merge(read_all([folder])):
        moments = request.moments
        if request.last_computed_ns is not None and {"arrival", "decode"} <= moments.keys():
            found[request.request] = _timed(request.last_computed_ns, moments)
    return found


def _of_nixl(folder: Path) -> dict[str, Timed]:
    """P computes for one request at a time: its last layer is the last before the arrival."""
    computed: list[int] = []
    moments: dict[str, dict[str, int]] = defaultdict(dict)
    for path in folder.glob("*.jsonl"):
        for text in path.read_text().splitlines():
            event: dict[str, Any] = json.loads(text)
            if event["name"] == "computed":
                computed.append(event["at_ns"])
            else:
                moments[event["request"]].setdefault(event["name"], event["at_ns"])
    computed.sort()
    found = {}
    for request, of_request in moments.items():
        before = bisect.bisect_right(computed, of_request.get("arrival", 0))
        if before and {"arrival", "decode"} <= of_request.keys():
            found[request] = _timed(computed[before - 1], of_request)
    return found


def _timed(last_ns: int, moments: dict[str, int]) -> Timed:
    arrival, decode = ((moments[name] - last_ns) / 1e6 for name in ("arrival", "decode"))
    return Timed(max(0.0, arrival), max(0.0, decode))

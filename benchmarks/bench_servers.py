"""Real vLLM servers: what a user waits for, by way of answering a prompt.

    python benchmarks/bench_servers.py [--tokens 512,2048,6000] [--alternations N] [--arms …]

The arms are one server alone (aggregated), this connector's pull and push, and vLLM's
NixlConnector. Each vLLM server has one processor to itself. Prompts are random tokens, new for
every request, so no prefix cache helps. The arms take turns within one run; meanwhile the servers
of the others are stopped. The proxy is the example's, for every arm with two servers.

A line per arm and prompt length: time to the first token, time between the later ones, processor
seconds of the vLLM servers; for this connector, from its traces, also what the transfer exposes
(P's last layer computed, to D has everything) and the time to D's first decode step. Then a line
per pair of servers for their first request, and one per arm for the processors that it uses while
nothing is asked.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import Report, quantiles
from server_arms import ARMS, Arm, Servers, Setup, ask, raise_on_terminate, start_arms

from vllm_llmdd_connector.trace.__main__ import read_all
from vllm_llmdd_connector.trace.merge import merge

BENCH = "servers"
ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
VOCABULARY = range(1000, 40_000)
WARM_UP_TOKENS = 256
IDLE_S = 10.0


@dataclass(frozen=True)
class Options:
    arms: Sequence[str]
    tokens: Sequence[int]
    alternations: int
    output_tokens: int
    max_num_batched_tokens: int
    model: Path

    def vllm_arguments(self) -> list[str]:
        longest = max(*self.tokens, WARM_UP_TOKENS) + self.output_tokens + 1
        return [
            f"--max-model-len={longest}",
            f"--max-num-batched-tokens={self.max_num_batched_tokens}",
        ]


@dataclass(frozen=True)
class Sample:
    """One request, as its client and the processes saw it."""

    request_id: str
    first_token_ms: float
    inter_token_ms: float
    cpu_s: float


def measure(arm: Arm, options: Options, num_tokens: int) -> Sample:
    request_id = f"bench-{uuid.uuid4()}"
    body = {
        "model": str(options.model),
        "prompt": random.choices(VOCABULARY, k=num_tokens),
        "max_tokens": options.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    with arm.turn():
        before = arm.cpu_s()
        reply = ask(arm.url, "/v1/completions", body, request_id)
        used = arm.cpu_s() - before
    if reply.first_token_s is None or len(reply.tokens) != options.output_tokens:
        raise SystemExit(f"{arm.name}: {len(reply.tokens)} of {options.output_tokens} tokens came")
    later_s = (reply.total_s - reply.first_token_s) / (options.output_tokens - 1)
    return Sample(request_id, 1000 * reply.first_token_s, 1000 * later_s, used)


def idle_processors(arm: Arm) -> float:
    """How many processors its vLLM servers keep busy while nothing is asked."""
    with arm.turn():
        time.sleep(2.0)  # vLLM's own queues spin for a second after the last step
        before = arm.cpu_s()
        time.sleep(IDLE_S)
        return (arm.cpu_s() - before) / IDLE_S


Samples = dict[tuple[str, int], list[Sample]]
"""By arm and number of tokens."""


def first_contact(arms: Sequence[Arm], options: Options, report: Report) -> None:
    """The first request between two servers, and the one after it; all of them are warm."""
    known: set[str] = set()
    for arm in arms:
        for alone in arm.alone():
            if alone.url not in known:
                measure(alone, options, WARM_UP_TOKENS)
        fresh = known.isdisjoint(alone.url for alone in arm.alone())
        known.update(alone.url for alone in arm.alone())
        first, second = (measure(arm, options, WARM_UP_TOKENS) for _ in range(2))
        if fresh:
            times = {"first_contact_ms": first.first_token_ms, "second_ms": second.first_token_ms}
            rounded = {name: round(value, 1) for name, value in times.items()}
            report.line(BENCH, arm.name, tokens=WARM_UP_TOKENS, **rounded)


def run(arms: Sequence[Arm], options: Options, report: Report) -> Samples:
    first_contact(arms, options, report)
    samples: Samples = defaultdict(list)
    for num_tokens in options.tokens:
        for turn in range(options.alternations):
            shift = turn % len(arms)
            for arm in [*arms[shift:], *arms[:shift]]:
                samples[arm.name, num_tokens].append(measure(arm, options, num_tokens))
            report.progress(f"{num_tokens} tokens: {turn + 1} of {options.alternations}")
    for arm in arms:
        report.line(BENCH, arm.name, idle_processors=round(idle_processors(arm), 3))
    return samples


@dataclass(frozen=True)
class Traced:
    """Milliseconds after P's worker had the prompt's last layer."""

    exposed_ms: float
    decode_ms: float


def read_traces(folder: Path) -> dict[str, Traced]:
    """By the client's request id, which vLLM puts its own prefix and suffix around."""
    found = {}
    for request in merge(read_all([folder])):
        last_ns = request.last_computed_ns
        moments = request.moments
        if last_ns is None or not {"arrival", "decode"} <= moments.keys():
            continue
        arrival, decode = ((moments[name] - last_ns) / 1e6 for name in ("arrival", "decode"))
        found[request.request] = Traced(max(0.0, arrival), max(0.0, decode))
    return found


def report_samples(
    report: Report, options: Options, samples: Samples, traced: dict[str, Traced]
) -> None:
    rows = []
    for (arm, num_tokens), of_arm in samples.items():
        base = samples.get(("aggregated", num_tokens), [])
        fields: dict[str, Any] = {
            "tokens": num_tokens,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "ttft_ms": quantiles([sample.first_token_ms for sample in of_arm]),
            "inter_token_ms": quantiles([sample.inter_token_ms for sample in of_arm]),
            "cpu_s": quantiles([sample.cpu_s for sample in of_arm]),
        }
        if base:
            pairs = zip(of_arm, base, strict=True)
            ratios = [ours.first_token_ms / theirs.first_token_ms for ours, theirs in pairs]
            fields["ttft/aggregated"] = quantiles(ratios)
        times = [
            times
            for sample in of_arm
            for request, times in traced.items()
            if sample.request_id in request
        ]
        if times:
            fields["exposed_ms"] = quantiles([t.exposed_ms for t in times])
            fields["last_layer_to_decode_ms"] = quantiles([t.decode_ms for t in times])
        report.line(BENCH, arm, **fields)
        rows.append([f"{arm} {num_tokens}", *(_p50(fields, name) for name in _COLUMNS)])
    report.table(["arm, tokens", *_COLUMNS], rows)


_COLUMNS = (
    "ttft_ms",
    "ttft/aggregated",
    "inter_token_ms",
    "cpu_s",
    "exposed_ms",
    "last_layer_to_decode_ms",
)


def _p50(fields: dict[str, Any], name: str) -> object:
    return fields[name]["p50"] if name in fields else ""


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--arms", default=",".join(ARMS), help="comma-separated; default: %(default)s")
    add("--tokens", default="512,2048,6000", help="prompt lengths; default: %(default)s")
    add("--alternations", type=int, default=9, help="default: %(default)s")
    add("--output-tokens", type=int, default=8, help="default: %(default)s")
    add("--max-num-batched-tokens", type=int, default=2048, help="default: %(default)s")
    add("--model", type=Path, default=MODEL, help="default: %(default)s")
    arguments = parser.parse_args()
    arms = arguments.arms.split(",")
    if unknown := set(arms) - set(ARMS):
        parser.error(f"unknown arms: {', '.join(sorted(unknown))}")
    if arguments.output_tokens < 2:
        parser.error("--output-tokens: the time between tokens needs two of them")
    return Options(
        arms,
        [int(word) for word in arguments.tokens.split(",")],
        arguments.alternations,
        arguments.output_tokens,
        arguments.max_num_batched_tokens,
        arguments.model,
    )


def main() -> int:
    options = parse()
    raise_on_terminate()
    report = Report()
    work = Path(tempfile.mkdtemp(prefix="bench_servers-"))
    setup = Setup(options.model, options.vllm_arguments(), work / "traces")
    with Servers(work, report.progress) as servers:
        samples = run(start_arms(servers, setup, options.arms), options, report)
    traced = read_traces(setup.traces) if setup.traces.is_dir() else {}
    report_samples(report, options, samples, traced)
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())

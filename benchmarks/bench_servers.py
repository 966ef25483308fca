"""Real vLLM servers: what a user waits for, by way of answering a prompt.

    python benchmarks/bench_servers.py [--tokens 512,2048,6000] [--alternations N] [--arms …]
    python benchmarks/bench_servers.py --quick

The arms are one server alone (aggregated), this connector's pull and push, and vLLM's
NixlConnector. Each vLLM server has one processor to itself. Prompts are random tokens, new for
every request, so no prefix cache helps. The arms take turns within one run; meanwhile the servers
of the others are stopped. The proxy is the example's, for every arm with two servers.

A line per

* `contact`, pair of servers: its first request, and the ones after it;
* `idle`, arm: the processors that its vLLM servers use while nothing is asked;
* `request`, arm and prompt length: time to the first token, mean time between the later ones,
  processor seconds of the vLLM servers; for this connector, from its traces, also what the transfer
  exposes (P's last layer computed, to D has everything) and the time to D's first decode step;
* `load`, arm and number of requests at a time: answers per second, time to the first token, time
  between tokens, processor seconds of the vLLM servers per request (see server_load.py).
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

from report import Report, paired_ratios, quantiles, rate_quantiles
from server_arms import ARMS, Arm, Servers, Setup, ask, raise_on_terminate, start_arms
from server_load import Load, LoadError, LoadSample, run_load

from vllm_llmdd_connector.trace.__main__ import read_all
from vllm_llmdd_connector.trace.merge import merge

BENCH = "servers"
ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
VOCABULARY = range(1000, 40_000)
WARM_UP_TOKENS = 256
LOAD_TOKENS, LOAD_OUTPUT_TOKENS = 512, 32


@dataclass(frozen=True)
class Options:
    arms: Sequence[str]
    tokens: Sequence[int]
    alternations: int
    output_tokens: int
    max_num_batched_tokens: int
    concurrency: Sequence[int]
    load_rounds: int
    load_requests: int
    """Of one round; at least two for each that is asked at a time."""
    warm_requests: int
    """After the first one between two servers."""
    idle_s: float
    model: Path

    def vllm_arguments(self) -> list[str]:
        alone = max(*self.tokens, WARM_UP_TOKENS) + self.output_tokens
        # A random prompt of vLLM's client may have some tokens more.
        longest = max(alone, 2 * LOAD_TOKENS + LOAD_OUTPUT_TOKENS) + 1
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


def idle_processors(arm: Arm, seconds: float) -> float:
    """How many processors its vLLM servers keep busy while nothing is asked."""
    with arm.turn():
        time.sleep(2.0)  # vLLM's own queues spin for a second after the last step
        before = arm.cpu_s()
        time.sleep(seconds)
        return (arm.cpu_s() - before) / seconds


Samples = dict[tuple[str, int], list[Sample]]
"""By arm and number of tokens."""


LoadSamples = dict[tuple[str, int], list[LoadSample]]
"""By arm and number of requests at a time."""


def shifted(arms: Sequence[Arm], turn: int) -> list[Arm]:
    """A different arm begins each time, so that no arm always follows the same one."""
    shift = turn % len(arms)
    return [*arms[shift:], *arms[:shift]]


def first_contact(arms: Sequence[Arm], options: Options, report: Report) -> None:
    """The first request between two servers, and the ones after it; alone, each one is warm."""
    known: set[str] = set()
    for arm in arms:
        for alone in arm.alone():
            if alone.url not in known:
                measure(alone, options, WARM_UP_TOKENS)
        fresh = known.isdisjoint(alone.url for alone in arm.alone())
        known.update(alone.url for alone in arm.alone())
        first = measure(arm, options, WARM_UP_TOKENS)
        later = [measure(arm, options, WARM_UP_TOKENS) for _ in range(options.warm_requests)]
        if fresh and len(arm.alone()) > 1:
            report.line(
                BENCH,
                arm.name,
                question="contact",
                **arm.settings,
                tokens=WARM_UP_TOKENS,
                first_contact_ms=round(first.first_token_ms, 1),
                warm_ms=quantiles([sample.first_token_ms for sample in later]),
            )


def run(arms: Sequence[Arm], options: Options, report: Report) -> Samples:
    first_contact(arms, options, report)
    samples: Samples = defaultdict(list)
    for num_tokens in options.tokens:
        for turn in range(options.alternations):
            for arm in shifted(arms, turn):
                samples[arm.name, num_tokens].append(measure(arm, options, num_tokens))
            report.progress(f"{num_tokens} tokens: {turn + 1} of {options.alternations}")
    for arm in arms:
        idle = round(idle_processors(arm, options.idle_s), 3)
        report.line(BENCH, arm.name, question="idle", **arm.settings, idle_processors=idle)
    return samples


def run_loads(arms: Sequence[Arm], options: Options, report: Report, folder: Path) -> LoadSamples:
    samples: LoadSamples = defaultdict(list)
    for concurrency in options.concurrency:
        requests = max(options.load_requests, 2 * concurrency)
        load = Load(concurrency, requests, LOAD_TOKENS, LOAD_OUTPUT_TOKENS)
        for turn in range(options.load_rounds):
            for arm in shifted(arms, turn):
                # New prompts each time: two arms share their servers, and those their prefix cache.
                sample = run_load(arm, load, options.model, folder, random.randrange(1 << 31))
                samples[arm.name, concurrency].append(sample)
            report.progress(f"{concurrency} at a time: {turn + 1} of {options.load_rounds}")
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


def report_loads(
    report: Report, options: Options, arms: Sequence[Arm], samples: LoadSamples
) -> None:
    settings = {arm.name: arm.settings for arm in arms}
    rows = []
    for (arm, concurrency), of_arm in samples.items():
        fields: dict[str, Any] = {
            "question": "load",
            **settings[arm],
            "concurrency": concurrency,
            "requests": max(options.load_requests, 2 * concurrency),
            "tokens": LOAD_TOKENS,
            "output_tokens": LOAD_OUTPUT_TOKENS,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "requests_per_s": rate_quantiles([sample.requests_per_s for sample in of_arm]),
            "ttft_ms": quantiles([ms for sample in of_arm for ms in sample.first_token_ms]),
            "inter_token_ms": quantiles([ms for sample in of_arm for ms in sample.inter_token_ms]),
            "cpu_s_per_request": quantiles([sample.cpu_s_per_request for sample in of_arm]),
        }
        if base := samples.get(("aggregated", concurrency)):
            rates = ([sample.requests_per_s for sample in of] for of in (of_arm, base))
            fields["requests_per_s/aggregated"] = rate_quantiles(paired_ratios(*rates))
        report.line(BENCH, arm, **fields)
        rows.append([f"{arm} {concurrency}", *(_p50(fields, name) for name in _LOAD_COLUMNS)])
    report.table(["arm, at a time", *_LOAD_COLUMNS], rows)


_LOAD_COLUMNS = (
    "requests_per_s",
    "requests_per_s/aggregated",
    "ttft_ms",
    "inter_token_ms",
    "cpu_s_per_request",
)


def report_samples(
    report: Report,
    options: Options,
    arms: Sequence[Arm],
    samples: Samples,
    traced: dict[str, Traced],
) -> None:
    settings = {arm.name: arm.settings for arm in arms}
    rows = []
    for (arm, num_tokens), of_arm in samples.items():
        fields: dict[str, Any] = {
            "question": "request",
            **settings[arm],
            "tokens": num_tokens,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "ttft_ms": quantiles([sample.first_token_ms for sample in of_arm]),
            "inter_token_ms": quantiles([sample.inter_token_ms for sample in of_arm]),
            "cpu_s": quantiles([sample.cpu_s for sample in of_arm]),
        }
        if base := samples.get(("aggregated", num_tokens)):
            waits = ([sample.first_token_ms for sample in of] for of in (of_arm, base))
            fields["ttft/aggregated"] = quantiles(paired_ratios(*waits))
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


QUICK = {"tokens": "128", "alternations": 1, "concurrency": "1,4", "load_rounds": 1}
QUICK |= {"load_requests": 2, "warm_requests": 1, "idle_s": 2.0}


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--arms", default=",".join(ARMS), help="comma-separated; default: %(default)s")
    add("--tokens", default="512,2048,6000", help="prompt lengths; default: %(default)s")
    add("--alternations", type=int, default=5, help="default: %(default)s")
    add("--output-tokens", type=int, default=8, help="default: %(default)s")
    add("--max-num-batched-tokens", type=int, default=2048, help="default: %(default)s")
    add("--concurrency", default="1,4,8", help="requests at a time; default: %(default)s")
    add("--load-rounds", type=int, default=3, help="0: no load; default: %(default)s")
    add("--load-requests", type=int, default=8, help="of a round; default: %(default)s")
    add("--warm-requests", type=int, default=5, help="default: %(default)s")
    add("--idle-s", type=float, default=10.0, help="default: %(default)s")
    add("--model", type=Path, default=MODEL, help="default: %(default)s")
    add("--quick", action="store_true", help="one of each; the figures mean nothing")
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
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
        [int(word) for word in arguments.concurrency.split(",")],
        arguments.load_rounds,
        arguments.load_requests,
        arguments.warm_requests,
        arguments.idle_s,
        arguments.model,
    )


def main() -> int:
    options = parse()
    raise_on_terminate()
    report = Report()
    work = Path(tempfile.mkdtemp(prefix="bench_servers-"))
    setup = Setup(options.model, options.vllm_arguments(), work / "traces")
    failure = ""
    with Servers(work, report.progress) as servers:
        arms = start_arms(servers, setup, options.arms)
        samples = run(arms, options, report)
        try:
            report_loads(report, options, arms, run_loads(arms, options, report, work))
        except LoadError as error:
            failure = str(error)
    # The servers write the last of their traces when they end.
    traced = read_traces(setup.traces) if setup.traces.is_dir() else {}
    report_samples(report, options, arms, samples, traced)
    if failure:
        report.progress(f"{failure}\nlogs are in {work}")
        return 1
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Real vLLM servers: what a user waits for, by way of answering a prompt.

    python benchmarks/bench_servers.py [--lengths 512:9,2048:9,6000:9] [--arms …]
    python benchmarks/bench_servers.py --quick

The arms are one server alone (aggregated), this connector's pull and push, and vLLM's NixlConnector
and NixlPushConnector. Each vLLM server has one processor to itself. Prompts are random tokens, new
for every request, so no prefix cache helps. The arms take turns within one run; meanwhile the
servers of the others are stopped. The proxy is the example's for every arm with two servers; for
NixlPushConnector it tells D what that wants to know (nixl_push_proxy.py).

A line per

* `idle`, arm: processor time of its vLLM servers while nothing is asked, and of the threads of a
  worker (see server_idle.py);
* `request`, arm and prompt length: time to the first token, mean time between the later ones,
  processor seconds of the vLLM servers; of two servers also what the transfer exposes (P's last
  layer computed, to D has everything) and the time to D's first decode step;
* `load`, arm and number of requests at a time: answers per second, time to the first token, time
  between tokens, processor seconds of the vLLM servers per request (see server_load.py).
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import Report, paired_ratios, quantiles, rate_quantiles
from server_arms import (
    ARMS,
    Arm,
    Servers,
    Setup,
    length_arguments,
    raise_on_terminate,
    start_arms,
)
from server_idle import idle_windows
from server_load import Load, LoadError, LoadSample, load_client
from server_options import ServerOptions
from server_requests import (
    Sample,
    Samples,
    Timed,
    first_token_ratio,
    measure,
    read_times,
    shifted,
    time_fields,
)

BENCH = "servers"
WARM_UP_TOKENS = 256
LOAD_TOKENS, LOAD_OUTPUT_TOKENS = 512, 32


@dataclass(frozen=True)
class Options:
    arms: Sequence[str]
    lengths: dict[int, int]
    """Turns by prompt length."""
    output_tokens: int
    max_num_batched_tokens: int
    concurrency: Sequence[int]
    load_rounds: int
    load_requests: int
    """Of one round; at least two for each that is asked at a time."""
    idle_windows: int
    idle_s: float
    """Of one window."""
    model: Path

    def vllm_arguments(self) -> list[str]:
        alone = max(*self.lengths, WARM_UP_TOKENS) + self.output_tokens
        # A random prompt of vLLM's client may have some tokens more.
        longest = max(alone, 2 * LOAD_TOKENS + LOAD_OUTPUT_TOKENS) + 1
        return length_arguments(longest, self.max_num_batched_tokens)

    def measure(self, arm: Arm, num_tokens: int) -> Sample:
        return measure(arm, self.model, num_tokens, self.output_tokens)


LoadSamples = dict[tuple[str, int], list[LoadSample]]
"""By arm and number of requests at a time."""


def run(arms: Sequence[Arm], options: Options, report: Report) -> Samples:
    for arm in arms:
        options.measure(arm, WARM_UP_TOKENS)
    samples: Samples = defaultdict(list)
    for num_tokens, turns in options.lengths.items():
        for turn in range(turns):
            for arm in shifted(arms, turn):
                samples[arm.name, num_tokens].append(options.measure(arm, num_tokens))
            report.progress(f"{num_tokens} tokens: {turn + 1} of {turns}")
    return samples


def report_idle(arms: Sequence[Arm], options: Options, report: Report) -> None:
    found = idle_windows(arms, options.idle_windows, options.idle_s)
    base = found.get("aggregated")
    for arm in arms:
        windows = found[arm.name]
        fields: dict[str, Any] = {
            "idle_percent": quantiles([window.servers for window in windows]),
            "worker_main_percent": quantiles([window.main for window in windows]),
            "worker_others_percent": quantiles([window.others for window in windows]),
        }
        if base and arm.name != "aggregated":
            more = [ours.others - alone.others for ours, alone in zip(windows, base, strict=True)]
            fields["others_over_aggregated_percent"] = quantiles(more)
        report.line(BENCH, arm.name, question="idle", **arm.settings, **fields)


def run_loads(arms: Sequence[Arm], options: Options, report: Report, folder: Path) -> LoadSamples:
    samples: LoadSamples = defaultdict(list)
    if not options.load_rounds:
        return samples
    with load_client(folder) as client:
        for concurrency in options.concurrency:
            requests = max(options.load_requests, 2 * concurrency)
            load = Load(concurrency, requests, LOAD_TOKENS, LOAD_OUTPUT_TOKENS)
            for turn in range(options.load_rounds):
                for arm in shifted(arms, turn):
                    # New prompts each time: two arms share their servers and prefix caches.
                    seed = random.randrange(1 << 31)
                    sample = client.run(arm, load, options.model, seed)
                    samples[arm.name, concurrency].append(sample)
                report.progress(f"{concurrency} at a time: {turn + 1} of {options.load_rounds}")
    return samples


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
    timed: dict[str, Timed],
) -> None:
    settings = {arm.name: arm.settings for arm in arms}
    rows = []
    for (arm, num_tokens), of_arm in samples.items():
        fields: dict[str, Any] = {
            "question": "request",
            **settings[arm],
            "tokens": num_tokens,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            **time_fields(of_arm, timed),
            "inter_token_ms": quantiles([sample.inter_token_ms for sample in of_arm]),
            "cpu_s": quantiles([sample.cpu_s for sample in of_arm]),
        }
        if base := samples.get(("aggregated", num_tokens)):
            fields["ttft/aggregated"] = first_token_ratio(of_arm, base)
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


QUICK = {"lengths": "128:1", "concurrency": "1,4", "load_rounds": 1, "load_requests": 2}
QUICK |= {"idle_windows": 1, "idle_s": 1.0}


def parse() -> Options:
    parser = ServerOptions(__doc__, ARMS, QUICK)
    parser.add_lengths("512:9,2048:9,6000:9")
    add = parser.add
    add("--output-tokens", type=int, default=8, help="default: %(default)s")
    add("--max-num-batched-tokens", type=int, default=2048, help="default: %(default)s")
    add("--concurrency", default="4,8", help="requests at a time; default: %(default)s")
    add("--load-rounds", type=int, default=9, help="0: no load; default: %(default)s")
    add("--load-requests", type=int, default=8, help="of a round; default: %(default)s")
    add("--idle-windows", type=int, default=9, help="default: %(default)s")
    add("--idle-s", type=float, default=2.0, help="of a window; default: %(default)s")
    read = parser.read()
    if read.output_tokens < 2:
        parser.error("--output-tokens: the time between tokens needs two of them")
    return Options(
        read.arms,
        read.lengths,
        read.output_tokens,
        read.max_num_batched_tokens,
        [int(word) for word in read.concurrency.split(",")],
        read.load_rounds,
        read.load_requests,
        read.idle_windows,
        read.idle_s,
        read.model,
    )


def main() -> int:
    options = parse()
    raise_on_terminate()
    report = Report()
    work = Path(tempfile.mkdtemp(prefix="bench_servers-"))
    setup = Setup(options.model, options.vllm_arguments(), work / "times")
    failure = ""
    with Servers(work, report.progress) as servers:
        arms = start_arms(servers, setup, options.arms)
        samples = run(arms, options, report)
        report_idle(arms, options, report)
        try:
            report_loads(report, options, arms, run_loads(arms, options, report, work))
        except LoadError as error:
            failure = str(error)
    # The servers write the last of their traces when they end.
    report_samples(report, options, arms, samples, read_times(setup.times))
    if failure:
        report.progress(f"{failure}\nlogs are in {work}")
        return 1
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Real vLLM servers with a network between them: what a request waits for at 1 Gbit/s.

    python benchmarks/bench_network.py [--lengths 512:9,…] [--mbit 1000] [--arms pull,…]
    python benchmarks/bench_network.py --quick

P runs in one network namespace and D in another, joined by a veth pair that the kernel holds to the
rate (netns.py). The arms are this connector's pull and push (`transport: nixl`) and vLLM's
NixlConnector and NixlPushConnector, all over TCP (UCX_TLS=tcp), with the same steps of P, one
processor per server, new random prompts, in turns within one run.

A line per

* `link`, arm: MB/s of a plain TCP stream and of `pull_blocks` over the same link, turn by turn;
* `request`, arm and prompt length: time to the first token, and from P's last computed layer until
  D has everything and until D's first decode step; `link_ms` is what the whole prompt's KV cache
  takes at the stream's rate.

A line is written only if the veth has carried the KV cache each time. Where this machine cannot
make such a link, one sentence says so, there are no lines, and the exit status is 77.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from netns import TRANSFER_NETWORK, Side, UnavailableError, shaped_link
from network_rate import SETTINGS, Rates, link_rates
from report import CANNOT_RUN, Report, paired_ratios, quantiles, rate_quantiles
from server_arms import (
    NIXL_ARMS,
    Arm,
    Place,
    Servers,
    Setup,
    length_arguments,
    raise_on_terminate,
    start_arms,
)
from server_options import ServerOptions
from server_requests import (
    Sample,
    Timed,
    first_token_ratio,
    measure,
    read_times,
    shifted,
    time_fields,
    time_of,
)

from vllm_llmdd_connector.datadist.nixl import find_nixl_library

BENCH = "network"
ARMS = ("pull", "push", *NIXL_ARMS)
REFERENCE = "nixl"
CPUS = ("0", "1")
WARM_UP_TOKENS, OUTPUT_TOKENS = 256, 3
KV_ELEMENT_BYTES = 2
"""Servers run in bfloat16."""
MIB = 1 << 20
OPTIONS = {"transport": "nixl", "allow_plaintext": True, "allowed_peers": [TRANSFER_NETWORK]}
LOCAL_ONLY = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
"""For what a server's own processes say to each other."""


@dataclass(frozen=True)
class Options:
    arms: Sequence[str]
    lengths: dict[int, int]
    """Turns by prompt length."""
    link_turns: int
    mbit: int
    max_num_batched_tokens: int
    model: Path

    def vllm_arguments(self) -> list[str]:
        longest = max(*self.lengths, WARM_UP_TOKENS) + OUTPUT_TOKENS + 1
        return length_arguments(longest, self.max_num_batched_tokens)


@dataclass
class Case:
    """One arm and prompt length."""

    samples: list[Sample] = field(default_factory=list)
    link_bytes: list[float] = field(default_factory=list)
    """What came in at D's end of the link during each request."""


Cases = dict[tuple[str, int], Case]
"""By arm and prompt length."""


def kv_bytes_per_token(model: Path) -> int:
    """Keys and values of all layers."""
    config = json.loads((model / "config.json").read_text())
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    return int(2 * heads * head_size * KV_ELEMENT_BYTES)


def place(side: Side, cpu: str) -> Place:
    environment = {**side.environment, **LOCAL_ONLY}
    return Place(cpu, side.http_host, side.transfer_host, side.wrapper, environment)


def run(arms: Sequence[Arm], options: Options, sink: Side, report: Report) -> Cases:
    for arm in arms:
        measure(arm, options.model, WARM_UP_TOKENS, OUTPUT_TOKENS)
    cases: Cases = {}
    for num_tokens, turns in options.lengths.items():
        for turn in range(turns):
            for arm in shifted(arms, turn):
                before = sink.received_bytes()
                sample = measure(arm, options.model, num_tokens, OUTPUT_TOKENS)
                case = cases.setdefault((arm.name, num_tokens), Case())
                case.samples.append(sample)
                case.link_bytes.append(float(sink.received_bytes() - before))
            report.progress(f"{num_tokens} tokens: {turn + 1} of {turns}")
    return cases


def measure_link(options: Options, sides: tuple[Side, Side], report: Report) -> Rates | None:
    """The rates of the last size of block; None where the link has not carried what was pulled."""
    found: Rates | None = None
    with link_rates(*sides, CPUS) as link:
        for block_bytes in SETTINGS.block_bytes:
            rates = link.measure(block_bytes, options.link_turns)
            if not _crossed(report, f"pull_blocks of {block_bytes}", rates.link_bytes, _BATCH):
                return None
            found = rates
            case = {
                "question": "link",
                "mbit": options.mbit,
                "block_bytes": block_bytes,
                "batch_mib": SETTINGS.batch_mib,
            }
            report.line(BENCH, "tcp", **case, mb_per_s=rate_quantiles(rates.tcp))
            report.line(
                *(BENCH, "pull"),
                **case,
                mb_per_s=rate_quantiles(rates.pull),
                link_bytes=quantiles(rates.link_bytes),
                **{"rate/tcp": rate_quantiles(paired_ratios(rates.pull, rates.tcp))},
            )
    return found


_BATCH = SETTINGS.batch_mib * MIB


def _crossed(report: Report, what: str, seen: Sequence[float], wanted: int) -> bool:
    """Whether the link has carried at least that each time."""
    if min(seen) >= wanted:
        return True
    report.progress(
        f"{what}: no line: {min(seen):,.0f} bytes came over the link, its data has {wanted:,}; "
        "does the transfer take another way?"
    )
    return False


def report_cases(
    report: Report,
    options: Options,
    arms: Sequence[Arm],
    cases: Cases,
    times: dict[str, Timed],
    mb_per_s: float,
) -> bool:
    """Whether every case has its line."""
    settings = {arm.name: arm.settings for arm in arms}
    token_bytes = kv_bytes_per_token(options.model)
    rows, is_whole = [], True
    for (arm, num_tokens), case in cases.items():
        kv_bytes = num_tokens * token_bytes
        if not _crossed(report, f"{arm}, {num_tokens} tokens", case.link_bytes, kv_bytes):
            is_whole = False
            continue
        fields: dict[str, Any] = {
            "question": "request",
            **settings[arm],
            "tokens": num_tokens,
            "mbit": options.mbit,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "kv_bytes": kv_bytes,
            "link_ms": round(kv_bytes / mb_per_s / 1000, 1),
            "link_bytes": quantiles(case.link_bytes),
            **time_fields(case.samples, times),
        }
        if base := cases.get((REFERENCE, num_tokens)):
            fields |= ratios(case.samples, base.samples, times)
        report.line(BENCH, arm, **fields)
        cells = [fields[name]["p50"] if name in fields else "" for name in _COLUMNS]
        rows.append([f"{arm} {num_tokens}", *cells])
    report.table(["arm, tokens", *_COLUMNS], rows)
    return is_whole


_COLUMNS = (
    "ttft_ms",
    "exposed_ms",
    "last_layer_to_decode_ms",
    f"ttft/{REFERENCE}",
    f"last_layer_to_decode/{REFERENCE}",
)


def ratios(
    samples: Sequence[Sample], base: Sequence[Sample], times: dict[str, Timed]
) -> dict[str, Any]:
    """To the reference arm's request of the same turn."""
    fields = {f"ttft/{REFERENCE}": first_token_ratio(samples, base)}
    pairs = [
        (ours.decode_ms, theirs.decode_ms)
        for ours, theirs in (
            (time_of(one, times), time_of(other, times))
            for one, other in zip(samples, base, strict=True)
        )
        if ours and theirs
    ]
    if pairs:
        fields[f"last_layer_to_decode/{REFERENCE}"] = quantiles(
            paired_ratios(*map(list, zip(*pairs, strict=True)))
        )
    return fields


QUICK = {"lengths": "512:1", "link_turns": 2}


def parse() -> Options:
    parser = ServerOptions(__doc__, ARMS, QUICK)
    parser.add_lengths("512:9,2048:9,6000:9")
    add = parser.add
    add("--link-turns", type=int, default=15, help="of stream and pull; default: %(default)s")
    add("--mbit", type=int, default=1000, help="rate of the link; default: %(default)s")
    add("--max-num-batched-tokens", type=int, default=512, help="default: %(default)s")
    read = parser.read()
    return Options(
        read.arms,
        read.lengths,
        read.link_turns,
        read.mbit,
        read.max_num_batched_tokens,
        read.model,
    )


def bench(options: Options, sides: tuple[Side, Side], report: Report) -> int:
    source, sink = sides
    rates = measure_link(options, sides, report)
    if rates is None:
        return 1
    work = Path(tempfile.mkdtemp(prefix="bench_network-"))
    places = {"prefill": place(source, CPUS[0]), "decode": place(sink, CPUS[1])}
    setup = Setup(
        options.model, options.vllm_arguments(), work / "times", **places, options=OPTIONS
    )
    with ExitStack() as on_failure:
        on_failure.callback(report.progress, f"logs are in {work}")
        with Servers(work, report.progress) as servers:
            arms = start_arms(servers, setup, options.arms)
            cases = run(arms, options, sink, report)
        # The servers write the last of their traces when they end.
        times = read_times(setup.times)
        is_whole = report_cases(report, options, arms, cases, times, median(rates.tcp))
        if is_whole:
            on_failure.pop_all()
            shutil.rmtree(work)
    return 0 if is_whole else 1


def main() -> int:
    options = parse()
    raise_on_terminate()
    report = Report()
    if not find_nixl_library() or importlib.util.find_spec("nixl") is None:
        report.progress("bench_network: NIXL is not installed; install extra `nixl`")
        return CANNOT_RUN
    try:
        with shaped_link(options.mbit) as sides:
            return bench(options, sides, report)
    except UnavailableError as error:
        report.progress(f"bench_network: {error}")
        return CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main())

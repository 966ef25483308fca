"""The sections of docs/performance.md about real servers; see record_tables.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from record_lines import Line, columns_table, last, ordered, samples_text, select, size_text, values


def requests(lines: Sequence[Line]) -> Iterator[str]:
    asked = select(lines, question="request")
    columns = {
        "ttft_ms": "first token, ms",
        "ttft/aggregated": "of one server's",
        "inter_token_ms": "between tokens, ms",
        "cpu_s": "processor s",
        "exposed_ms": "exposed, ms",
        "last_layer_to_decode_ms": "last layer to decode, ms",
    }
    if not asked:
        return
    yield "One request at a time, nothing else:\n"
    yield from columns_table("prompt, arm", _by_prompt(asked), {**columns, "n": "n"})
    yield from _settings(asked)


def _by_prompt(lines: Sequence[Line]) -> list[tuple[str, Line | None]]:
    """Requests by prompt length and arm, each with its number of samples."""
    found = [
        (f"{tokens:,} tokens, {arm}", last(lines, tokens=tokens, arm=arm))
        for tokens in ordered(lines, "tokens")
        for arm in values(lines, "arm")
    ]
    return [(title, line and {**line, "n": line["ttft_ms"]["n"]}) for title, line in found]


def network(lines: Sequence[Line]) -> Iterator[str]:
    rates, asked = (select(lines, question=question) for question in ("link", "request"))
    if rates:
        yield (
            f"A link of {rates[0]['mbit']:,} Mbit/s, {rates[0]['batch_mib']} MiB at a time "
            f"({samples_text(rates, 'mb_per_s')}):\n"
        )
        columns = {"mb_per_s": "MB/s", "rate/tcp": "of the stream's"}
        kinds = {"tcp": "TCP stream", "pull": "pull_blocks"}
        rows = [
            (f"{kinds[line['arm']]}, blocks of {size_text(line['block_bytes'])}", line)
            for line in rates
        ]
        yield from columns_table("", rows, columns)
    if asked:
        yield (
            f"\nOne request at a time over it, steps of {asked[0]['max_num_batched_tokens']:,} "
            "tokens; *of nixl's* is turn by turn:\n"
        )
        columns = {
            "ttft_ms": "first token, ms",
            "ttft/nixl": "of nixl's",
            "link_ms": "whole KV at the stream's rate, ms",
            "exposed_ms": "exposed, ms",
            "last_layer_to_decode_ms": "last layer to decode, ms",
            "last_layer_to_decode/nixl": "of nixl's",
            "n": "n",
        }
        yield from columns_table("prompt, arm", _by_prompt(asked), columns)
        yield from _settings(asked)


def loads(lines: Sequence[Line]) -> Iterator[str]:
    asked = select(lines, question="load")
    columns = {
        "requests_per_s": "requests/s",
        "requests_per_s/aggregated": "of one server's",
        "ttft_ms": "first token, ms",
        "inter_token_ms": "between tokens, ms",
        "cpu_s_per_request": "processor s per request",
    }
    if not asked:
        return
    first = asked[0]
    yield (
        f"A closed loop of `vllm bench serve`, prompts of {first['tokens']} random tokens, "
        f"{first['output_tokens']} tokens out (rounds: {samples_text(asked, 'requests_per_s')}; "
        f"requests: {samples_text(asked, 'ttft_ms')}):\n"
    )
    rows = [
        (f"{at_a_time}, {arm}", last(asked, concurrency=at_a_time, arm=arm))
        for at_a_time in ordered(asked, "concurrency")
        for arm in values(asked, "arm")
    ]
    yield from columns_table("at a time, arm", rows, columns)


def contacts(lines: Sequence[Line]) -> Iterator[str]:
    if not lines:
        return
    yield (
        f"First token of the first request between two servers, {lines[0]['tokens']} tokens "
        f"({samples_text(lines, 'first_contact_ms')}), of the ones after it "
        f"({samples_text(lines, 'warm_ms')}), and the difference turn by turn:\n"
    )
    columns = {
        "first_contact_ms": "first, ms",
        "warm_ms": "later, ms",
        "over_warm_ms": "difference, ms",
    }
    yield from columns_table("arm", [(line["arm"], line) for line in lines], columns)


def idle(lines: Sequence[Line]) -> Iterator[str]:
    windows = select(lines, question="idle")
    if not windows:
        return
    yield (
        "Percent of a processor while nothing is asked, of all processes of an arm's vLLM "
        "servers, and of the threads of a worker (of P's and D's whichever has more): the main "
        "one, and all others, among which are the connector's; *more* is turn by turn "
        f"({samples_text(windows, 'idle_percent')}):\n"
    )
    columns = {
        "idle_percent": "servers",
        "worker_main_percent": "main thread",
        "worker_others_percent": "other threads",
        "others_over_aggregated_percent": "more than one server's",
    }
    yield from columns_table("arm", [(line["arm"], line) for line in windows], columns)


def _settings(lines: Sequence[Line]) -> Iterator[str]:
    """What the arms that have a choice were set to."""
    for arm in values(lines, "arm"):
        for words in values(select(lines, arm=arm), "settings"):
            yield f"\n`{arm}` ran with {words or 'default settings'}."

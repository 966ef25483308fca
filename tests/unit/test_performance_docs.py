"""docs/performance.md and what it is made from: result lines, tables, the choice of figures."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.bench_modules import BENCHMARKS, bench_modules
from rich.console import Console

MODULES = ("report", "record_lines", "record_tables", "record_plots", "figures", "record")
RATE = {"p50": 4.567, "p99": 1.234, "n": 100}
FEW = {"p50": 2.0, "p99": 1.0, "n": 3}


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, Any]]:
    with bench_modules(*MODULES) as modules:
        yield modules


def transfer_line(arm: str, figure: str = "gb_per_s", **fields: Any) -> dict[str, Any]:
    case = {"op": "read", "pattern": "scattered", "block_bytes": 16384, "working_set_mib": 512}
    return {"bench": "transfer", "arm": arm, **case, figure: RATE, **fields}


def server_line(arm: str, question: str, **fields: Any) -> dict[str, Any]:
    return {"bench": "servers", "arm": arm, "question": question, **fields}


def network_line(arm: str, tokens: int = 512, **fields: Any) -> dict[str, Any]:
    case = {"question": "request", "tokens": tokens, "mbit": 1000, "max_num_batched_tokens": 512}
    times = {"ttft_ms": FEW, "link_ms": 94.5, "last_layer_to_decode_ms": FEW}
    return {"bench": "network", "arm": arm, **case, **times, **fields}


def overlap_line(arm: str, tokens: int, compute: str, exposed_ms: float) -> dict[str, Any]:
    return {
        "bench": "layer_overlap",
        "arm": arm,
        "compute": compute,
        "rate_gb_per_s": 2.0,
        "tokens": tokens,
        "layers": 30,
        "compute_ms": 2.0,
        "chunk_tokens": 8192,
        "layer_transfer_ms": 0.123,
        "exposed_ms": {**FEW, "p50": exposed_ms},
        "hook_us": RATE,
    }


class TestNumbers:
    def test_pairs_are_divided_turn_by_turn(self, bench: dict[str, Any]) -> None:
        report = bench["report"]
        ratios = report.paired_ratios([10.0, 1.0, 6.0], [5.0, 2.0, 2.0])
        assert ratios == [2.0, 0.5, 3.0]
        # Each sample's own partner, not median over median, which would be 3.
        assert report.quantiles(ratios)["p50"] == 2.0

    def test_pairs_of_unequal_number_are_refused(self, bench: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            bench["report"].paired_ratios([1.0], [1.0, 2.0])

    @pytest.mark.parametrize(("count", "text"), [(99, "4.57"), (100, "4.57 (1.23)")])
    def test_p99_needs_a_hundred_samples(
        self, bench: dict[str, Any], count: int, text: str
    ) -> None:
        line = {"gb_per_s": {**RATE, "n": count}}
        assert bench["record_lines"].figure_text(line, "gb_per_s") == text

    def test_what_is_missing_is_empty(self, bench: dict[str, Any]) -> None:
        figure_text = bench["record_lines"].figure_text
        assert figure_text(None, "ttft_ms") == figure_text({}, "ttft_ms") == ""

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0.01234, "0.0123"), (12.34, "12.3"), (99.96, "100"), (23312.4, "23,312")],
    )
    def test_numbers_have_three_digits(
        self, bench: dict[str, Any], value: float, text: str
    ) -> None:
        assert bench["record_lines"].number(value) == text

    def test_sizes_have_their_unit(self, bench: dict[str, Any]) -> None:
        sizes = [bench["record_lines"].size_text(size) for size in (512, 98304, 2 << 20)]
        assert sizes == ["512 B", "96 KiB", "2 MiB"]

    def test_number_of_samples_is_named(self, bench: dict[str, Any]) -> None:
        samples_text = bench["record_lines"].samples_text
        assert samples_text([{"us": RATE}], "us") == "n 100"
        assert samples_text([{"us": RATE}, {"us": FEW}], "us") == "n 3 to 100"


class TestReading:
    def test_lines_of_a_file(self, bench: dict[str, Any], tmp_path: Path) -> None:
        path = tmp_path / "day.jsonl"
        path.write_text(json.dumps(transfer_line("cma")) + "\n")
        assert bench["record_lines"].read_lines(path) == [transfer_line("cma")]

    @pytest.mark.parametrize("text", ["{", "[]", '{"arm": "cma"}'])
    def test_line_that_is_no_result_is_named(
        self, bench: dict[str, Any], tmp_path: Path, text: str
    ) -> None:
        path = tmp_path / "day.jsonl"
        path.write_text(f"{json.dumps(transfer_line('cma'))}\n{text}\n")
        with pytest.raises(ValueError, match=r"day\.jsonl, line 2"):
            bench["record_lines"].read_lines(path)

    def test_later_line_of_a_case_counts(self, bench: dict[str, Any]) -> None:
        early, late = transfer_line("cma"), transfer_line("cma", gb_per_s=FEW)
        assert bench["record_lines"].last([early, late], arm="cma", op="read") is late


class TestTables:
    def text(self, bench: dict[str, Any], lines: list[dict[str, Any]]) -> str:
        titles = bench["record_plots"].titles(lines)
        return "\n".join(bench["record_tables"].generated(lines, titles))

    def test_no_lines_no_results(self, bench: dict[str, Any]) -> None:
        assert "No results yet" in self.text(bench, [])

    def test_arms_are_those_of_the_lines(self, bench: dict[str, Any]) -> None:
        lines = [transfer_line("memcpy"), transfer_line("some-new-arm", gb_per_s=FEW)]
        text = self.text(bench, lines)
        assert "|  | memcpy | some-new-arm |" in text
        assert "| read, scattered, 16 KiB | 4.57 (1.23) | 2 |" in text
        assert "(n 3 to 100)" in text
        assert "nixl" not in text

    def test_ratios_have_a_table_of_their_own(self, bench: dict[str, Any]) -> None:
        lines = [transfer_line("cma"), transfer_line("cma/nixl", "ratio")]
        text = self.text(bench, lines)
        assert "|  | cma |" in text
        assert "|  | cma/nixl |" in text

    def test_working_sets_are_compared_where_all_were_tried(self, bench: dict[str, Any]) -> None:
        lines = [
            transfer_line("cma"),
            transfer_line("cma", block_bytes=4096),
            transfer_line("cma", working_set_mib=1),
        ]
        text = self.text(bench, lines)
        assert "512 MiB of memory" in text
        assert "| read, 16 KiB, 1 MiB |" in text
        assert "| read, 4 KiB, 512 MiB |" not in text

    def test_tcp_has_a_section_of_its_own(self, bench: dict[str, Any]) -> None:
        tcp = {"bench": "transfer-tcp"}
        lines = [
            transfer_line("nixl", **tcp),
            transfer_line("nixl-transport/nixl", "ratio", **tcp),
        ]
        text = self.text(bench, lines)
        assert "### Blocks over TCP" in text
        assert "|  | nixl |" in text
        assert "|  | nixl-transport/nixl |" in text
        assert "### Blocks between two processes" not in text

    def test_benches_that_were_not_run_have_no_section(self, bench: dict[str, Any]) -> None:
        text = self.text(bench, [transfer_line("cma")])
        assert "### Blocks between two processes" in text
        assert "Real servers" not in text
        assert "Hooks" not in text

    def test_push_and_pull_stand_side_by_side(self, bench: dict[str, Any]) -> None:
        lines = [
            overlap_line("push", 512, "sleep", 1.2),
            overlap_line("pull", 512, "sleep", 2.6),
            overlap_line("pull", 4096, "sleep", 9.7),
        ]
        text = self.text(bench, lines)
        assert "| 2 GB/s, 512 tokens, sleep | 0.123 | 1.2 | 2.6 | 4.57 (1.23) |" in text
        assert "| 2 GB/s, 4,096 tokens, sleep | 0.123 |  | 9.7 |  |" in text

    def test_servers_have_ratios_and_settings(self, bench: dict[str, Any]) -> None:
        lines = [
            server_line("aggregated", "request", tokens=512, ttft_ms=FEW),
            server_line(
                "nixl",
                "request",
                tokens=512,
                ttft_ms=FEW,
                settings="num_threads=0",
                **{"ttft/aggregated": FEW},
            ),
        ]
        text = self.text(bench, lines)
        assert "| 512 tokens, aggregated | 2 |  | 3 |" in text
        assert "| 512 tokens, nixl | 2 | 2 | 3 |" in text
        assert "`nixl` ran with num_threads=0." in text
        assert "exposed, ms" not in text

    def test_first_contact_has_its_difference(self, bench: dict[str, Any]) -> None:
        times = {"first_contact_ms": RATE, "warm_ms": {**FEW, "n": 15}, "over_warm_ms": FEW}
        text = self.text(bench, [{"bench": "contact", "arm": "pull", "tokens": 256, **times}])
        assert "two servers, 256 tokens (n 100), of the ones after it (n 15)" in text
        assert "| pull | 4.57 (1.23) | 2 | 2 |" in text

    def test_idle_servers(self, bench: dict[str, Any]) -> None:
        lines = [
            server_line("aggregated", "idle", idle_percent=FEW, worker_others_percent=FEW),
            server_line(
                *("nixl", "idle"),
                idle_percent={**FEW, "p50": 190.0},
                worker_others_percent={**FEW, "p50": 99.0},
                others_over_aggregated_percent={**FEW, "p50": 97.0},
            ),
        ]
        text = self.text(bench, lines)
        assert "| aggregated | 2 | 2 |  |" in text
        assert "| nixl | 190 | 99 | 97 |" in text

    def test_network_has_its_link_and_its_requests(self, bench: dict[str, Any]) -> None:
        link = {"bench": "network", "question": "link", "mbit": 1000, "block_bytes": 98304}
        link |= {"batch_mib": 48, "mb_per_s": FEW}
        lines = [
            {**link, "arm": "tcp"},
            {**link, "arm": "pull", "rate/tcp": {**FEW, "p50": 0.97}},
            network_line("nixl"),
            network_line("push", **{"ttft/nixl": {**FEW, "p50": 0.5}}),
        ]
        text = self.text(bench, lines)
        assert "A link of 1,000 Mbit/s, 48 MiB at a time (n 3)" in text
        assert "| TCP stream, blocks of 96 KiB | 2 |  |" in text
        assert "| pull_blocks, blocks of 96 KiB | 2 | 0.97 |" in text
        assert "| 512 tokens, nixl | 2 |  | 94.5 | 2 | 3 |" in text
        assert "| 512 tokens, push | 2 | 0.5 | 94.5 | 2 | 3 |" in text

    def test_checksums_have_their_share(self, bench: dict[str, Any]) -> None:
        shape = {"bench": "integrity", "blocks": 512, "layers": 30, "block_bytes": 32768}
        lines = [
            {**shape, "arm": "hash", "gb_per_s": FEW},
            {**shape, "arm": "full", "flow": "push", "transfer_ms": FEW, "added": FEW},
        ]
        text = self.text(bench, lines)
        assert "512 blocks, 30 layers of 32 KiB" in text
        assert "| all, hash |  |  | 2 |" in text
        assert "| push, full | 2 | 2 |  |" in text

    def test_load_of_the_machine_is_told(self, bench: dict[str, Any]) -> None:
        line = transfer_line("cma", run={"began": "2026-01-02T03:04:05+00:00", "load": 0.25})
        assert "load before each bench 0.25 to 0.25" in self.text(bench, [line])


class TestFigures:
    def test_only_what_has_lines_is_drawn(self, bench: dict[str, Any]) -> None:
        chosen = bench["record_plots"].chosen([transfer_line("cma"), transfer_line("memcpy")])
        assert list(chosen) == ["transfer"]
        (panel,) = chosen["transfer"]
        assert panel.series == {"cma": [(16384.0, 4.567)], "memcpy": [(16384.0, 4.567)]}

    def test_points_go_by_x(self, bench: dict[str, Any]) -> None:
        lines = [overlap_line("push", tokens, "hold", tokens / 512) for tokens in (4096, 512)]
        (panel,) = bench["record_plots"].chosen(lines)["exposed"]
        assert panel.series == {"push": [(512.0, 1.0), (4096.0, 8.0)]}

    def test_network_shows_what_the_link_would_take(self, bench: dict[str, Any]) -> None:
        lines = [network_line("pull"), network_line("push"), network_line("push", 2048)]
        waits, added = bench["record_plots"].chosen(lines)["network"]
        assert waits.series == {"pull": [(512.0, 2.0)], "push": [(512.0, 2.0), (2048.0, 2.0)]}
        assert added.series["whole KV at the link's rate"] == [(512, 94.5), (2048, 94.5)]

    def test_png_is_written_and_an_old_one_removed(
        self, bench: dict[str, Any], tmp_path: Path
    ) -> None:
        (tmp_path / "ttft.png").write_bytes(b"of earlier results")
        paths = bench["figures"].draw_all([transfer_line("cma")], tmp_path)
        assert [path.name for path in paths] == ["transfer.png"]
        assert paths[0].read_bytes().startswith(b"\x89PNG")
        assert not (tmp_path / "ttft.png").exists()


class TestPage:
    def test_page_is_what_its_results_file_makes(self, bench: dict[str, Any]) -> None:
        figures, tables = bench["figures"], bench["record_tables"]
        page = figures.PAGE.read_text()
        name = tables.results_name(page)
        assert figures.page_of(page, name) == page, (
            f"run python benchmarks/figures.py {name} --docs"
        )

    def test_figures_of_the_page_are_there(self, bench: dict[str, Any]) -> None:
        figures, tables = bench["figures"], bench["record_tables"]
        name = tables.results_name(figures.PAGE.read_text())
        lines = [] if name == "none" else bench["record_lines"].read_lines(figures.ROOT / name)
        drawn = {f"{name}.png" for name in bench["record_plots"].titles(lines)}
        assert drawn == {path.name for path in figures.FIGURE_FOLDER.glob("*.png")} & {
            f"{name}.png" for name in bench["record_plots"].FIGURES
        }

    def test_changed_results_are_noticed(self, bench: dict[str, Any]) -> None:
        tables = bench["record_tables"]
        page = "a\n<!-- results: none -->\nold\n<!-- end of results -->\nb\n"
        first = tables.filled_in(page, "x.jsonl", [transfer_line("cma")], {})
        second = tables.filled_in(first, "x.jsonl", [transfer_line("cma", gb_per_s=FEW)], {})
        assert tables.results_name(first) == "x.jsonl"
        assert first != second
        assert first.startswith("a\n<!--")
        assert first.endswith("-->\nb\n")

    def test_page_without_a_place_is_refused(self, bench: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="0 places"):
            bench["record_tables"].filled_in("", "none", [], {})


class TestRecord:
    def test_second_run_of_a_day_has_a_number(self, bench: dict[str, Any], tmp_path: Path) -> None:
        names = []
        for _ in range(3):
            path = bench["record"].results_file(tmp_path, "2026-01-02")
            path.touch()
            names.append(path.name)
        assert names == ["2026-01-02.jsonl", "2026-01-02-2.jsonl", "2026-01-02-3.jsonl"]

    def test_every_bench_is_run(self, bench: dict[str, Any]) -> None:
        benches = {path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py")}
        assert {run.name for run in bench["record"].RUNS} == benches

    def test_whole_run_fits_90_minutes(self, bench: dict[str, Any]) -> None:
        assert sum(run.minutes for run in bench["record"].RUNS) <= 90

    @pytest.mark.parametrize(
        ("script", "is_failure"),
        [
            ("import sys; print('no root', file=sys.stderr); sys.exit(77)", False),
            ("import sys; print('{}'); sys.exit(77)", True),
            ("import sys; sys.exit(1)", True),
            ("pass", True),
        ],
    )
    def test_bench_that_cannot_run_is_no_failure(
        self,
        bench: dict[str, Any],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        script: str,
        is_failure: bool,
    ) -> None:
        record, run = bench["record"], bench["record"].chosen("network")[0]
        command = [sys.executable, "-c", script]
        monkeypatch.setattr(record.Run, "command", lambda *_: command)
        monkeypatch.setattr(record, "SCRATCH", tmp_path)
        said = io.StringIO()
        failed = record.record([run], tmp_path / "x.jsonl", True, Console(file=said))
        assert bool(failed) == is_failure
        assert ("left out: no root" in said.getvalue()) != is_failure

    def test_only_named_benches(self, bench: dict[str, Any]) -> None:
        names = [run.name for run in bench["record"].chosen("growth,steps")]
        assert names == ["steps", "growth"]
        with pytest.raises(ValueError, match="no bench named stepz"):
            bench["record"].chosen("steps,stepz")

    def test_lines_get_facts_and_other_output_is_no_line(self, bench: dict[str, Any]) -> None:
        with_facts = bench["record"].with_facts
        assert json.loads(with_facts('{"bench": "x"}', {"load": 1}))["run"] == {"load": 1}
        assert with_facts("Loading weights", {}) is None
        assert with_facts("3", {}) is None

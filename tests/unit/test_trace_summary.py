"""Merging files of both sides, and the numbers, on made-up traces with known answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.traces import at, write_d, write_p, write_p_scheduler

from vllm_llmdd_connector.trace.__main__ import read_all
from vllm_llmdd_connector.trace.merge import Request, merge
from vllm_llmdd_connector.trace.reader import TraceError
from vllm_llmdd_connector.trace.summary import RequestSummary, as_text, by_flow, summarize


def requests_in(folder: Path) -> list[Request]:
    return merge(read_all([folder]))


def only_summary(folder: Path) -> RequestSummary:
    (request,) = requests_in(folder)
    return summarize(request)


class TestPush:
    def test_numbers_of_one_request(self, tmp_path: Path) -> None:
        write_p(tmp_path)
        write_d(tmp_path)
        assert only_summary(tmp_path) == RequestSummary(
            transfer="t",
            request="d-t",
            flow="push",
            num_tokens=3,
            num_bytes=600,
            layer_bytes=[300, 300],
            exposed_ms=7.0,  # 27 - 20
            overlap_share=0.5,  # the first layer, there by 15
            copy_ms=15.0,  # 26 - 11
            reserve_to_decode_ms=35.0,  # 30 + 5
            clock_error_ms=0.0,
            failure="",
        )

    def test_two_ranks_have_it_when_both_have(self, tmp_path: Path) -> None:
        for rank, reservation, arrival in ((0, "a", 27), (1, "b", 29)):
            write_p(tmp_path, rank=rank, reservation=reservation)
            write_d(tmp_path, rank=rank, reservation=reservation, arrival=arrival)
        summary = only_summary(tmp_path)
        assert (summary.num_bytes, summary.layer_bytes) == (1200, [600, 600])
        assert summary.exposed_ms == 9.0
        assert summary.overlap_share == 0.5

    def test_what_came_before_p_s_last_layer_is_not_exposed(self, tmp_path: Path) -> None:
        write_p(tmp_path, sent=((0, 11, 15),))
        write_d(tmp_path, arrival=16)
        summary = only_summary(tmp_path)
        assert (summary.exposed_ms, summary.overlap_share) == (0.0, 1.0)
        assert summary.layer_bytes == [300, 0]

    def test_pushes_of_a_lost_production_do_not_count(self, tmp_path: Path) -> None:
        write_p(tmp_path, reservation="old", production=1)
        write_p(tmp_path, reservation="a", production=2)
        write_d(tmp_path, reservation="a")
        (request,) = requests_in(tmp_path)
        assert len(request.steps) == 1
        assert summarize(request).num_bytes == 600

    def test_layer_without_a_hook_is_computed_with_its_step(self, tmp_path: Path) -> None:
        path = write_p(tmp_path)
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"layer":"l1"' not in line))
        write_d(tmp_path)
        (request,) = requests_in(tmp_path)
        assert request.last_computed_ns == at(21)


class TestPull:
    def test_numbers_of_one_request(self, tmp_path: Path) -> None:
        write_p(tmp_path, is_pushed=False)
        write_d(tmp_path, is_pushed=False)
        summary = only_summary(tmp_path)
        assert (summary.flow, summary.num_bytes, summary.layer_bytes) == ("pull", 600, [300, 300])
        assert (summary.exposed_ms, summary.overlap_share) == (7.0, 0.0)
        assert (summary.copy_ms, summary.reserve_to_decode_ms) == (4.0, 8.0)


class TestClocks:
    FAR = 5_000_000.0

    def write(self, folder: Path, *clocks: dict[str, object]) -> None:
        write_p(folder, clock="there")
        write_p_scheduler(folder, clock="there")
        write_d(folder, clock="here", shift_ms=-self.FAR, clocks=clocks)

    def test_handshake_brings_d_s_times_to_p_s_clock(self, tmp_path: Path) -> None:
        self.write(
            tmp_path,
            {"instance": "instance", "offset_s": self.FAR / 1000 + 9, "error_s": 0.5},
            {"instance": "instance", "offset_s": self.FAR / 1000, "error_s": 0.001},
            {"instance": "another", "offset_s": 3.0, "error_s": 0.0},
        )
        summary = only_summary(tmp_path)
        assert summary.exposed_ms == pytest.approx(7.0)
        assert summary.reserve_to_decode_ms == pytest.approx(35.0)
        assert summary.clock_error_ms == 1.0
        assert "right to 1.000 ms" in as_text([summary])

    def test_unknown_offset_is_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path, {"instance": "another", "offset_s": 3.0, "error_s": 0.0})
        with pytest.raises(TraceError, match="nothing tells how far its clock is"):
            requests_in(tmp_path)

    def test_one_machine_needs_no_handshake(self, tmp_path: Path) -> None:
        write_p(tmp_path)
        write_p_scheduler(tmp_path)
        clock = {"instance": "instance", "offset_s": 0.25, "error_s": 0.5}
        write_d(tmp_path, clocks=(clock,))
        assert only_summary(tmp_path).exposed_ms == 7.0


class TestSeveral:
    def test_flows_are_summed_up_apart(self, tmp_path: Path) -> None:
        for number, (is_pushed, arrival) in enumerate(
            [(True, 21), (True, 23), (True, 40), (False, 31)]
        ):
            name = f"t{number}"
            write_p(tmp_path, name, is_pushed=is_pushed, reservation=name)
            write_d(tmp_path, name, is_pushed=is_pushed, reservation=name, arrival=arrival)
        pull, push = by_flow([summarize(request) for request in requests_in(tmp_path)])
        assert (pull.flow, pull.num_requests, pull.num_bytes, pull.exposed_ms) == (
            "pull",
            1,
            600,
            11.0,
        )
        assert (push.flow, push.num_requests, push.num_bytes) == ("push", 3, 1800)
        assert (push.exposed_ms, push.overlap_share) == (3.0, 0.5)

    def test_requests_of_one_side_only_are_left_out(self, tmp_path: Path) -> None:
        write_p(tmp_path, "t")
        write_p(tmp_path, "elsewhere", reservation="b")
        write_d(tmp_path, "t")
        assert [request.transfer for request in requests_in(tmp_path)] == ["t"]

    def test_table_has_a_line_for_each_and_totals(self, tmp_path: Path) -> None:
        write_p(tmp_path)
        write_d(tmp_path)
        lines = as_text([only_summary(tmp_path)]).splitlines()
        assert lines[1].split()[:4] == ["d-t", "push", "3", "0.00"]
        assert lines[3].split()[:3] == ["1", "requests", "push"]
        assert "50 %" in lines[1]


class TestNothingCommon:
    def test_other_run(self, tmp_path: Path) -> None:
        write_p(tmp_path, "one")
        write_d(tmp_path, "two")
        with pytest.raises(TraceError, match="no request is in files of both sides"):
            requests_in(tmp_path)

    def test_one_side_is_missing(self, tmp_path: Path) -> None:
        path = write_p(tmp_path)
        with pytest.raises(TraceError, match="no file has requests of a decode server"):
            merge(read_all([path]))

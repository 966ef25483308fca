"""The demo's verdict: right runs pass, and every way of being wrong or incomplete is noticed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from client import Token
from verdict import Digests, Expected, check_digests, check_tokens, read_digests

REQUEST = "demo-1234"
EXPECTED = Expected(first_block=1, blocks=2, layers=2)


def _line(side: str, layer: str, first_block: int, *digests: str, rank: int = 0) -> Digests:
    request_id = f"cmpl-{REQUEST}-0-{'0a' if side == 'send' else '1b'}"
    return Digests(side, request_id, "transfer", rank, layer, first_block, digests)


def _right() -> list[Digests]:
    """P reports three blocks of two layers, D the last two of them."""
    return [
        _line("send", "layer.0", 0, "a0", "a1", "a2"),
        _line("send", "layer.1", 0, "b0", "b1", "b2"),
        _line("recv", "layer.0", 1, "a1", "a2"),
        _line("recv", "layer.1", 1, "b1", "b2"),
    ]


class TestDigests:
    def test_equal_digests_pass(self) -> None:
        assert check_digests(_right(), REQUEST, EXPECTED) == []

    @pytest.mark.parametrize("index", range(4))
    def test_one_flipped_digest_is_noticed(self, index: int) -> None:
        lines = _right()
        flipped = (*lines[index].digests[:-1], "ff")
        lines[index] = replace(lines[index], digests=flipped)
        problems = check_digests(lines, REQUEST, EXPECTED)
        assert problems == [
            f"1 blocks differ from P's, the first: rank 0, {lines[index].layer}, block 2"
        ]

    @pytest.mark.parametrize("index", range(4))
    def test_a_missing_line_is_noticed(self, index: int) -> None:
        lines = _right()
        del lines[index]
        assert check_digests(lines, REQUEST, EXPECTED)

    @pytest.mark.parametrize("side", ["send", "recv"])
    def test_a_missing_file_is_noticed(self, side: str) -> None:
        lines = [line for line in _right() if line.side != side]
        assert check_digests(lines, REQUEST, EXPECTED)

    def test_no_lines_at_all_are_noticed(self) -> None:
        assert check_digests([], REQUEST, EXPECTED)

    @pytest.mark.parametrize("index", [2, 3])
    def test_one_block_less_is_noticed(self, index: int) -> None:
        lines = _right()
        lines[index] = replace(lines[index], digests=lines[index].digests[:1])
        assert check_digests(lines, REQUEST, EXPECTED) == ["D reports 3 blocks, expected 4"]

    def test_right_bytes_at_the_wrong_place_are_noticed(self) -> None:
        lines = _right()
        lines[2] = replace(lines[2], first_block=0)
        problems = check_digests(lines, REQUEST, EXPECTED)
        assert any("outside [1, 3)" in problem for problem in problems)
        assert any("differ" in problem for problem in problems)

    def test_a_block_reported_twice_is_noticed(self) -> None:
        lines = [*_right(), _line("recv", "layer.0", 1, "a1", "a2")]
        assert "D reports a block of a layer twice" in check_digests(lines, REQUEST, EXPECTED)

    def test_another_layers_bytes_are_noticed(self) -> None:
        lines = _right()
        lines[2] = replace(lines[2], digests=("b1", "b2"))
        assert check_digests(lines, REQUEST, EXPECTED)

    def test_another_transfers_lines_do_not_count(self) -> None:
        lines = [
            replace(line, transfer_id="other") if line.side == "send" else line for line in _right()
        ]
        problems = check_digests(lines, REQUEST, EXPECTED)
        assert problems == ["4 blocks were not reported by P, the first: rank 0, layer.0, block 1"]

    def test_another_requests_lines_do_not_count(self) -> None:
        assert check_digests(_right(), "demo-9", EXPECTED)

    def test_two_transfers_of_one_request_are_noticed(self) -> None:
        lines = _right()
        lines[3] = replace(lines[3], transfer_id="other")
        problems = check_digests(lines, REQUEST, EXPECTED)
        assert problems == ["D received under 2 transfer ids, expected 1"]

    def test_ranks_are_compared_each_with_its_own(self) -> None:
        both = [replace(line, rank=rank) for line in _right() for rank in (0, 1)]
        expected = replace(EXPECTED, ranks=2)
        assert check_digests(both, REQUEST, expected) == []
        assert check_digests(_right(), REQUEST, expected)

    def test_nothing_expected_and_nothing_received_passes(self) -> None:
        nothing = Expected(first_block=0, blocks=0, layers=2)
        assert check_digests([], REQUEST, nothing) == []
        assert check_digests(_right(), REQUEST, nothing)


class TestReadDigests:
    def test_files_of_all_workers_are_read(self, tmp_path: Path) -> None:
        lines = _right()
        for index, line in enumerate(lines):
            (tmp_path / f"{index}.jsonl").write_text(json.dumps(asdict(line)) + "\n")
        assert read_digests(tmp_path) == lines

    def test_a_line_that_is_being_written_is_left_for_later(self, tmp_path: Path) -> None:
        text = json.dumps(asdict(_right()[0])) + "\n"
        (tmp_path / "a.jsonl").write_text(text + text[:20])
        assert read_digests(tmp_path) == _right()[:1]

    def test_a_folder_that_is_not_there_holds_nothing(self, tmp_path: Path) -> None:
        assert read_digests(tmp_path / "none") == []


def _token(name: str, logprob: float = -0.1, second: float = -3.0) -> Token:
    return Token(name, logprob, (logprob, second))


class TestTokens:
    REFERENCE = (_token("1"), _token("2"), _token("3"))

    def test_equal_tokens_pass(self) -> None:
        verdict = check_tokens(self.REFERENCE, self.REFERENCE)
        assert (verdict.compared, verdict.near_tie, verdict.problems) == (3, None, ())

    def test_another_token_where_the_gap_is_wide_is_wrong(self) -> None:
        got = (_token("1"), _token("9"), _token("3"))
        assert check_tokens(got, self.REFERENCE).problems == (
            "token 1 is 9, a single server's is 2 by 2.90 nat",
        )

    def test_comparison_ends_at_a_near_tie(self) -> None:
        """After another token was chosen the texts go their own ways; that is no fault."""
        reference = (_token("1"), _token("2", -0.7, -0.75), _token("3"))
        got = (_token("1"), _token("9"), _token("8"), _token("7"))
        verdict = check_tokens(got, reference)
        assert (verdict.compared, verdict.near_tie, verdict.problems) == (1, 1, ())

    def test_a_near_tie_with_the_same_token_goes_on(self) -> None:
        reference = (_token("1", -0.7, -0.75), _token("2"))
        assert check_tokens((_token("1", -0.7), _token("9")), reference).problems

    def test_a_gap_that_is_not_known_counts_as_wide(self) -> None:
        reference = (Token("1", -0.1, (-0.1,)),)
        assert check_tokens((_token("2"),), reference).problems

    def test_a_logprob_too_far_away_is_wrong(self) -> None:
        got = (_token("1"), _token("2", -0.16), _token("3"))
        verdict = check_tokens(got, self.REFERENCE)
        assert verdict.problems == ("logprob of token 1 differs by 0.060 nat",)

    def test_a_logprob_within_the_tolerance_passes(self) -> None:
        got = (_token("1", -0.14), _token("2"), _token("3"))
        assert check_tokens(got, self.REFERENCE).problems == ()

    @pytest.mark.parametrize("count", [0, 2])
    def test_missing_tokens_are_wrong(self, count: int) -> None:
        assert check_tokens(self.REFERENCE[:count], self.REFERENCE).problems
        assert check_tokens(self.REFERENCE, self.REFERENCE[:count]).problems

    def test_no_logprobs_at_all_are_wrong(self) -> None:
        assert check_tokens((), ()).problems

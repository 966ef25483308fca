"""``python -m vllm_llmdd_connector.trace``: outputs, sentences and exit statuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fakes.traces import write_d, write_p

from vllm_llmdd_connector.trace.__main__ import main
from vllm_llmdd_connector.trace.reader import TraceError, read_file

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    return write_p(tmp_path), write_d(tmp_path)


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


class TestOutputs:
    def test_table_by_default(
        self, both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(*both) == 0
        out, err = capsys.readouterr()
        assert "d-t" in out
        assert err == ""

    def test_json(self, both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
        assert run(both[0].parent, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert [r["exposed_ms"] for r in found["requests"]] == [7.0]
        assert [f["flow"] for f in found["flows"]] == ["push"]

    def test_png(self, both: tuple[Path, Path], tmp_path: Path) -> None:
        picture = tmp_path / "timeline.png"
        assert run(*both, "--png", picture) == 0
        assert picture.read_bytes().startswith(PNG_MAGIC)

    def test_png_without_matplotlib(
        self,
        both: tuple[Path, Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.delitem(sys.modules, "vllm_llmdd_connector.trace.draw", raising=False)
        assert run(*both, "--png", tmp_path / "timeline.png") == 2
        assert "--png needs matplotlib" in capsys.readouterr().err

    def test_one_request(self, both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
        assert run(*both, "--request", "d-t") == 0
        assert run(*both, "--request", "other") == 2
        assert "no request has the id other" in capsys.readouterr().err


class TestBadInput:
    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("hello", "is no JSON"),
            ("", "is no JSON"),
            ("[\n", "is no trace of this connector, or was cut off"),
            ('[{"name":"x","ph":"i","ts":1}]', "is no trace of this connector"),
            ('{"traceEvents": []}', "is no trace of this connector"),
            ("7", "no array of events"),
            ("[1, 2]", "no array of events"),
            ('[\n{"name":"llmdd_trace","args":{"format":99}}', "has format 99"),
            ('[\n{"name":"llmdd_trace","args":{"format":1}}', "has an event that does not fit"),
            ('[\n{"name":"x"},\nrubbish,\n{"name":"y"}', "line 3 is no JSON"),
        ],
    )
    def test_is_told_in_a_sentence(
        self, text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "bad.json"
        path.write_text(text)
        assert run(path) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {path}: ")
        assert sentence in err
        assert err.count("\n") == 1

    def test_missing_and_binary_files(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
        for name in ("missing", "binary"):
            assert run(tmp_path / name) == 2
            assert "cannot be read" in capsys.readouterr().err

    def test_folder_without_traces(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(tmp_path) == 2
        assert "is trace_dir set" in capsys.readouterr().err

    def test_nothing_common(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(write_p(tmp_path, "one"), write_d(tmp_path, "two")) == 2
        assert "no request is in files of both sides" in capsys.readouterr().err


class TestTruncated:
    def test_every_cut_is_read_or_refused_in_a_sentence(self, tmp_path: Path) -> None:
        text = write_p(tmp_path).read_text()
        whole = [event.name for event in read_file(next(tmp_path.iterdir())).events]
        path = tmp_path / "cut.json"
        refusals, num_read = [], 0
        for length in range(len(text) - len("\n]\n")):
            path.write_text(text[:length])
            try:
                names = [event.name for event in read_file(path).events]
            except TraceError as error:
                refusals.append(str(error))
                continue
            assert names == whole[: len(names)]
            num_read += 1
        assert num_read > len(text) / 2
        assert all(refusal.startswith(f"{path}: ") for refusal in refusals)

    def test_what_is_left_makes_a_picture_with_a_note(
        self, both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
    ) -> None:
        p, d = both
        text = d.read_text()
        d.write_text(text[: text.index('{"name":"decode"') + 20])
        assert run(p, d, "--json") == 0
        out, err = capsys.readouterr()
        (request,) = json.loads(out)["requests"]
        assert request["reserve_to_decode_ms"] is None
        assert request["exposed_ms"] == 7.0
        assert "has no end" in err

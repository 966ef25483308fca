"""``Recorder``: bounded, never in the way, and readable whatever becomes of its process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fakes.clock import wait_for

from vllm_llmdd_connector.errors import ConfigError
from vllm_llmdd_connector.trace.reader import read_file
from vllm_llmdd_connector.trace.recorder import Recorder, open_trace


def make_recorder(folder: Path, **options: Any) -> Recorder:
    return Recorder(str(folder), "kv_both", "engine/1", "scheduler", **options)


def stop_writing(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From the next batch on the disk takes as long as the test wants; returns its release."""
    blocked, released = threading.Event(), threading.Event()
    write = recorder._write

    def wait_and_write(lines: list[dict[str, Any]]) -> None:
        blocked.set()
        released.wait()
        write(lines)

    monkeypatch.setattr(recorder, "_write", wait_and_write)
    recorder.event("first")
    assert blocked.wait(20)
    return released


class TestFile:
    def test_events_and_spans_come_back(self, tmp_path: Path) -> None:
        recorder = make_recorder(tmp_path, instance="abc")
        recorder.event("moment", 1_234_567_890_123_456, transfer="t")
        recorder.span("stretch", 1_000, 5_001, number=2**40)
        recorder.close()
        file = read_file(recorder.path)
        moment, stretch = file.events
        assert (moment.name, moment.at_ns, moment.end_ns) == ("moment", 1_234_567_890_123_456, None)
        assert moment.args == {"transfer": "t"}
        assert (stretch.at_ns, stretch.end_ns, stretch.args) == (1_000, 5_001, {"number": 2**40})
        assert (file.engine_id, file.process, file.facts["instance"]) == (
            "engine/1",
            "scheduler",
            "abc",
        )
        assert file.has_end
        assert list(file.notes) == []

    def test_name_says_whose_it_is(self, tmp_path: Path) -> None:
        recorder = make_recorder(tmp_path / "new")
        recorder.close()
        assert recorder.path.name == f"kv_both-engine_1-scheduler-{os.getpid()}.json"

    def test_viewer_reads_it_as_an_array_of_events(self, tmp_path: Path) -> None:
        recorder = make_recorder(tmp_path)
        recorder.span("stretch", 2_000, 3_000)
        recorder.close()
        lines = json.loads(recorder.path.read_text())
        begin, end = (line for line in lines if line["name"] == "stretch")
        assert (begin["ph"], begin["ts"], end["ph"], end["ts"]) == ("b", 2.0, "e", 3.0)
        assert (begin["cat"], begin["id"]) == (end["cat"], end["id"])

    def test_restart_in_the_same_process_id_overwrites_nothing(self, tmp_path: Path) -> None:
        paths = set()
        for _ in range(3):
            recorder = make_recorder(tmp_path)
            recorder.close()
            paths.add(recorder.path)
        assert len(paths) == 3
        assert all(read_file(path).has_end for path in paths)

    def test_folder_that_cannot_be_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"trace_dir: cannot write to .*file"):
            make_recorder(tmp_path / "file")

    def test_off_makes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert open_trace("", "kv_both", "e", "scheduler") is None
        assert list(tmp_path.iterdir()) == []


class TestBounds:
    def test_full_ring_drops_the_oldest_and_counts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recorder = make_recorder(tmp_path, max_waiting=10)
        released = stop_writing(recorder, monkeypatch)
        for number in range(25):
            recorder.event("e", number)
        assert recorder.num_dropped == 15
        released.set()
        recorder.close()
        file = read_file(recorder.path)
        assert [e.at_ns for e in file.events if e.name == "e"] == list(range(15, 25))
        assert file.num_dropped == 15
        assert "15 events are missing" in next(file.notes)

    def test_full_file_grows_no_more_and_counts(self, tmp_path: Path) -> None:
        recorder = make_recorder(tmp_path, max_file_bytes=1)
        size = recorder.path.stat().st_size
        for _ in range(50):
            recorder.event("e", transfer="t" * 100)
        recorder.close()
        assert recorder.path.stat().st_size < size + 300
        assert read_file(recorder.path).num_dropped == 50

    def test_events_after_close_are_counted(self, tmp_path: Path) -> None:
        recorder = make_recorder(tmp_path)
        recorder.close()
        recorder.close()
        recorder.event("late")
        assert recorder.num_dropped == 1
        assert read_file(recorder.path).events == []

    def test_many_threads_lose_nothing(self, tmp_path: Path) -> None:
        recorder = make_recorder(tmp_path)
        threads = [
            threading.Thread(target=lambda t=t: [recorder.event("e", t, n=n) for n in range(500)])
            for t in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recorder.close()
        found = {(e.at_ns, e.args["n"]) for e in read_file(recorder.path).events}
        assert found == {(t, n) for t in range(4) for n in range(500)}


def test_killed_process_leaves_what_it_had_written(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from vllm_llmdd_connector.trace.recorder import Recorder\n"
        f"recorder = Recorder({str(tmp_path)!r}, 'kv_producer', 'e', 'rank 3')\n"
        "recorder.event('moment', 5, n=1)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        wait_for(
            lambda: any("moment" in path.read_text() for path in tmp_path.iterdir()),
            "the event was never written",
        )
        process.send_signal(signal.SIGKILL)
    (path,) = tmp_path.iterdir()
    file = read_file(path)
    assert [(e.name, e.at_ns) for e in file.events] == [("moment", 5)]
    assert not file.has_end
    assert "has no end" in next(file.notes)

"""What control groups leave a process, read from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_llmdd_connector.datadist._engine import testing

UNLIMITED = 2**64 - 1
MIB = 1 << 20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


class Proc:
    """A process's ``/proc`` directory, and its control groups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._point = root / "mounted"
        self._groups = ""
        self._mounts = "21 20 0:20 / / rw - ext4 /dev/root rw\n"

    def mount(self, version: int, of_group: str = "/") -> None:
        kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
        point = str(self._point / str(version)).replace(" ", r"\040")
        self._mounts += f"36 35 0:30 {of_group} {point} rw,relatime shared:1 - {kind}\n"

    def join(self, version: int, path: str) -> None:
        self._groups += f"0::{path}\n" if version == 2 else f"7:cpu,memory:{path}\n"

    def limit(
        self, version: int, below: str, limit: str, usage: int, files: tuple[int, int] = (0, 0)
    ) -> None:
        directory = self._point / str(version) / below
        directory.mkdir(parents=True, exist_ok=True)
        names, prefix = (V2, "") if version == 2 else (V1, "total_")
        (directory / names[0]).write_text(f"{limit}\n")
        (directory / names[1]).write_text(f"{usage}\n")
        rows = {
            "anon": 5,
            f"{prefix}inactive_file": files[0],
            f"{prefix}active_file": files[1],
            "other_inactive_file": 99,
        }
        (directory / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in rows.items()))

    def headroom(self) -> int:
        (self.root / "cgroup").write_text(self._groups)
        (self.root / "mountinfo").write_text(self._mounts)
        return testing.memory_headroom(str(self.root))


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


@pytest.mark.parametrize("version", [1, 2])
class TestLimit:
    def test_room_is_limit_without_usage(self, proc: Proc, version: int) -> None:
        proc.mount(version)
        proc.join(version, "/a")
        proc.limit(version, "a", str(100 * MIB), 60 * MIB)
        assert proc.headroom() == 40 * MIB

    def test_cached_files_count_as_room(self, proc: Proc, version: int) -> None:
        proc.mount(version)
        proc.join(version, "/a")
        proc.limit(version, "a", str(100 * MIB), 60 * MIB, files=(3 * MIB, 4 * MIB))
        assert proc.headroom() == 47 * MIB

    def test_the_tightest_level_counts(self, proc: Proc, version: int) -> None:
        proc.mount(version)
        proc.join(version, "/a/b/c")
        proc.limit(version, "a", str(80 * MIB), 70 * MIB)
        proc.limit(version, "a/b", str(100 * MIB), 60 * MIB)
        proc.limit(version, "a/b/c", str(1000 * MIB), 50 * MIB)
        assert proc.headroom() == 10 * MIB

    def test_usage_above_the_limit_leaves_nothing(self, proc: Proc, version: int) -> None:
        proc.mount(version)
        proc.join(version, "/a")
        proc.limit(version, "a", str(MIB), 2 * MIB, files=(3 * MIB, 0))
        proc.limit(version, "", str(MIB), 2 * MIB)
        assert proc.headroom() == 0

    def test_a_container_sees_its_own_group_as_the_top(self, proc: Proc, version: int) -> None:
        """With its path in the host's words, relative to what is mounted, or not at all."""
        proc.mount(version, of_group="/pods/one")
        proc.limit(version, "", str(100 * MIB), 60 * MIB)
        proc.limit(version, "inner", str(100 * MIB), 90 * MIB)
        for path, room in (
            ("/pods/one", 40),
            ("/pods/one/inner", 10),
            ("/pods/oneself/inner", 40),
            ("/", 40),
            ("/../elsewhere", 40),
        ):
            proc._groups = ""
            proc.join(version, path)
            assert proc.headroom() == room * MIB, path

    @pytest.mark.parametrize("limit", ["max", ""])
    def test_no_limit_is_no_bound(self, proc: Proc, version: int, limit: str) -> None:
        proc.mount(version)
        proc.join(version, "/a")
        proc.limit(version, "a", limit, 60 * MIB)
        assert proc.headroom() == UNLIMITED


def test_spaces_are_escaped_where_it_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "a place").mkdir()
    proc = Proc(tmp_path / "a place")
    proc.mount(2)
    proc.join(2, "/a")
    proc.limit(2, "a", str(100 * MIB), 60 * MIB)
    assert proc.headroom() == 40 * MIB


def test_both_versions_count_where_both_are_mounted(proc: Proc) -> None:
    for version, usage in ((1, 60), (2, 70)):
        proc.mount(version)
        proc.join(version, "/a")
        proc.limit(version, "a", str(100 * MIB), usage * MIB)
    assert proc.headroom() == 30 * MIB


def test_what_cannot_be_read_is_no_bound(tmp_path: Path) -> None:
    assert testing.memory_headroom(str(tmp_path)) == UNLIMITED
    for name in ("cgroup", "mountinfo"):
        (tmp_path / name).write_text("0\n::\n- - -\n 7:memory\n1 2 3 \\9 \\ x - cgroup2 a b\n")
    assert testing.memory_headroom(str(tmp_path)) == UNLIMITED

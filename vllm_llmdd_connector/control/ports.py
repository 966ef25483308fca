"""Who holds a TCP port: for the error message when ours is taken. Linux, best effort."""

import os
from pathlib import Path


def describe_holder(port: int) -> str:
    """``process 123 (python3)``, or ``another process`` when it cannot be seen."""
    inodes = _listening_inodes(port)
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit() and _owns_socket(proc, inodes):
            return f"process {proc.name} ({_command(proc)})"
    return "another process"


def _listening_inodes(port: int) -> set[str]:
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            is_listening = fields[3] == "0A"
            if is_listening and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _owns_socket(proc: Path, inodes: set[str]) -> bool:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    try:
        return any(os.readlink(fd) in wanted for fd in (proc / "fd").iterdir())
    except OSError:
        return False


def _command(proc: Path) -> str:
    try:
        return (proc / "comm").read_text().strip()
    except OSError:
        return "unknown"

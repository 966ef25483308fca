"""Another user of this machine, played by a child process; tests need root to become one."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def as_other_user(action: Callable[[], object]) -> str:
    """What ``action`` returns as user ``nobody``, or the name and text of what it raises.

    It runs in a fork of this process, because the interpreter's files may not be readable by
    others; so it may use only what is imported already.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Since 3.12: this process has threads. The child only makes system calls.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            told = str(action())
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        told = answer.read()
    os.waitpid(pid, 0)
    return told


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder

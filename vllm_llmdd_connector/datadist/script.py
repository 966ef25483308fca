"""Runs a script as ``python SCRIPT`` would, with the vendor's names served by this package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from vllm_llmdd_connector.datadist import hccn_tool, npu_names, vendor_names

__all__ = ["ScriptError", "run_script"]


class ScriptError(Exception):
    """The script cannot be read; the text says why."""


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run the file as ``__main__``.

    An exception of the script ends the process as it would without us: its traceback, exit code 1.

    Raises:
        ScriptError: no such file, or it cannot be read.
        SystemExit: the script's own, or that of its failure.
    """
    source = _read(path)
    vendor_names.install()
    npu_names.install()
    hccn_tool.install()
    main = ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    sys.argv = [path, *arguments]
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = str(Path(path).resolve().parent)
    try:
        # Without this file's own __future__ imports.
        code = compile(source, path, "exec", dont_inherit=True)
        _execute(code, main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        traceback = _of_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        _hint(error)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ScriptError(f"cannot read script {path!r}: {error.strerror}") from None


def _execute(code: CodeType, namespace: dict[str, Any]) -> None:
    exec(code, namespace)


def _of_script(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


def _hint(error: BaseException) -> None:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        print(
            "The script needs torch, which is not installed here; its CPU build will do.",
            file=sys.stderr,
        )

"""Build the engine with AddressSanitizer and UBSan, and run its tests once under them: the mutation
driver for a moment, then those in Python.

    python tests/native/run_sanitized.py [pytest arguments]

Needs gcc, cmake, ninja, nanobind and the test requirements in the running Python's environment. The
build goes to build/sanitized and is reused. Exit status 0 means that all tests passed, no sanitizer
reported anything, and no leaked block was allocated by the engine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from run_mutations import run_mutations
from sanitizer_build import ADDRESS, ROOT, build

BUILD = ADDRESS
STAGE = BUILD / "stage"  # a copy of the package with the sanitized engine inside
LOGS = BUILD / "logs"
PACKAGE = "vllm_llmdd_connector"

MUTATION_SECONDS = 10  # `make fuzz` goes on for longer
TIMEOUT_S = 600  # of one test, which takes up to five times as long as without sanitizers

# How deep below the allocation a frame of the engine makes a leak the engine's own. Python, too,
# leaks at exit, and every call of the engine has Python's frames further down.
OWN_FRAMES = 8

# An editable installation would otherwise win over the staged copy.
SITECUSTOMIZE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
"""


def stage() -> None:
    shutil.rmtree(STAGE, ignore_errors=True)
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / PACKAGE, STAGE / PACKAGE, ignore=ignore)
    for module in BUILD.glob("_engine*.so"):
        shutil.copy(module, STAGE / PACKAGE / "datadist")
    (STAGE / "sitecustomize.py").write_text(SITECUSTOMIZE)


def library(name: str) -> str:
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    )
    return found.stdout.strip()


def run_tests(arguments: list[str]) -> int:
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(STAGE),
        "PYTHONMALLOC": "malloc",
        "LLMDD_EXAMPLES_FACTOR": "0.25",
        # libstdc++ first, or exceptions of a module that is loaded later are not intercepted.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": f"detect_leaks=1:quarantine_size_mb=1:log_path={LOGS}/asan",
        "LSAN_OPTIONS": "exitcode=0:max_leaks=0",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={LOGS}/ubsan",
    }
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)),
        *("-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"),
        *("--timeout", str(TIMEOUT_S)),
        *(str(ROOT / "tests" / "native"), str(ROOT / "tests" / "contract")),
    ]
    return subprocess.run([*command, *arguments], env=environment, cwd=STAGE).returncode


def reports(text: str) -> Iterator[str]:
    """Leak reports: paragraphs that begin with the size of a leak."""
    for paragraph in text.split("\n\n"):
        if paragraph.lstrip().startswith(("Direct leak", "Indirect leak")):
            yield paragraph


def is_own(report: str) -> bool:
    frames = [line for line in report.splitlines() if line.lstrip().startswith("#")]
    return any("llmdd::" in frame for frame in frames[:OWN_FRAMES])


def findings() -> list[str]:
    found = []
    for log in sorted(LOGS.iterdir()):
        text = log.read_text(errors="replace")
        if "ERROR: AddressSanitizer" in text or "runtime error:" in text:
            found.append(text)
        found += [report for report in reports(text) if is_own(report)]
    return found


def main() -> int:
    build(ADDRESS)
    if run_mutations(MUTATION_SECONDS) != 0:
        return 1
    stage()
    status = run_tests(sys.argv[1:])
    found = findings()
    for report in found:
        print(report, file=sys.stderr)
    print(f"sanitizers: tests ended with {status}, {len(found)} findings", file=sys.stderr)
    return 1 if found else status


if __name__ == "__main__":
    sys.exit(main())

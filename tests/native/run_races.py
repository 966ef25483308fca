"""Build the race test with ThreadSanitizer and run it, or some of its scenarios.

    python tests/native/run_races.py [SCENARIO ...]

Exit status 0: no data race, no lock order that can deadlock, and every check held; or the compiler
has no thread sanitizer, which is said.
"""

from __future__ import annotations

import os
import subprocess
import sys

from sanitizer_build import THREAD, build, compiler_supports, program, same_addresses

DRIVER = "llmdd_race_test"
OPTIONS = "halt_on_error=1:second_deadlock_stack=1"


def main() -> int:
    if not compiler_supports("thread"):
        print("races: skipped, g++ has no thread sanitizer here", file=sys.stderr)
        return 0
    build(THREAD, DRIVER)
    command = [*same_addresses(), str(program(THREAD, DRIVER)), *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, "TSAN_OPTIONS": OPTIONS}).returncode


if __name__ == "__main__":
    sys.exit(main())

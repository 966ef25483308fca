"""Random inputs that no earlier run has seen, for a while.

    python tests/native/run_fuzz.py [SECONDS]

Half of the time goes to the mutation driver, half to rounds of the model tests. What fails prints
how to repeat it: a seed line for the driver's file of seeds, or a decorator of Hypothesis. The
time to build, and the rest of a round that has begun, come on top.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time

from run_mutations import run_mutations
from sanitizer_build import ROOT

MODEL_TESTS = [
    "contract/test_reference.py",
    "contract/test_first_reference.py",
    "contract/test_transfer_random.py",
    "unit/test_meeting_random.py",
    "unit/test_session.py",
]
FACTOR = "2"


def run_model_tests(seconds: float) -> int:
    end = time.monotonic() + seconds
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "1800"]
    command += [str(ROOT / "tests" / name) for name in MODEL_TESTS]
    environment = {**os.environ, "LLMDD_EXAMPLES_FACTOR": FACTOR}
    while True:
        status = subprocess.run(command, env=environment, cwd=ROOT).returncode
        if status != 0 or time.monotonic() >= end:
            return status


def main() -> int:
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    first_seed = secrets.randbits(48)
    return run_mutations(seconds // 2, first_seed) or run_model_tests(seconds / 2)


if __name__ == "__main__":
    sys.exit(main())

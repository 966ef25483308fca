"""Run the mutation driver under AddressSanitizer and UBSan.

    python tests/native/run_mutations.py SECONDS [FIRST_SEED]

Without FIRST_SEED the same inputs are tried each time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sanitizer_build import ADDRESS, build, program

DRIVER = "llmdd_mutation_test"
SEEDS = Path(__file__).resolve().parent / "cpp" / "mutate" / "seeds.txt"


def run_mutations(seconds: int, first_seed: int = 1) -> int:
    build(ADDRESS, DRIVER)
    command = [str(program(ADDRESS, DRIVER)), str(SEEDS), str(seconds), str(first_seed)]
    # The kept seeds come first, and a machine may be slow: only a hang takes ten times as long.
    return subprocess.run(command, timeout=600 + 10 * seconds).returncode


if __name__ == "__main__":
    sys.exit(run_mutations(int(sys.argv[1]), *map(int, sys.argv[2:])))

"""``llmdd keys DIR``, also as ``python -m vllm_llmdd_connector.keys DIR``: make a key set.

The folder is then copied to every server of the cluster and named there as ``keys_dir``.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_llmdd_connector.control.keys import make_key_set
from vllm_llmdd_connector.errors import ConfigError

_DONE = """\
{folder} holds a new key set. Copy it to every prefill and decode server, readable by vLLM's user
alone, and name it there: "kv_connector_extra_config": {{"keys_dir": "{folder}"}}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or empty folder")


def run(folder: Path) -> int:
    """Make the set and say what to do with it; the process's exit status."""
    try:
        make_key_set(folder)
    except ConfigError as error:
        print(f"llmdd keys: {error}", file=sys.stderr)
        return 1
    print(_DONE.format(folder=folder.resolve()))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_llmdd_connector.keys", description="Make keys for the control channel."
    )
    add_arguments(parser)
    return run(parser.parse_args(arguments).folder)


if __name__ == "__main__":
    sys.exit(main())

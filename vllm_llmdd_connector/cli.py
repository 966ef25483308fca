"""The command ``llmdd``."""

import argparse
from collections.abc import Sequence

from vllm_llmdd_connector import keys


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; the process's exit status."""
    parser = argparse.ArgumentParser(prog="llmdd", description="Tools of vllm_llmdd_connector.")
    commands = parser.add_subparsers(dest="command", required=True)
    add_keys = commands.add_parser("keys", help="make a key set for the control channel")
    keys.add_arguments(add_keys)
    return keys.run(parser.parse_args(arguments).folder)

"""``python -m vllm_llmdd_connector.datadist run SCRIPT [ARGS...]``: see ``script``."""

from __future__ import annotations

import argparse
import sys

from vllm_llmdd_connector.datadist.script import ScriptError, run_script

_PROG = "python -m vllm_llmdd_connector.datadist"
_RUN_HELP = """\
Run a script written for llm_datadist on the host engine of this package.

The module name llm_datadist and its submodules lead to vllm_llmdd_connector.datadist. Where
torch_npu is not installed, "import torch_npu", torch.npu.set_device and a few more names of
torch.npu, tensor.npu() and the device "npu" stand for host memory, and where hccn_tool is not
installed, one that knows "-i DEVICE -ip -g". The script's exit code is passed through.
"""


def main(arguments: list[str]) -> None:
    """Does not return when the script calls ``sys.exit`` or fails."""
    parser = argparse.ArgumentParser(
        _PROG, description="The LLM-DataDist API on the host engine of this package."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="run")
    run = commands.add_parser(
        "run",
        help="run a script written for llm_datadist",
        description=_RUN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("script", metavar="SCRIPT", help="path of a Python file")
    run.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's arguments"
    )
    options = parser.parse_args(arguments)
    try:
        run_script(options.script, options.arguments)
    except ScriptError as error:
        parser.exit(2, f"{_PROG} run: {error}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

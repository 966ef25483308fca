"""Programs like the vendor's samples: the same calls in the same order, in processes of their own.

With those of ``test_run`` there is one for each sample. They know nothing of this project.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
RUN = [sys.executable, "-m", "vllm_llmdd_connector.datadist", "run"]
PATIENCE_S = 100

Process = subprocess.Popen[str]
Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a script; it lives until the test ends."""
    started: list[Process] = []

    def start(script: str, *arguments: object) -> Process:
        path = os.pathsep.join(filter(None, sys.path))
        process = subprocess.Popen(
            [*RUN, str(SCRIPTS / script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]


def output(process: Process, text: str | None = None) -> str:
    said, _ = process.communicate(text, PATIENCE_S)
    assert process.returncode == 0
    return said


@pytest.fixture
def meet(start: Start) -> Callable[[str, int], tuple[str, str]]:
    """Runs both sides of a script; returns what P and D have printed."""

    def meet(script: str, num_ports: int) -> tuple[str, str]:
        ports = free_ports(1 + num_ports)
        p, d = (start(script, side, *ports) for side in "pd")
        return output(p), output(d)

    return meet


Meet = Callable[[str, int], tuple[str, str]]


def test_c88_switch_role(meet: Meet) -> None:
    p, d = meet("switch_role.py", 1)
    assert d == "[[10, 0, 10], [11, 1, 11]]\n"
    assert p == d


def test_c88_push_cache_by_id(meet: Meet) -> None:
    assert meet("push_row.py", 2) == ("[[0, 40, 0], [1, 41, 1]]\n", "")


def test_c88_swap_blocks_both_ways(meet: Meet) -> None:
    """Blocks 0 and 1 go out as 0 and 2; block 2 is changed there and comes back as 1."""
    out, back = "[[10, 0, 10], [11, 0, 11]]\n", "[[10, 10, 10], [11, 77, 11]]\n"
    assert meet("swap_blocks.py", 0) == ("", out + back)


def test_c88_row_to_blocks(meet: Meet) -> None:
    assert meet("row_to_blocks.py", 0) == ("", "[[1, 1, 60], [2, 2, 61]]\n")


def test_c88_pull_cache_from_a_pool(meet: Meet) -> None:
    rows = " ".join(8 * letter.upper() + 8 * letter for letter in "abcd")
    assert meet("pull_rows.py", 0) == ("", f"{rows}\n")


def test_c88_layer_without_block_lists(meet: Meet) -> None:
    assert meet("transfer_row.py", 2) == ("True\n", "[[30, 0, 0], [31, 1, 1]]\n")


def test_c88_hixl_backend_both_ways(meet: Meet) -> None:
    values = "[[0, 0, 0], [1, 1, 1]]\n"
    assert meet("both_ways.py", 2) == (values, values)


def test_c88_two_p_and_two_d(start: Start) -> None:
    first, second, *own = (f"127.0.0.1:{port}" for port in free_ports(4))
    contents = {first: "abcdef", second: "ghijkl"}
    prompts = [start("many_to_many.py", address) for address in contents]
    for process, content in zip(prompts, contents.values(), strict=True):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{content}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "registered\n"
    orders = [(first, second), (second, first)]
    decoders = [
        start("many_to_many.py", address, *order)
        for address, order in zip(own, orders, strict=True)
    ]
    for process, order in zip(decoders, orders, strict=True):
        pulled = [contents[address] for address in order]
        lines = [f"{c[0]}.{c[1]}{c[3]}.{c[4]}" for c in pulled]
        wanted = "".join("".join(4 * letter for letter in line) + "\n" for line in lines)
        assert output(process) == wanted
    for process in prompts:
        assert output(process, "\n") == ""

"""Processes that cannot read each other's memory, and strangers at the listening port."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys

import pytest

from contract.errors import explains, wait_until
from contract.fixtures import MakeLocal, MakePeer
from contract.peer import Peer


class TestReachability:
    """The sentences for processes that cannot read each other's memory."""

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (errno.EPERM, ["kernel.yama.ptrace_scope", "SYS_PTRACE"]),
            (errno.ESRCH, ["PID namespace", "--pid="]),
            (errno.ENOSYS, ["seccomp"]),
        ],
    )
    def test_probe_of_the_dialling_side(
        self, make_local: MakeLocal, make_peer: MakePeer, error: int, words: list[str]
    ) -> None:
        peer, local = make_peer(), make_local()
        local.inject_probe_errno(error)
        assert local.link(2, peer.listen_port).name == "LLM_LINK_FAILED"
        assert explains(local, 2, *words)
        wait_until(lambda: explains(peer, 1, *words))
        local.inject_probe_errno(0)
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"

    @pytest.mark.parametrize(
        ("error", "words"),
        [(errno.EPERM, ["kernel.yama.ptrace_scope"]), (errno.ESRCH, ["PID namespace"])],
    )
    def test_probe_of_the_listening_side(
        self, make_local: MakeLocal, make_peer: MakePeer, error: int, words: list[str]
    ) -> None:
        peer, local = make_peer(), make_local()
        peer.inject_probe_errno(error)
        assert local.link(2, peer.listen_port).name == "LLM_LINK_FAILED"
        assert explains(local, 2, *words)
        peer.inject_probe_errno(0)
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_process_of_another_user(self, make_local: MakeLocal, engine: str) -> None:
        stranger = Peer()
        try:
            stranger.create(2, api=engine, user=65534)
            local = make_local()
            assert local.link(2, stranger.listen_port).name == "LLM_LINK_FAILED"
            assert explains(local, 2, "user 65534")
            assert stranger.link(1, local.port()).name == "LLM_LINK_FAILED"
            assert explains(stranger, 1, "run both processes as the same user")
        finally:
            stranger.release()
            stranger.close()

    @pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None,
        reason="needs root and unshare(1) for a PID namespace",
    )
    def test_process_of_another_pid_namespace(self, make_local: MakeLocal, engine: str) -> None:
        """The parent namespace sees the child's processes, but not the other way round."""
        code = f"""
import sys
import {engine} as api
d = api.LLMDataDist(api.LLMRole.MIX, 2)
d.init({{"llm.LocalCommRes": "x", "llm.listenIpInfo": "127.0.0.1:0"}})
print(d.listen_port, flush=True)
sys.stdin.read()
"""
        with subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as hidden:
            assert hidden.stdout is not None
            line = hidden.stdout.readline()
            if not line:
                pytest.skip("this machine does not allow a new PID namespace")
            local = make_local()
            assert local.link(2, int(line)).name == "LLM_LINK_FAILED"
            assert explains(local, 2, "PID namespace")
            hidden.communicate("")


class TestStrangers:
    """Bytes that are not from an engine, sent to the listening port."""

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\x00",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\xff" * 4096,
            os.urandom(1000),
        ],
        ids=["nothing", "one byte", "http", "ones", "random"],
    )
    def test_listener_goes_on(
        self, make_local: MakeLocal, make_peer: MakePeer, data: bytes
    ) -> None:
        peer, local = make_peer(), make_local()
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", peer.listen_port)) as stranger:
                stranger.sendall(data)
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS", local.link_error(2)

    def test_silent_strangers_delay_nobody(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(), make_local()
        silent = [socket.create_connection(("127.0.0.1", peer.listen_port)) for _ in range(30)]
        try:
            assert local.link(2, peer.listen_port).name == "LLM_SUCCESS", local.link_error(2)
        finally:
            for stranger in silent:
                stranger.close()

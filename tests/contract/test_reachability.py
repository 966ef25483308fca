"""Processes that cannot read each other's memory."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys

import pytest

from contract.cluster import free_port
from contract.errors import explains, wait_until
from contract.fixtures import MakeLocal, MakePeer
from contract.peer import Peer

pytestmark = pytest.mark.within_a_host


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
        port = free_port()
        code = f"""
import sys
import {engine} as api
d = api.LLMDataDist(api.LLMRole.MIX, 2)
d.init({{"llm.LocalCommRes": "x", "llm.listenIpInfo": "127.0.0.1:{port}"}})
print("listening", flush=True)
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
            assert local.link(2, port).name == "LLM_LINK_FAILED"
            assert explains(local, 2, "PID namespace")
            hidden.communicate("")

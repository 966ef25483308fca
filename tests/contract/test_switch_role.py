"""switch_role of the second generation."""

from __future__ import annotations

import pytest

from contract.actions import MEMBERS, pull_works
from contract.cluster import free_port
from contract.engines import is_vendor
from contract.errors import refused
from contract.fixtures import MakeLocal, MakePeer
from contract.memory import block_pieces, moved


class TestSwitchRole:
    def test_c82_reverse_link_with_the_same_caches(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(), make_local(listen=False)
        cache, source = local.add_blocks(), peer.add_blocks(seed=100)
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        assert pull_works(local, peer, cache, source)
        role = local.api.LLMRole
        with refused(local.api, "LLM_EXIST_LINK"):
            local.switch_role(role.PROMPT, {"llm.listenIpInfo": f"127.0.0.1:{free_port()}"})
        assert local.unlink(2).name == "LLM_SUCCESS"
        local.switch_role(role.PROMPT, {"llm.listenIpInfo": f"127.0.0.1:{free_port()}"})
        peer.switch_role(role.DECODER)
        assert peer.port() == 0
        assert peer.link(1, local.port()).name == "LLM_SUCCESS"
        before = peer.dump(source)
        peer.pull_blocks(local.api.BlocksCacheKey(1), source, [4], [5])
        assert peer.dump(source) == moved(before, local.dump(cache), block_pieces([4], [5], 64))

    def test_same_role_and_same_address_change_nothing(self, make_local: MakeLocal) -> None:
        local = make_local()
        port = local.port()
        addresses = [f"127.0.0.1:{port}"]
        if not is_vendor(local.api):
            addresses.append("127.0.0.1:0")
        for address in addresses:
            local.switch_role(local.api.LLMRole.MIX, {"llm.listenIpInfo": address})
            assert local.port() == port

    def test_address_in_use_leaves_the_old_listener(self, make_local: MakeLocal) -> None:
        local = make_local()
        port = local.port()
        with refused(local.api, "LLM_FAILED"):
            local.switch_role(
                local.api.LLMRole.MIX, {"llm.listenIpInfo": f"192.0.2.1:{free_port()}"}
            )
        assert local.port() == port

    def test_member_of_a_link_is_linked(self, make_local: MakeLocal, name: str) -> None:
        local = make_local()
        comm_id = local.link_members(name, MEMBERS)
        with refused(local.api, "LLM_EXIST_LINK"):
            local.switch_role(local.api.LLMRole.PROMPT)
        local.unlink_members(comm_id)
        local.switch_role(local.api.LLMRole.PROMPT)

    def test_arguments(self, make_local: MakeLocal) -> None:
        local = make_local()
        role = local.api.LLMRole.MIX
        with pytest.raises(TypeError):
            local.switch_role(1)
        for wrong in ([], {"llm.listenIpInfo": 5}, {5: "x"}):
            with pytest.raises(TypeError):
                local.datadist.switch_role(role, wrong)
        with refused(local.api):
            local.switch_role(role, {"llm.listenIpInfo": "127.0.0.1"})
        with pytest.raises(ValueError):
            local.switch_role(role, {"llm.listenIpInfo": "127.0.0.1:x"})

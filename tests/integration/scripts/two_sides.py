"""What the programs of two processes here share. ``p`` and ``d`` are the sides, clusters 0 and 1.

Every program is called with its side, the port at which the sides meet, and further ports of its
own; ``step`` is where both wait for each other.
"""

import re
import subprocess
import sys
import time

import torch
import torch.distributed
import torch_npu  # noqa: F401
from llm_datadist import (
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    RegisterMemStatus,
)

P, D = 0, 1
HOST = "127.0.0.1"
BLOCKS, NUMBERS = 3, 10
DESC = CacheDesc(num_tensors=2, shape=[BLOCKS, NUMBERS], data_type=DataType.DT_FLOAT)
step = torch.distributed.barrier


def begin(**options):
    """Returns the side, the further ports, and an LLMDataDist with these options."""
    side, port, *ports = {"p": P, "d": D}[sys.argv[1]], *map(int, sys.argv[2:])
    torch.npu.set_device(side)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{HOST}:{port}", rank=side, world_size=2
    )
    config = LLMConfig()
    config.device_id = side
    for name, value in options.items():
        setattr(config, name, value)
    if len(ports) > side:
        config.listen_ip_info = f"{HOST}:{ports[side]}"
    datadist = LLMDataDist(LLMRole.DECODER if side else LLMRole.PROMPT, side)
    datadist.init(config.generate_options())
    return side, ports, datadist


def full(value):
    """The tensors of ``DESC``, and their addresses."""
    tensors = [torch.full((BLOCKS, NUMBERS), value + i, dtype=torch.float).npu() for i in range(2)]
    return tensors, [int(tensor.data_ptr()) for tensor in tensors]


def show(tensors):
    """One number of each block; all numbers of a block are equal."""
    copies = [tensor.cpu() for tensor in tensors]
    assert all((copy == copy[:, :1]).all() for copy in copies)
    print([copy[:, 0].int().tolist() for copy in copies], flush=True)


def cluster(remote, ports=None):
    """How the other side is named; with its address, if ``ports`` are given."""
    info = LLMClusterInfo()
    info.remote_cluster_id = remote
    if ports is not None:
        info.append_local_ip_info(HOST, ports[1 - remote] if len(ports) > 1 - remote else 0)
        info.append_remote_ip_info(HOST, ports[remote])
    return info


def link(datadist, remote, ports):
    status, _ = datadist.link_clusters([cluster(remote, ports)], 5000)
    assert status == LLMStatusCode.LLM_SUCCESS, status


def unlink(datadist, remote, ports=None, force=False):
    status, _ = datadist.unlink_clusters([cluster(remote, ports)], 5000, force=force)
    assert status == LLMStatusCode.LLM_SUCCESS, status


def link_members(datadist):
    """Both sides are members of one communication domain, of a name that no other run has."""
    devices = []
    for device in (P, D):
        command = ["hccn_tool", "-i", str(device), "-ip", "-g"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        address = re.search(r"ipaddr:(\S+)", answer).group(1)
        devices.append(
            f'{{"device_id": "{device}", "device_ip": "{address}", "rank_id": "{device}"}}'
        )
    table = (
        '{"version": "1.2", "status": "completed", "server_count": "1", "server_list": '
        f'[{{"server_id": "1", "host_ip": "{HOST}", "device": [{", ".join(devices)}]}}]}}'
    )
    comm_id = datadist.link(f"link-{sys.argv[2]}", {P: 0, D: 1}, table)
    while datadist.query_register_mem_status(comm_id) == RegisterMemStatus.PREPARING:
        time.sleep(0.01)
    assert datadist.query_register_mem_status(comm_id) == RegisterMemStatus.OK
    return comm_id

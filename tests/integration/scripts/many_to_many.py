"""A program for the vendor's package: each of several D pulls from each of several P.

P: many_to_many.py ADDRESS:PORT      D: many_to_many.py ADDRESS:PORT P1_ADDRESS:PORT P2_ADDRESS:PORT
Clusters are named by address and port, in 48 bits.
"""

import ctypes
import ipaddress
import sys

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)

BLOCKS, BLOCK = 3, 4


def cluster_id(address):
    host, port = address.split(":")
    return int(ipaddress.ip_address(host)) << 16 | int(port)


def start(role, address):
    config = LLMConfig()
    config.device_id = 0
    config.local_comm_res = ""
    if role == LLMRole.PROMPT:
        config.listen_ip_info = address
    datadist = LLMDataDist(role, cluster_id(address))
    datadist.init(config.generate_options())
    return datadist


def register(datadist, letters):
    """One letter for each block of the first tensor, then of the second."""
    memory = ctypes.create_string_buffer("".join(c * BLOCK for c in letters).encode())
    desc = CacheDesc(num_tensors=2, shape=[BLOCKS, BLOCK], data_type=DataType.DT_UINT8)
    addrs = [ctypes.addressof(memory) + tensor * BLOCKS * BLOCK for tensor in range(2)]
    key = BlocksCacheKey(datadist.cluster_id, 0)
    return memory, datadist.cache_manager.register_blocks_cache(desc, addrs, key)


def prompt(address):
    datadist = start(LLMRole.PROMPT, address)
    _memory, cache = register(datadist, input())
    print("registered", flush=True)
    input()
    datadist.cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def decoder(address, remotes):
    datadist = start(LLMRole.DECODER, address)
    memory, cache = register(datadist, "......")
    clusters = []
    for remote in remotes:
        host, port = remote.split(":")
        cluster = LLMClusterInfo()
        cluster.remote_cluster_id = cluster_id(remote)
        cluster.append_local_ip_info(address.split(":")[0], 0)
        cluster.append_remote_ip_info(host, int(port))
        clusters.append(cluster)
    status, _ = datadist.link_clusters(clusters, 5000)
    assert status == LLMStatusCode.LLM_SUCCESS, status
    for remote in remotes:
        key = BlocksCacheKey(cluster_id(remote), 0)
        datadist.cache_manager.pull_blocks(key, cache, src_blocks=[0, 1], dst_blocks=[0, 2])
        print(memory.value.decode(), flush=True)
    status, _ = datadist.unlink_clusters(clusters, 5000)
    assert status == LLMStatusCode.LLM_SUCCESS, status
    datadist.cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


if __name__ == "__main__":
    own, *others = sys.argv[1:]
    if others:
        decoder(own, others)
    else:
        prompt(own)

"""A program for the vendor's package, first generation: D pulls the rows that P has allocated.

P: allocated_rows.py prompt PORT      D: allocated_rows.py decoder PORT
"""

import ctypes
import subprocess
import sys

from llm_datadist import *  # noqa: F403
from llm_datadist import (
    CacheDesc,
    CacheKey,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)

SHAPE, TENSORS, SIZE = [2, 64], 4, 128


def device_ip(device_id):
    answer = subprocess.run(
        f"hccn_tool -i {device_id} -ip -g", shell=True, capture_output=True, text=True, check=True
    )
    return answer.stdout.split("\n")[0].split(":")[1]


def start(role, cluster_id, device_id, port=None):
    config = LLMConfig()
    config.device_id = device_id
    config.sync_kv_timeout = 10000
    if port:
        config.listen_ip_info = f"{device_ip(device_id)}:{port}"
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options())
    return datadist, CacheDesc(TENSORS, SHAPE, DataType.DT_UINT8)


def prompt(port):
    datadist, desc = start(LLMRole.PROMPT, 1, 0, port)
    keys = [CacheKey(1, request) for request in (10, 11)]
    cache = datadist.kv_cache_manager.allocate_cache(desc, keys)
    for value, addr in enumerate(cache.per_device_tensor_addrs[0], 65):
        ctypes.memset(addr, value, SIZE // 2)
        ctypes.memset(addr + SIZE // 2, value + 32, SIZE // 2)
    print("registered", flush=True)
    input()
    datadist.finalize()


def decoder(port):
    datadist, desc = start(LLMRole.DECODER, 2, 1)
    manager = datadist.kv_cache_manager
    cache = manager.allocate_cache(desc)
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = 1
    cluster.append_local_ip_info(device_ip(1), port)
    cluster.append_remote_ip_info(device_ip(0), port)
    status, _ = datadist.link_clusters([cluster], 10000)
    assert status == LLMStatusCode.LLM_SUCCESS, status
    manager.pull_cache(CacheKey(1, 11), cache, 0)
    manager.pull_cache(CacheKey(1, 10), cache, 1)
    try:
        manager.pull_cache(CacheKey(1, 10), cache, 1)
    except LLMException as error:
        print(error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    rows = [ctypes.string_at(addr, SIZE) for addr in cache.per_device_tensor_addrs[0]]
    print("".join(f"{row[:1].decode()}{row[-1:].decode()}" for row in rows), flush=True)
    assert all(len(set(row[:64])) == len(set(row[64:])) == 1 for row in rows)
    status, _ = datadist.unlink_clusters([cluster], 10000)
    assert status == LLMStatusCode.LLM_SUCCESS, status
    datadist.finalize()


if __name__ == "__main__":
    {"prompt": prompt, "decoder": decoder}[sys.argv[1]](int(sys.argv[2]))

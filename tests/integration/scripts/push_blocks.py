"""A program for the vendor's package: P links to D and pushes blocks of one layer.

D: push_blocks.py decoder 26000      P: push_blocks.py prompt 26000
"""

import sys

import torch
import torch_npu  # noqa: F401
from llm_datadist import *  # noqa: F403
from llm_datadist import LLMClusterInfo, LLMConfig, LLMDataDist, LLMException, LLMRole
from llm_datadist.configs import LLMStatusCode
from llm_datadist.v2.cache_manager import CacheManager
from llm_datadist.v2.llm_types import BlocksCacheKey, CacheDesc, DataType

SHAPE = [4, 128]


def start(role, cluster_id, value, listen=None):
    torch.npu.set_device(cluster_id)
    config = LLMConfig()
    config.device_id = cluster_id
    config.local_comm_res = ""
    config.sync_kv_timeout = "5000"
    if listen:
        config.listen_ip_info = listen
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options())
    assert isinstance(datadist.cache_manager, CacheManager)
    tensors = [torch.full(SHAPE, value + i, dtype=torch.int32).npu() for i in range(2)]
    cache = datadist.cache_manager.register_blocks_cache(
        CacheDesc(2, SHAPE, DataType.DT_INT32),
        [tensor.data_ptr() for tensor in tensors],
        BlocksCacheKey(cluster_id),
    )
    return datadist, tensors, cache


def decoder(port):
    datadist, tensors, _ = start(LLMRole.DECODER, 2, 0, f"127.0.0.1:{port}")
    print("registered", flush=True)
    input()
    print([tensor.cpu()[:, 5].tolist() for tensor in tensors], flush=True)
    datadist.finalize()


def prompt(port):
    datadist, _, cache = start(LLMRole.PROMPT, 1, 70)
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = 2
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info("127.0.0.1", port)
    status, statuses = datadist.link_clusters([cluster], 10000)
    assert (status, statuses) == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
    manager = datadist.cache_manager
    manager.push_blocks(BlocksCacheKey(2), cache, src_blocks=[0, 1], dst_blocks=[0, 2])
    try:
        manager.push_blocks(BlocksCacheKey(2, 9), cache, src_blocks=[0], dst_blocks=[0])
    except LLMException as error:
        if error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            print("no such cache", flush=True)
    datadist.unlink_clusters([cluster], 10000, force=True)
    datadist.finalize()


if __name__ == "__main__":
    {"decoder": decoder, "prompt": prompt}[sys.argv[1]](int(sys.argv[2]))

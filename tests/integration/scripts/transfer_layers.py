"""A program for the vendor's package: P pushes layer by layer to D; both are members of a link().

D: transfer_layers.py 2      P: transfer_layers.py 1
"""

import json
import re
import subprocess
import sys
import time

import torch
import torch_npu  # noqa: F401
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LayerSynchronizer,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    RegisterMemStatus,
    TransferWithCacheKeyConfig,
)

LAYERS, BLOCKS, BLOCK = 3, 4, 128


def device_ip(device_id):
    command = ["hccn_tool", "-i", str(device_id), "-ip", "-g"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.search(r"ipaddr:(\S+)", answer).group(1)


def rank_table():
    devices = [
        {"device_id": str(i), "device_ip": device_ip(i), "rank_id": str(i)} for i in range(2)
    ]
    servers = [{"server_id": "127.0.0.1", "device": devices}]
    return json.dumps(
        {"version": "1.0", "status": "completed", "server_count": "1", "server_list": servers}
    )


class Computing(LayerSynchronizer):
    """Writes a layer when it is asked for it, so that only a layer sent afterwards is right."""

    def __init__(self, tensors):
        self.tensors = tensors

    def synchronize_layer(self, layer_index, timeout_in_millis):
        for tensor in self.tensors[2 * layer_index : 2 * layer_index + 2]:
            tensor.fill_(10 + layer_index)
        return True


def main(cluster_id):
    torch.npu.set_device(f"npu:{cluster_id - 1}")
    config = LLMConfig()
    config.device_id = cluster_id - 1
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.sync_kv_timeout = 10000
    datadist = LLMDataDist(LLMRole(cluster_id), cluster_id)
    datadist.init(config.generate_options())
    tensors = [
        torch.zeros(BLOCKS, BLOCK, dtype=torch.int32, device="npu") for _ in range(2 * LAYERS)
    ]
    cache = datadist.cache_manager.register_blocks_cache(
        CacheDesc(2 * LAYERS, [BLOCKS, BLOCK], DataType.DT_INT32),
        [tensor.data_ptr() for tensor in tensors],
        BlocksCacheKey(cluster_id),
    )
    comm_id = datadist.link("p-and-d-" + sys.argv[2], {1: 0, 2: 1}, rank_table())
    while datadist.query_register_mem_status(comm_id) == RegisterMemStatus.PREPARING:
        time.sleep(0.01)
    assert datadist.query_register_mem_status(comm_id) == RegisterMemStatus.OK
    print("registered", flush=True)
    if cluster_id == 1:
        layers = range(LAYERS)
        task = datadist.cache_manager.transfer_cache_async(
            cache,
            Computing(tensors),
            [TransferWithCacheKeyConfig(BlocksCacheKey(2), layers, layers)],
            [0, 1],
            [2, 0],
        )
        assert task.synchronize() == LLMStatusCode.LLM_SUCCESS
        print(task.get_results() == [LLMStatusCode.LLM_SUCCESS], flush=True)
        input()
    else:
        input()
        print([tensor.cpu()[:, 7].tolist() for tensor in tensors], flush=True)
    datadist.unlink(comm_id)
    datadist.finalize()


if __name__ == "__main__":
    main(int(sys.argv[1]))

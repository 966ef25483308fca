"""Pure geometry of KV tensors: no vLLM objects, no I/O."""

"""A small Llama with random weights for tests of faults and topology: quick to load.

Its output layer is scaled up so that the best token stands out. The tokenizer is SmolLM2's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 49_152
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def make_tiny_model(folder: Path, tokenizer_from: Path, num_layers: int = 3) -> Path:
    """Write the model to ``folder`` and return it."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    torch.manual_seed(20)
    network = LlamaForCausalLM(config)
    with torch.no_grad():
        network.lm_head.weight.mul_(30)
    network.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer_from / name).exists():
            shutil.copy(tokenizer_from / name, folder / name)
    return folder

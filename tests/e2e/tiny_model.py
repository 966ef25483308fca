"""Small models with random weights for tests of faults, topology and caches: quick to load.

The Llama's output layer is scaled up so that the best token stands out. The tokenizer is SmolLM2's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

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
    _copy_tokenizer(tokenizer_from, folder)
    return folder


def make_windowed_model(folder: Path, tokenizer_from: Path, window: int = 256) -> Path:
    """Write a Gemma 3 of two sliding-window layers and one of full attention, twice.

    vLLM keeps the windowed layers' blocks in KV cache groups of their own.
    """
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=4096,
        sliding_window=window,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        eos_token_id=2,
    )
    torch.manual_seed(21)
    Gemma3ForCausalLM(config).save_pretrained(folder)
    _copy_tokenizer(tokenizer_from, folder)
    return folder


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)

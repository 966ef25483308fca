"""Turn the quantised SmolLM2-135M-Instruct of a GGUF file into a bfloat16 Hugging Face folder.

Run by setup_env.py with .venv's Python: `make_model.py FILE.gguf FOLDER`. transformers reads GGUF
but refuses to save what it read, because the object counts as quantised; so its weights are copied
into a fresh model of the same shape. The result is checked by what it says before it gets its name.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

QUESTION, ANSWER = "The capital of France is", " Paris"


def main() -> int:
    gguf, target = Path(sys.argv[1]), Path(sys.argv[2])
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    convert(gguf, partial)
    check(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"checked: {QUESTION!r} continues with {ANSWER!r}; {size / 1e6:.0f} MB")
    return 0


def convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
    }
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    config = AutoConfig.from_pretrained(**source)
    config.dtype = torch.bfloat16
    config.architectures = ["LlamaForCausalLM"]
    weights = AutoModelForCausalLM.from_pretrained(**source).state_dict()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()})
    model.save_pretrained(folder)


def check(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise SystemExit("the GGUF file carries no chat template")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = tokenizer(QUESTION, return_tensors="pt").input_ids
    with torch.inference_mode():
        best = int(model(ids).logits[0, -1].argmax())
    if tokenizer.decode([best]) != ANSWER:
        raise SystemExit(
            f"{QUESTION!r} continues with {tokenizer.decode([best])!r}, not {ANSWER!r}"
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())

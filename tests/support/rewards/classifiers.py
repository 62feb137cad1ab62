"""Tiny reward models with random weights, and what transformers itself says of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer

_SIZE: Final[dict[str, Any]] = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    "bert": ("Bert", {}),
    # Unlike the others it reads the types of tokens that it is given, and adds something even for type 0.
    "gpt2": ("GPT2", {}),
}


def save_classifier(
    directory: Path, kind: str = "llama", *, template: str | None = TINY_TEMPLATE, head: str = "ForSequenceClassification",
    has_types: bool = False, **changes: Any,
) -> Path:  # fmt: skip
    """Write a model of one of ``KINDS`` with its tokenizer; ``changes`` of its configuration, of one output otherwise.

    ``has_types``: the tokenizer says to which text of a pair each token belongs.
    """
    import tokenizers
    import torch
    import transformers

    tokenizer = chat_tokenizer(template or "", "<|end|>")
    tokenizer.chat_template = template
    if has_types:
        tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A", pair="$A $B:1")
    name, own = KINDS[kind]
    values = {"vocab_size": 512, "max_position_embeddings": 256, "num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    config = getattr(transformers, f"{name}Config")(**(_SIZE | own | values | changes))
    torch.manual_seed(len(kind))
    model = getattr(transformers, f"{name}{head}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if has_types:
        file = directory / "tokenizer_config.json"
        names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
        file.write_text(json.dumps({**json.loads(file.read_text()), **names}))
    return directory


def official_score(directory: Path, *texts: str, special: bool = False) -> float:
    """What the model card of a reward model does: one text, or a pair, tokenized and scored alone."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    with torch.no_grad():
        return float(model(**tokenizer(*texts, return_tensors="pt", add_special_tokens=special)).logits[0, 0])

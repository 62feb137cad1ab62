"""Model directories with the real chat templates of model families, which TRL's package holds, and a small vocabulary."""

import importlib.util
import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from gspo_services.rollout.tokenizer import ChatTokenizer
from tests.support.engines.chat_models import CORPUS
from tests.support.engines.conversations import TEXTS

CHATML: Final = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VISION: Final = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
TAGS: Final = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
GLM: Final = [
    "<|endoftext|>", "[MASK]", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "/nothink",
]  # fmt: skip
GLM_TAGS: Final = [*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
DEEPSEEK: Final = [
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
]  # fmt: skip
LLAMA: Final = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|python_tag|>", "<|finetune_right_pad_id|>",
]  # fmt: skip

FAMILIES: Final[dict[str, tuple[list[str], list[str], str, list[str]]]] = {
    "qwen3": (CHATML, TAGS, "", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3_instruct_2507": (CHATML, TAGS, "", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3_5_think": ([*CHATML, *VISION], TAGS, "", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3_5_nothink": ([*CHATML, *VISION], TAGS, "", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3_6": ([*CHATML, *VISION], TAGS, "", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3_8": ([*CHATML, *VISION], TAGS, "", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3_vl": ([*CHATML, *VISION], TAGS, "", ["<|im_end|>", "<|endoftext|>"]),
    "qwen2_5": (CHATML, ["<tool_call>", "</tool_call>"], "", ["<|im_end|>", "<|endoftext|>"]),
    "glm4moe": (GLM, GLM_TAGS, "", ["<|endoftext|>", "<|user|>", "<|observation|>"]),
    "deepseekv3": (DEEPSEEK[:4], [*DEEPSEEK[4:], "<think>", "</think>"], DEEPSEEK[0], [DEEPSEEK[1]]),
    "llama3_1": (LLAMA, [], "<|begin_of_text|>", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),
    "llama3_2": (LLAMA, [], "<|begin_of_text|>", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),
    "nemotron_3_nano": (CHATML, TAGS, "", ["<|im_end|>"]),
    "nemotron_3_ultra": (CHATML, TAGS, "", ["<|im_end|>"]),
    "nemotron_3_5_lightning": (CHATML, TAGS, "", ["<|im_end|>"]),
}
"""TRL's name of each template: special tokens, other added tokens, the beginning, and the stop tokens."""


WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where merges end, as in the vocabularies of these families: marks take the newlines that follow them."""


def small_vocabulary() -> Tokenizer:
    """A small BPE with merges across letters, marks and newlines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    tokenizer.train_from_iterator([*CORPUS, *TEXTS, ".\n\n", ">\n", '"}\n', "\n\n", "?\n"] * 3, trainer)
    return tokenizer


def template(name: str) -> str:
    """TRL's copy of a family's template."""
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def make_model(directory: Path, name: str, base: Tokenizer | None = None) -> ChatTokenizer:
    """A directory without weights. ``base`` is another vocabulary."""
    special, added, begin, stops = FAMILIES[name]
    tokenizer = small_vocabulary() if base is None else base
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": stops[0], **({"bos_token": begin} if begin else {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template(name), encoding="utf-8")
    stop_ids = [tokenizer.token_to_id(text) for text in stops]
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True) + 200
    (directory / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "eos_token_id": stop_ids}))
    return ChatTokenizer(directory)

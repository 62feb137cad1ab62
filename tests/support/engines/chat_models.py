"""Model directories with a tokenizer and a chat template, but no weights."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TINY_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- else -%}{{- '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
QWEN_TEMPLATE = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Written for trim_blocks and lstrip_blocks: without them its lines would be indented and spaced.
ALTERNATING_TEMPLATE = """\
{{ bos_token -}}
{% for message in messages %}
    {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {% endif %}
<|{{ message.role }}|>
{{ message.content | trim }}<|end|>
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""
MARKERS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
CORPUS = [
    "user assistant system tool tool_response\n",
    "What is 12 + 30?\nThe answer is 42.\n",
    "<tool_response>\n42\n</tool_response>\n",
    "Use the calculator: <calc>12+30</calc>\n\n",
]


def chat_tokenizer(template: str, eos: str, *, eos_takes_whitespace: bool = False) -> PreTrainedTokenizerFast:
    """A small BPE with merges across letters, digits, spaces and newlines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(text, rstrip=eos_takes_whitespace and text == eos) for text in MARKERS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=AddedToken(eos, rstrip=eos_takes_whitespace, special=True),
        bos_token="<|endoftext|>",
        pad_token="<|pad|>",
    )
    wrapped.chat_template = template
    return wrapped


def save_chat_model(directory: Path, tokenizer: PreTrainedTokenizerFast, **config: Any) -> Path:
    """Write the tokenizer and a config.json; ``config`` changes its values."""
    tokenizer.save_pretrained(directory)
    values = {"vocab_size": 512, "eos_token_id": tokenizer.eos_token_id, **config}
    (directory / "config.json").write_text(json.dumps(values))
    return directory

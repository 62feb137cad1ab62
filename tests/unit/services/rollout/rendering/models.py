"""Model directories for rendering: templates with tools, in the ways in which families write them."""

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models

from gspo_services.rollout.tokenizer import ChatTokenizer
from tests.support.engines.chat_models import chat_tokenizer, save_chat_model

TAGS: Final = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
    {{- 'Call one as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
    {%- if open_thinking is defined %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}
"""
"""As Hermes and Qwen write them."""

BARE: Final = """\
{{- bos_token }}
{%- if tools %}{{- 'Answer {"name": ..., "parameters": ...} of ' + (tools | tojson) }}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|assistant|>\\n{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|end|>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content | trim + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
"""As Llama 3 writes them."""

ROLES_STOP: Final = """\
{%- for message in messages %}{{- '<|' + message.role + '|>\\n' + message.content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
"""As GLM writes them: an answer ends with the marker of the next role."""

MARKERS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def make(
    directory: Path, template: str, eos: str = "<|im_end|>", markers: tuple[str, ...] = MARKERS, **config: Any
) -> ChatTokenizer:
    """A directory with ``template``; ``markers`` are tokens of their own, but not special ones, as in Qwen."""
    tokenizer = chat_tokenizer(template, eos)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    return ChatTokenizer(save_chat_model(directory, tokenizer, vocab_size=600, **config))


def make_byte_fallback(directory: Path) -> ChatTokenizer:
    """A vocabulary of words with spaces, and single bytes for everything else, as in Llama 2 and Gemma."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "\u2581a",
        "b",
        "\u2581\u00fc",
        "\u2581\u96ea",
        "\n",
    ]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (directory / "config.json").write_text(json.dumps({"vocab_size": len(words)}))
    return ChatTokenizer(directory)

"""The tiny models' tokenizers: a token for each byte and each marker of a chat."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
PAD = "<|pad|>"
ROLES = ("user", "assistant", "tool", "system")
MARKERS = (END, PAD, *(f"<|{role}|>" for role in ROLES))

CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"
CALL_PIECES = (CALL_OPENS, CALL_CLOSES, '{"name": "', '", "arguments": {"', '": ', ', "', '"}}', "}}")
"""What every call of a tool has: single tokens, so that a call has about 20 tokens and not 50."""

UNUSED_IDS = 2
"""SGLang misreports the input log-prob of the last id."""
VOCAB_SIZE = 256 + len(MARKERS) + UNUSED_IDS
"""256 bytes, 6 markers, and the unused ids."""

# One line, no spaces or newlines: a marker, the content, and the end, for each message.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# The same with tools: their names in a turn of the system, and calls behind the content of an answer.
TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' + (tools | map(attribute='function.name') | join(',')) + '<|end|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ (call['function']['arguments'] | tojson) + '}</tool_call>' }}"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(*, tools: bool = False, pieces: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A token for each byte, each marker and each of ``pieces``; any text survives the round trip unchanged.

    With ``tools`` the chat template knows OpenAI's tools, and the fixed parts of a call are tokens too.
    """
    pieces = (*CALL_PIECES, *pieces) if tools else pieces
    characters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *MARKERS, *pieces]
    vocabulary = {character: index for index, character in enumerate(characters)}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    # Ordinary text, as in Qwen: an agent that parses answers by itself sees it.
    bytes_only.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[marker for marker in MARKERS if marker not in (END, PAD)],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TOOLS_TEMPLATE if tools else CHAT_TEMPLATE
    return tokenizer

"""Demonstrations as tokens, with the labels that a model learns from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from gspo.tasks.environments import DemonstrationMessage
from gspo_services.prepare.tiny_models.tokenizer import END

IGNORED_LABEL = -100
"""The label of a token that is not trained: torch's cross-entropy ignores it."""


@dataclass(frozen=True)
class Lesson:
    """A demonstration as tokens; both lists are as long as the demonstration."""

    ids: list[int]
    labels: list[int]
    """The id where the model must produce it, IGNORED_LABEL elsewhere."""


def encode(tokenizer: PreTrainedTokenizerFast, demonstrations: Sequence[Sequence[DemonstrationMessage]]) -> list[Lesson]:
    """Demonstrations as tokens; each marked content is trained, with the end marker after it."""
    messages = [message for demonstration in demonstrations for message in demonstration]
    # One call for all: the call is what costs, not the bytes.
    texts = [f"<|{message.role}|>{message.content}{END}" for message in messages]
    tokens = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    return [_lesson(demonstration, tokens) for demonstration in demonstrations]


def encode_conversations(
    tokenizer: PreTrainedTokenizerFast,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    tools: Sequence[Mapping[str, Any]],
) -> list[Lesson]:
    """Conversations of agents as the chat template writes them; each turn of the assistant is trained, with its end.

    Args:
        tokenizer: of ``build_tokenizer(tools=True)``.
        conversations: each a list of messages in OpenAI's form: role, content, tool_calls.
        tools: the tools of all of them, in OpenAI's form.
    """
    texts = [
        tokenizer.apply_chat_template(list(conversation), tools=list(tools), tokenize=False)
        for conversation in conversations
    ]
    begin, end = tokenizer.convert_tokens_to_ids("<|assistant|>"), tokenizer.eos_token_id
    return [
        Lesson(ids=ids, labels=_labels_of_turns(ids, begin, end))
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]
    ]


def _lesson(demonstration: Sequence[DemonstrationMessage], tokens: Iterator[list[int]]) -> Lesson:
    ids: list[int] = []
    labels: list[int] = []
    for message in demonstration:
        said = next(tokens)
        ids += said
        # The template writes the marker that opens the turn, not the model.
        labels += [IGNORED_LABEL, *said[1:]] if message.train else [IGNORED_LABEL] * len(said)
    return Lesson(ids=ids, labels=labels)


def _labels_of_turns(ids: Sequence[int], begin: int, end: int) -> list[int]:
    labels: list[int] = []
    is_turn = False
    for token in ids:
        labels.append(token if is_turn else IGNORED_LABEL)
        is_turn = token == begin or (is_turn and token != end)
    return labels

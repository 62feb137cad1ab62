"""Finds the sequence of a call and the tokens that its messages add. Long messages are rendered outside the event loop."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from gspo_services.rollout.endpoint import CallRefused, CallRequest
from gspo_services.rollout.episodes.log import Round
from gspo_services.rollout.rendering import Renderer, RenderingError, TooLongError

LONG_TEXT: Final = 32_768
"""Above this many characters a thread renders: it takes some 20 ms, which would stall every other episode."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """A sequence whose conversation a request repeats up to the last answer."""

    sequence: int
    num_messages: int
    """The request's messages that the sequence already has."""
    last: Round


@dataclass(frozen=True, kw_only=True)
class Place:
    """The sequence that a call continues, None for a new one, and its observation there."""

    sequence: int | None
    observation: list[int]
    reason: Literal["first", "other", "no_bridge"]
    """Why there is a new sequence, if there is."""


async def find_place(renderer: Renderer, request: CallRequest, known: Sequence[Known], *, is_first: bool) -> Place:
    """Return the first of ``known`` that can be bridged to the request's new messages, or a new sequence.

    Raises: CallRefused for messages that the model's format refuses, or that cannot fit.
    """
    find = partial(_find, renderer, request, known, is_first=is_first)
    return await asyncio.to_thread(find) if _num_characters(request) > LONG_TEXT else find()


def _find(renderer: Renderer, request: CallRequest, known: Sequence[Known], *, is_first: bool) -> Place:
    prompted = (request.tools, request.template_arguments)
    try:
        for each in known:
            new = request.messages[each.num_messages :]
            before, sampled = each.last.prompt_ids.tolist(), each.last.action_ids.tolist()
            bridge = renderer.bridge(before, sampled, new, *prompted)
            if bridge:
                return Place(sequence=each.sequence, observation=bridge, reason="other")
        prompt = renderer.prompt_ids(request.messages, *prompted)
        renderer.stream(request.stop)
    except TooLongError as error:
        text = (
            f"this model's maximum context length is smaller (sampling.max_tokens): {error}; send fewer or shorter messages"
        )
        raise CallRefused(400, "context_length_exceeded", text, param="messages") from error
    except RenderingError as error:
        raise CallRefused(400, "not_rendered", f"the model's chat format refuses this: {error}") from error
    if not prompt:
        raise CallRefused(400, "not_rendered", "the model's chat format renders these messages to 0 tokens")
    return Place(sequence=None, observation=prompt, reason="first" if is_first else "no_bridge" if known else "other")


def _num_characters(request: CallRequest) -> int:
    return sum(len(message.get("content") or "") for message in request.messages)

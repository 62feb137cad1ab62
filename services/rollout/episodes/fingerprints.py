"""Fingerprints to compare requests: of messages, of a prompt's rendering options, and of a whole call."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from gspo_services.rollout.endpoint import CallRequest


class MessageKey(NamedTuple):
    """A message's fingerprint."""

    digest: bytes
    """Digest of everything but the reasoning."""
    reasoning: str | None
    """None if there is none, or if the client dropped it."""

    def repeats(self, recorded: "MessageKey") -> bool:
        """Whether this message of a request is ``recorded``. A client may leave out the reasoning, but not change it."""
        return self.digest == recorded.digest and self.reasoning in (None, recorded.reasoning)


def message_key(message: Mapping[str, Any]) -> MessageKey:
    """Return the key of a message of a ``CallRequest``, or of an answer in the form in which a client repeats it.

    No content is the same as empty content. Arguments of tool calls are compared as JSON: a client may have read and written
    them.
    """
    calls = [
        [call.get("id"), call["function"]["name"], _one_form(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    named = [message.get("name"), message.get("tool_call_id")]
    return MessageKey(
        _digest([message["role"], message.get("content") or "", calls, named]), message.get("reasoning_content") or None
    )


def message_keys(messages: Sequence[Mapping[str, Any]]) -> tuple[MessageKey, ...]:
    """Return the keys of all messages."""
    return tuple(message_key(message) for message in messages)


def prompt_setting(request: CallRequest) -> bytes:
    """Return what the template writes besides the messages, and for whom: a role continues no other's sequence. The order of
    tools and fields counts: it is written, too.
    """
    written = [request.tools, request.template_arguments]
    return _digest([*written, request.role] if request.role else written)


def call_digest(request: CallRequest, keys: Sequence[MessageKey]) -> str:
    """Return the digest of a whole request, which a replayed agent repeats exactly."""
    asked = [
        [[key.digest.hex(), key.reasoning] for key in keys],
        prompt_setting(request).hex(),
        request.max_tokens,
        request.stop,
        request.stop_token_ids,
    ]
    # Journals of calls without a demand have no place for one.
    return _digest(asked if request.must_call is None else [*asked, request.must_call]).hex()


def _one_form(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _digest(plain: Any) -> bytes:
    # Lone surrogates are not valid UTF-8; ASCII escapes can express them.
    return sha256(json.dumps(plain, ensure_ascii=True).encode()).digest()

"""Turns Anthropic's messages, which are made of blocks, into messages as a chat template has them."""

from typing import Any, Final

import msgspec

from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.rollout.endpoint.fields import Fields, wrong
from gspo_services.rollout.endpoint.texts import (
    PREFILLED,
    TEXT_ONLY,
    assistant,
    part_text,
    require_messages,
    require_unique,
    text_of,
    tool_call,
)

_ROLES: Final = ("user", "assistant", "system")
_USERS: Final = ("text", "tool_result")
_ASSISTANTS: Final = ("text", "thinking", "redacted_thinking", "tool_use")


def messages_of(fields: Fields) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the messages of ``system`` and ``messages``, with the names of their unknown fields. Raises: CallRefused."""
    plain = fields.items("messages")
    if plain is None:
        raise wrong("messages", "a list of messages", None)
    system = text_of(fields, "system")
    blocks = Blocks()
    for index, one in enumerate(plain):
        blocks.add(Fields(one, f"messages[{index}]"))
    messages = [*([{"role": "system", "content": system}] if system else []), *blocks.messages]
    require_messages(blocks.messages, "messages")
    if messages[-1]["role"] == "assistant":
        # Here it is no turn of its own, as it is in OpenAI's, but the beginning of the answer.
        text = f"messages ends with a message of the assistant: {PREFILLED}. End it with a user's or a tool's message"
        raise CallRefused(400, "prefill", text, param=f"messages[{len(plain) - 1}]")
    return messages, blocks.unknown


class Blocks:
    """The messages of a request, one after the other."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.unknown: set[str] = set()
        self._ids: set[str] = set()

    def add(self, message: Fields) -> None:
        """Add the next message. Raises: CallRefused."""
        role = message.value("role")
        if role not in _ROLES:
            raise wrong(message.path("role"), f"one of {', '.join(_ROLES)}", role)
        content = message.value("content")
        if role == "system" or isinstance(content, str):
            text = text_of(message)
            if text is None:
                raise wrong(message.path("content"), "a string or a list of blocks", None)
            self.messages.append({"role": role, "content": text})
        else:
            blocks = message.items("content")
            if blocks is None or not (blocks or role == "assistant"):
                raise wrong(message.path("content"), "a string or a list of blocks that is not empty", content)
            read = [Fields(one, f"{message.path('content')}[{index}]") for index, one in enumerate(blocks)]
            self._assistant(read) if role == "assistant" else self._user(read)
            self.unknown |= {f"messages[].content[].{name}" for block in read for name in block.unknown}
        self.unknown |= {f"messages[].{name}" for name in message.unknown}

    def _user(self, blocks: list[Fields]) -> None:
        """Results of tools become messages of their own. The texts between them are the user's."""
        texts: list[str] = []
        for block in blocks:
            kind = _kind(block, _USERS)
            if kind == "text":
                texts.append(part_text(block))
                continue
            self._said(texts)
            # An error is told by the text of its result; no chat template has a place for the mark.
            block.flag("is_error")
            result = text_of(block) or ""
            self.messages.append({"role": "tool", "content": result, "tool_call_id": block.required_text("tool_use_id")})
        self._said(texts)

    def _said(self, texts: list[str]) -> None:
        if texts:
            self.messages.append({"role": "user", "content": "".join(texts)})
            texts.clear()

    def _assistant(self, blocks: list[Fields]) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block in blocks:
            kind = _kind(block, _ASSISTANTS)
            if kind == "text":
                texts.append(part_text(block))
            elif kind == "tool_use":
                name = block.required_text("id")
                require_unique(name, self._ids, block.path("id"))
                calls.append(tool_call(name, block.required_text("name"), _input(block)))
            else:
                block.text("signature"), block.text("data")
                thoughts.append(block.text("thinking") or "")
        content = "".join(texts) if texts else None
        self.messages.append(assistant(content, calls, "".join(thoughts) or None))


def _kind(block: Fields, kinds: tuple[str, ...]) -> str:
    kind = block.value("type")
    if kind not in kinds:
        raise wrong(block.path("type"), f"one of {', '.join(kinds)}: {TEXT_ONLY}", kind)
    # Where Anthropic keeps a prompt, and what it found where. Neither is part of the text.
    block.value("cache_control"), block.value("citations")
    return str(kind)


def _input(block: Fields) -> str:
    given = block.free("input")
    if given is None:
        raise wrong(block.path("input"), "an object", None)
    return msgspec.json.encode(given).decode()


def refuse_servers(fields: Fields) -> None:
    """Raises: CallRefused for what only Anthropic's servers have."""
    for name in ("mcp_servers", "container"):
        if fields.value(name):
            text = f"{name} is not supported: this endpoint runs no tools itself. Connect to them in the agent"
            raise CallRefused(400, "unsupported_value", text, param=name)
    if fields.value("thread"):
        text = "thread is not supported: this endpoint keeps no conversation. Send all of it without thread"
        # Anthropic's runner of tools asks for a thread first; by this code it goes on without one.
        details = {"error_code": "thread_unsupported_request"}
        raise CallRefused(400, "unsupported_value", text, param="thread", details=details)

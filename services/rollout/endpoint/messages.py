"""Checks and normalises the messages of a call."""

from typing import Any, Final

from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.rollout.endpoint.fields import Fields, check_depth, decode, wrong

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_PREFILLED: Final = "the model would continue text that it did not sample, so the turn could not be trained exactly"


def checked_messages(plain: list[Any], path: str) -> tuple[list[dict[str, Any]], set[str]]:
    """Check the messages; returns them with the names of their unknown fields. Raises: CallRefused."""
    if not plain:
        raise CallRefused(400, "invalid_value", f"{path} is empty: a call needs at least one message", param=path)
    messages, unknown = [], set()
    for index, one in enumerate(plain):
        fields = Fields(one, f"{path}[{index}]")
        messages.append(_message(fields))
        unknown.update(fields.unknown)
    if messages[-1]["role"] == "assistant":
        raise CallRefused(
            400,
            "prefill",
            f"{path} end with one of the assistant: {_PREFILLED}. End them with a user's or a tool's message",
            param=f"{path}[{len(messages) - 1}]",
        )
    return messages, unknown


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.value("role")
    if role not in _ROLES:
        raise wrong(fields.path("role"), f"one of {', '.join(_ROLES)}", role)
    name = fields.text("name")
    message: dict[str, Any] = {"role": role} if name is None else {"role": role, "name": name}
    content = _text(fields)
    if role == "assistant":
        _refuse_what_no_answer_has(fields)
        calls = _tool_calls(fields)
        # An answer with only reasoning has no content either, and comes back as it was.
        message["content"] = content if calls else content or ""
        if calls:
            message["tool_calls"] = calls
        # vLLM and SGLang call it reasoning_content, newer clients reasoning.
        other_name = fields.text("reasoning")
        reasoning = fields.text("reasoning_content") or other_name
        if reasoning:
            message["reasoning_content"] = reasoning
        return message
    if content is None:
        raise wrong(fields.path("content"), "a string or a list of text parts", None)
    message["content"] = content
    if role == "tool":
        message["tool_call_id"] = fields.required_text("tool_call_id")
    return message


def _text(fields: Fields) -> str | None:
    """Return the content as one string. Parts are joined without a separator: the prompt has exactly the agent's text."""
    content = fields.value("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(fields.path("content"), "a string or a list of text parts", content)
    texts = []
    for index, one in enumerate(content):
        part = Fields(one, f"{fields.path('content')}[{index}]")
        kind = part.value("type")
        if kind != "text":
            raise wrong(part.path("type"), '"text": the model of this run reads text only', kind)
        text = part.text("text")
        if text is None:
            raise wrong(part.path("text"), "a string", None)
        texts.append(text)
    return "".join(texts)


def _refuse_what_no_answer_has(fields: Fields) -> None:
    for name in ("function_call", "audio", "refusal"):
        value = fields.value(name)
        if value is not None:
            raise CallRefused(
                400,
                "unsupported_value",
                f"{fields.path(name)} is not supported: this endpoint never answers with one. Leave it out"
                + ("; use tool_calls" if name == "function_call" else ""),
                param=fields.path(name),
            )
    for name in ("prefix", "partial"):
        if fields.flag(name):
            text = f"{fields.path(name)} is true: {_PREFILLED}. Leave it out"
            raise CallRefused(400, "prefill", text, param=fields.path(name))


def _tool_calls(fields: Fields) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    ids: set[str] = set()
    for index, one in enumerate(fields.items("tool_calls") or []):
        call = Fields(one, f"{fields.path('tool_calls')}[{index}]")
        kind = call.value("type")
        if kind not in (None, "function"):
            raise wrong(call.path("type"), '"function"', kind)
        name = call.required_text("id")
        if name in ids:
            raise CallRefused(
                400, "duplicate_id", f"{call.path('id')} is {name[:64]!r} a second time", param=call.path("id")
            )
        ids.add(name)
        function = Fields(call.value("function"), call.path("function"))
        called = {"name": function.required_text("name"), "arguments": _arguments(function)}
        calls.append({"id": name, "type": "function", "function": called})
    return calls


def _arguments(function: Fields) -> str:
    """Return the text of a JSON object; clients send an empty text for a function without arguments."""
    path = function.path("arguments")
    text = function.text("arguments")
    if text is None:
        raise wrong(path, "the text of a JSON object", None)
    if not text.strip():
        return "{}"
    try:
        arguments = decode(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise wrong(path, "the text of a JSON object", text)
    check_depth(arguments, path)
    return text

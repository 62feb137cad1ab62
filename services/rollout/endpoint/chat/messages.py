"""Checks and normalises the messages of a chat completion."""

from typing import Any, Final

from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.rollout.endpoint.fields import Fields, wrong
from gspo_services.rollout.endpoint.texts import (
    PREFILLED,
    arguments_text,
    assistant,
    require_messages,
    require_unique,
    text_of,
    tool_call,
)

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def checked_messages(plain: list[Any], path: str) -> tuple[list[dict[str, Any]], set[str]]:
    """Check the messages; returns them with the names of their unknown fields. Raises: CallRefused."""
    messages, unknown = [], set()
    for index, one in enumerate(plain):
        fields = Fields(one, f"{path}[{index}]")
        messages.append(_message(fields))
        unknown.update(fields.unknown)
    require_messages(messages, path)
    return messages, unknown


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.value("role")
    if role not in _ROLES:
        raise wrong(fields.path("role"), f"one of {', '.join(_ROLES)}", role)
    name = fields.text("name")
    message: dict[str, Any] = {"role": role} if name is None else {"role": role, "name": name}
    content = text_of(fields)
    if role == "assistant":
        _refuse_what_no_answer_has(fields)
        calls = _tool_calls(fields)
        # vLLM and SGLang call it reasoning_content, newer clients reasoning.
        other_name = fields.text("reasoning")
        return message | assistant(content, calls, fields.text("reasoning_content") or other_name)
    if content is None:
        raise wrong(fields.path("content"), "a string or a list of text parts", None)
    message["content"] = content
    if role == "tool":
        message["tool_call_id"] = fields.required_text("tool_call_id")
    return message


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
            text = f"{fields.path(name)} is true: {PREFILLED}. Leave it out"
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
        require_unique(name, ids, call.path("id"))
        function = Fields(call.value("function"), call.path("function"))
        calls.append(tool_call(name, function.required_text("name"), arguments_text(function)))
    return calls

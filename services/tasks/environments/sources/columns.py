"""Columns of a row: one inside another by a dotted name, and conversations."""

from __future__ import annotations

from typing import Any, Final

from gspo.tasks.environments import ChatMessage

ROLES: Final = ("system", "user", "assistant", "tool")
CHAT_KEYS: Final = (("role", "content"), ("from", "value"))
"""The names that conversations have in data sets: OpenAI's, and ShareGPT's."""
_OTHER_ROLES: Final = {"human": "user", "gpt": "assistant", "developer": "system"}


def column_of(record: dict[str, Any], name: str, who_says: str) -> Any:
    """The value of column ``name``; "a.b" is ``b`` inside ``a``, unless a column has the dot in its name.

    ``who_says``: the option that named it. Raises: ValueError that says which columns there are.
    """
    if name in record:
        return record[name]
    value: Any = record
    done: list[str] = []
    for part in name.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            there = ", ".join(sorted(map(str, value)))[:500] if isinstance(value, dict) else f"a {type(value).__name__}"
            inside = f' in "{".".join(done)}"' if done else ""
            raise ValueError(f'no column "{name}": there are {there}{inside} ({who_says} which to use)')
        done.append(part)
    return value


def chat_messages(column: str, value: list[Any]) -> list[ChatMessage]:
    """The conversation that a policy is to answer. Raises: ValueError with the message that cannot be used."""
    messages: list[ChatMessage] = []
    for number, each in enumerate(value):
        where = f'column "{column}", message {number}'
        keys = next((keys for keys in CHAT_KEYS if isinstance(each, dict) and all(key in each for key in keys)), None)
        if keys is None:
            raise ValueError(f"{where} is {repr(each)[:100]}: expected an object with role and content")
        said, content = str(each[keys[0]]).lower(), _text_of(each[keys[1]])
        role: Any = _OTHER_ROLES.get(said, said)
        if role not in ROLES:
            raise ValueError(f"{where} has the role {repr(each[keys[0]])[:50]}: expected one of {', '.join(ROLES)}")
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"{where} has the content {repr(content)[:100]}: expected text")
        messages.append({"role": role, "content": content})
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError(f'column "{column}" is an empty conversation, or one that ends with an answer: nothing is asked')
    return messages


def _text_of(content: Any) -> Any:
    """The text of OpenAI's parts, where all are text; anything else as it is."""
    if (
        isinstance(content, list)
        and content
        and all(isinstance(each, dict) and each.get("type") == "text" for each in content)
    ):
        return "".join(str(each.get("text", "")) for each in content)
    return content

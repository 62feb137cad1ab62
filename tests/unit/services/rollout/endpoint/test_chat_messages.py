"""Messages and tools in the forms that clients write, and in the one form that comes out."""

import json
from typing import Any

import pytest

from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.rollout.endpoint.chat.messages import checked_messages
from gspo_services.rollout.endpoint.fields import MAX_DEPTH
from gspo_services.rollout.endpoint.tools import CheckedTools, inside_function

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


def one(message: dict[str, Any]) -> dict[str, Any]:
    messages, _ = checked_messages([message, USER], "messages")
    return messages[0]


def refused(*messages: Any) -> CallRefused:
    with pytest.raises(CallRefused) as caught:
        checked_messages([*messages, USER], "messages")
    assert caught.value.status == 400
    return caught.value


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"role": "system", "content": "be kind"}, {"role": "system", "content": "be kind"}),
        ({"role": "developer", "content": [{"type": "text", "text": "a"}]}, {"role": "developer", "content": "a"}),
        (
            {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b"}]},
            {"role": "user", "name": "Ann", "content": "a\nb"},
        ),
        ({"role": "user", "content": ""}, {"role": "user", "content": ""}),
        (
            {"role": "tool", "tool_call_id": "c1", "content": "42", "name": "look"},
            {"role": "tool", "tool_call_id": "c1", "content": "42", "name": "look"},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}], "refusal": None, "audio": None},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ),
        ({"role": "assistant", "tool_calls": []}, {"role": "assistant", "content": ""}),
        (
            {"role": "assistant", "content": "yes", "reasoning": "hm"},
            {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
        ),
        (
            {"role": "assistant", "content": None, "reasoning_content": "hm", "function_call": None},
            {"role": "assistant", "content": "", "reasoning_content": "hm"},
        ),
    ],
)
def test_a_message_comes_out_in_one_form(written: dict[str, Any], read: dict[str, Any]) -> None:
    assert one(written) == read


def test_a_call_without_arguments_has_an_empty_object_and_others_stay_as_written() -> None:
    def arguments(text: str) -> str:
        call = {"id": "c", "function": {"name": "look", "arguments": text}}
        return str(one({"role": "assistant", "tool_calls": [call]})["tool_calls"][0]["function"]["arguments"])

    assert arguments(" ") == "{}"
    assert arguments('{ "a":1 }') == '{ "a":1 }'


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (5, "messages[0]"),
        ({"content": "hi"}, "messages[0].role"),
        ({"role": "function", "content": "hi"}, "messages[0].role"),
        ({"role": ["user"], "content": "hi"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[0].content"),
        ({"role": "user", "content": ["hi"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "hi", "name": 5}, "messages[0].name"),
        ({"role": "tool", "content": "42"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "assistant", "content": "x", "reasoning_content": 5}, "messages[0].reasoning_content"),
        ({"role": "assistant", "tool_calls": 5}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "messages[0].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": ""}]}, "messages[0].tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [CALL, CALL]}, "messages[0].tool_calls[1].id"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_a_message_of_the_wrong_kind_is_refused_by_its_place(message: Any, param: str) -> None:
    assert refused(message).param == param


@pytest.mark.parametrize("arguments", [None, 5, {"a": 1}, "nonsense", "[]", '{"a": NaN}', json.dumps(nested(MAX_DEPTH + 1))])
def test_arguments_that_are_no_json_object_are_refused(arguments: Any) -> None:
    call = {"id": "c", "function": {"name": "look", "arguments": arguments}}
    assert refused({"role": "assistant", "tool_calls": [call]}).param == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_the_policy_goes_on_within_no_text_that_it_did_not_sample(name: str) -> None:
    said = {"role": "assistant", "content": "I"}
    assert (refused({**said, name: True}).code, refused({**said, name: True}).param) == ("prefill", f"messages[0].{name}")
    assert checked_messages([USER, {**said, name: False}], "messages") == ([USER, said], set())


def test_after_a_message_of_the_assistant_it_may_speak_again() -> None:
    said = [USER, {"role": "assistant", "content": "I"}]
    assert checked_messages(said, "messages")[0] == said


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", **fields}}


def test_a_tool_comes_out_in_one_form() -> None:
    schema = {"type": "object", "properties": {"at": {"type": "integer"}, "any": True}, "required": ["at"]}
    [full] = CheckedTools([function(description="looks", parameters=schema, strict=None)], "tools", inside_function).tools
    assert full == function(description="looks", parameters=schema)
    for nothing in ({}, {"parameters": None}, {"parameters": {}}):
        [bare] = CheckedTools([function(**nothing)], "tools", inside_function).tools
        assert bare == function(parameters={"type": "object", "properties": {}})


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (5, "tools[0]"),
        ({"type": "custom", "custom": {"name": "x"}}, "tools[0].type"),
        ({"type": "function"}, "tools[0].function"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        (function(name="look at"), "tools[0].function.name"),
        (function(name="a" * 65), "tools[0].function.name"),
        (function(name="look\n"), "tools[0].function.name"),
        (function(description=5), "tools[0].function.description"),
        (function(strict="yes"), "tools[0].function.strict"),
        (function(parameters=[]), "tools[0].function.parameters"),
        (function(parameters={"type": "string"}), "tools[0].function.parameters.type"),
        (function(parameters={"properties": {}}), "tools[0].function.parameters.type"),
        (function(parameters={"type": "object", "properties": []}), "tools[0].function.parameters.properties"),
        (function(parameters={"type": "object", "properties": {"a": 1}}), "tools[0].function.parameters.properties.a"),
        (function(parameters={"type": "object", "required": "a"}), "tools[0].function.parameters.required"),
        (function(parameters={"type": "object", "required": [1]}), "tools[0].function.parameters.required"),
        (function(parameters={"type": "object", "x": nested(MAX_DEPTH)}), "tools[0].function.parameters"),
    ],
)
def test_a_tool_of_the_wrong_kind_is_refused_by_its_place(tool: Any, param: str) -> None:
    with pytest.raises(CallRefused) as caught:
        CheckedTools([tool], "tools", inside_function)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(CallRefused, match="a second time"):
        CheckedTools([function(), function()], "tools", inside_function)


def test_nesting_up_to_the_limit_is_taken() -> None:
    CheckedTools([function(parameters={"type": "object", "x": nested(MAX_DEPTH - 1)})], "tools", inside_function)

"""What clients of each dialect write of a conversation, and read in an answer: by hand, not with the endpoint's own code."""

import json
from collections.abc import Sequence
from typing import Any, Final

from gspo_services.rollout.endpoint import CallAnswer, CallRequest
from gspo_services.rollout.endpoint.asked import AgentCall
from gspo_services.rollout.endpoint.dialects import DIALECTS
from gspo_services.rollout.endpoint.responses.kept import KeptResponses
from gspo_services.rollout.endpoint.sampling import RunSampling

CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
PATHS: Final = (CHAT, RESPONSES, MESSAGES)
Plain = dict[str, Any]


def read(path: str, body: Plain) -> AgentCall:
    """As the endpoint reads what has come over the wire."""
    return DIALECTS[path](json.loads(json.dumps(body)), RunSampling(temperature=0.7), "tiny", KeptResponses())


def body_of(path: str, request: CallRequest) -> Plain:
    """The request in this dialect. Responses have no stop strings."""
    tools = [tool["function"] for tool in request.tools]
    return _BODIES[path](request, tools)


def message_in(path: str, asked: AgentCall, answer: CallAnswer) -> Plain:
    """The answer as a client of this dialect has read it, in the form of ``CallRequest.messages``."""
    return _READERS[path](json.loads(asked.writer.whole(answer)))


def _chat(request: CallRequest, tools: Sequence[Plain]) -> Plain:
    choice = {"": "required", None: "auto"}.get(request.must_call)
    named = {"type": "function", "function": {"name": request.must_call}}
    return {
        "messages": request.messages, "tools": [{"type": "function", "function": tool} for tool in tools],
        "max_tokens": request.max_tokens, "stop": list(request.stop), "tool_choice": choice or named,
    }  # fmt: skip


def _responses(request: CallRequest, tools: Sequence[Plain]) -> Plain:
    items: list[Plain] = []
    for message in request.messages:
        match message["role"]:
            case "tool":
                output = {"call_id": message["tool_call_id"], "output": message["content"]}
                items.append({"type": "function_call_output", **output})
            case "assistant":
                if reasoning := message.get("reasoning_content"):
                    part = {"type": "reasoning_text", "text": reasoning}
                    items.append({"type": "reasoning", "id": "rs", "summary": [], "content": [part]})
                if message["content"] is not None:
                    text = {"type": "output_text", "text": message["content"], "annotations": []}
                    items.append(
                        {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [text]}
                    )
                items += [
                    {"type": "function_call", "call_id": call["id"], "id": "fc", **call["function"]}
                    for call in message.get("tool_calls", ())
                ]
            case _:
                items.append({"role": message["role"], "content": [{"type": "input_text", "text": message["content"]}]})
    choice = {"": "required", None: "auto"}.get(request.must_call)
    return {
        "input": items, "tools": [{"type": "function", **tool} for tool in tools], "max_output_tokens": request.max_tokens,
        "tool_choice": choice or {"type": "function", "name": request.must_call},
    }  # fmt: skip


def _messages(request: CallRequest, tools: Sequence[Plain]) -> Plain:
    said: list[Plain] = []
    for message in request.messages:
        match message["role"]:
            case "tool":
                block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
                _add(said, "user", [block])
            case "assistant":
                blocks: list[Plain] = []
                if reasoning := message.get("reasoning_content"):
                    blocks.append({"type": "thinking", "thinking": reasoning, "signature": "s"})
                if message["content"] is not None:
                    blocks.append({"type": "text", "text": message["content"]})
                for call in message.get("tool_calls", ()):
                    function = call["function"]
                    arguments = json.loads(function["arguments"])
                    blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
                said.append({"role": "assistant", "content": blocks})
            case "user":
                _add(said, "user", [{"type": "text", "text": message["content"]}])
    system = [message["content"] for message in request.messages if message["role"] == "system"]
    choice = {"": {"type": "any"}, None: {"type": "auto"}}.get(request.must_call)
    own = [{name: value for name, value in tool.items() if name != "parameters"} for tool in tools]
    return {
        "messages": said, "system": system[0] if system else None, "max_tokens": request.max_tokens,
        "tools": [{**each, "input_schema": tool["parameters"]} for each, tool in zip(own, tools, strict=True)],
        "stop_sequences": list(request.stop), "tool_choice": choice or {"type": "tool", "name": request.must_call},
    }  # fmt: skip


def _add(said: list[Plain], role: str, blocks: list[Plain]) -> None:
    """Results of tools, and a text after them, are blocks of one message. Two texts would become one."""
    if said and said[-1]["role"] == role and not any(block["type"] == "text" for block in said[-1]["content"]):
        said[-1]["content"] += blocks
    else:
        said.append({"role": role, "content": blocks})


_BODIES: Final = {CHAT: _chat, RESPONSES: _responses, MESSAGES: _messages}


def _chat_message(page: Plain) -> Plain:
    message: Plain = page["choices"][0]["message"]
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def _responses_message(page: Plain) -> Plain:
    said: Plain = {"role": "assistant", "content": None}
    calls = []
    for item in page["output"]:
        match item["type"]:
            case "message":
                said["content"] = "".join(part["text"] for part in item["content"])
            case "reasoning":
                said["reasoning_content"] = item["content"][0]["text"]
            case "function_call":
                calls.append(_call(item["call_id"], item["name"], item["arguments"]))
    if not calls:
        said["content"] = said["content"] or ""
    return {**said, "tool_calls": calls} if calls else said


def _messages_message(page: Plain) -> Plain:
    said: Plain = {"role": "assistant", "content": None}
    calls = []
    for block in page["content"]:
        match block["type"]:
            case "text":
                said["content"] = block["text"]
            case "thinking":
                said["reasoning_content"] = block["thinking"]
            case "tool_use":
                calls.append(_call(block["id"], block["name"], json.dumps(block["input"], separators=(",", ":"))))
    if not calls:
        said["content"] = said["content"] or ""
    return {**said, "tool_calls": calls} if calls else said


def _call(name: str, function: str, arguments: str) -> Plain:
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


_READERS: Final = {CHAT: _chat_message, RESPONSES: _responses_message, MESSAGES: _messages_message}

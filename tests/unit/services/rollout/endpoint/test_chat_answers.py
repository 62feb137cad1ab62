"""OpenAI's shapes: whole answers, streams and errors."""

import json
from typing import Any

import pytest

from gspo_services.rollout.endpoint.calls import CallAnswer, CallRefused, ToolCall
from gspo_services.rollout.endpoint.chat.answers import LOGPROBS_IN_A_CHUNK, ChatWriter
from tests.support.scripted_episodes import CREATED, answer, delta

TOOL_CALL = ToolCall(id="c1", name="look", arguments='{"at": 1}')


def events(*pieces: Any, include_usage: bool = False, logprobs: bool = False) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as OpenAI's does."""
    writer = ChatWriter("tiny", include_usage=include_usage, logprobs=logprobs)
    lines = [event for piece in pieces[:-1] for event in writer.text(piece)] + list(writer.end(pieces[-1]))
    assert lines.pop() == b"data: [DONE]\n\n"
    assert all(line.startswith(b"data: ") and line.endswith(b"\n\n") for line in lines)
    return [json.loads(line[6:]) for line in lines]


def completion(given: CallAnswer, *, logprobs: bool = False) -> Any:
    return json.loads(ChatWriter("tiny", include_usage=False, logprobs=logprobs).whole(given))


def deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def test_a_whole_answer() -> None:
    assert completion(answer()) == {
        "id": "call-1",
        "object": "chat.completion",
        "created": CREATED,
        "model": "tiny",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "Hello."}, "logprobs": None, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11},
    }


def test_an_answer_of_reasoning_and_tool_calls() -> None:
    page = completion(answer(None, reasoning="hm", tool_calls=[TOOL_CALL]))
    [choice] = page["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}],
    }
    assert choice["finish_reason"] == "tool_calls"


def test_log_probs_are_of_the_sampled_tokens_and_half_a_character_has_no_bytes() -> None:
    page = completion(answer("é", tokens=["é", "\ufffd", ""]), logprobs=True)
    assert page["choices"][0]["logprobs"]["content"] == [
        {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []},
        {"token": "\ufffd", "logprob": -1.0, "bytes": None, "top_logprobs": []},
        {"token": "", "logprob": -1.5, "bytes": [], "top_logprobs": []},
    ]


def test_a_stream_gives_pieces_then_the_rest_then_the_reason() -> None:
    chunks = events(delta(reasoning="h"), delta("Hel"), answer(reasoning="h"))
    assert deltas(chunks) == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "h"},
        {"content": "Hel"},
        {"content": "lo."},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert {(chunk["id"], chunk["created"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        ("call-1", CREATED, "chat.completion.chunk", "tiny")
    }
    assert not any("usage" in chunk for chunk in chunks)


def test_a_stream_without_pieces_has_all_of_the_answer() -> None:
    assert deltas(events(answer(None, tool_calls=[TOOL_CALL]))) == [
        {"role": "assistant", "content": ""},
        {
            "tool_calls": [
                {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
            ]
        },
        {},
    ]


def test_a_stream_ends_with_the_usage_when_it_was_asked_for() -> None:
    *others, last = events(delta("Hel"), answer(), include_usage=True)
    assert {chunk["usage"] for chunk in others} == {None}
    assert (last["choices"], last["usage"]) == ([], {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11})


def test_a_stream_gives_log_probs_in_pieces_of_bounded_size() -> None:
    tokens = ["x"] * (LOGPROBS_IN_A_CHUNK + 1)
    chunks = events(answer("x" * len(tokens), tokens=tokens), logprobs=True)
    sizes = [len(chunk["choices"][0]["logprobs"]["content"]) for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert sizes == [LOGPROBS_IN_A_CHUNK, 1]


def test_pieces_that_do_not_begin_the_answer_are_a_bug() -> None:
    with pytest.raises(ValueError, match="gave content that the answer does not begin with"):
        events(delta("Bye"), answer())


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (429, "invalid_request_error"), (503, "server_error")]
)
def test_an_error_has_openais_shape(status: int, kind: str) -> None:
    refused = CallRefused(status, "some_code", "why", param="n")
    event = ChatWriter("tiny", include_usage=False, logprobs=False).failed(refused)
    reason = {"message": "why", "type": kind, "param": "n", "code": "some_code"}
    assert json.loads(event.removeprefix(b"data: ")) == {"error": reason}

"""What an agent may ask for, what it gets instead, and what is refused."""

import json
from typing import Any

import pytest

from gspo_services.rollout.endpoint.asked import AgentCall
from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.rollout.endpoint.chat.requests import read_call
from gspo_services.rollout.endpoint.fields import decode_body
from gspo_services.rollout.endpoint.sampling import RunSampling, without_demand

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def read(sampling: RunSampling | None = None, /, **fields: Any) -> AgentCall:
    plain = json.loads(json.dumps({"model": "tiny", "messages": [USER], **fields}))
    return read_call(plain, sampling or RunSampling(), "tiny")


def refusal(sampling: RunSampling | None = None, /, **fields: Any) -> CallRefused:
    with pytest.raises(CallRefused) as caught:
        read(sampling, **fields)
    assert caught.value.text
    return caught.value


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"n": None},
        {"logit_bias": {}},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        {"response_format": {"type": "text"}},
        {"top_logprobs": 0, "logprobs": True},
        {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": []},
        {"parallel_tool_calls": False},
        {"functions": [], "function_call": "none"},
        {"modalities": ["text"]},
        {"seed": 3, "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "verbosity": "low"},
        {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0},
        {"stream": None, "stream_options": None, "stop": None, "max_tokens": None},
        {"add_generation_prompt": True, "continue_final_message": False, "echo": False},
    ],
)
def test_what_changes_nothing_is_accepted_in_silence(fields: dict[str, Any]) -> None:
    call = read(RunSampling(strict=True), **fields)
    assert (call.overridden, call.unknown) == ((), ())


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("logit_bias", {"50256": -100}),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("temperature", 0),
        ("temperature", 0.0),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}),
        ("guided_json", {"type": "object"}),
        ("guided_choice", ["a", "b"]),
        ("structured_outputs", {"regex": "a"}),
        ("regex", "a+"),
        ("min_tokens", 5),
        ("ignore_eos", True),
        ("parallel_tool_calls", False),
    ],
)
def test_what_would_only_steer_the_sampler_is_left_aside_and_said_or_refused_by_a_strict_run(param: str, value: Any) -> None:
    assert read(tools=[TOOL], **{param: value}).overridden == (param,)
    refuses_with_a_way_out(RunSampling(strict=True), param, value)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 8),
        ("n", True),
        ("best_of", 2),
        ("functions", [{"name": "look"}]),
        ("function_call", {"name": "look"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("web_search_options", {}),
        ("top_logprobs", 5),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
    ],
)
def test_what_no_answer_can_have_is_refused_with_the_way_out(param: str, value: Any) -> None:
    refuses_with_a_way_out(RunSampling(), param, value)


def refuses_with_a_way_out(sampling: RunSampling, param: str, value: Any) -> None:
    refused = refusal(sampling, tools=[TOOL], **{param: value})
    assert (refused.status, refused.code, refused.param) == (400, "unsupported_value", param)
    assert len(refused.text.split(". ")) >= 2


@pytest.mark.parametrize(
    ("choice", "must_call"), [("auto", None), ("required", ""), ({"type": "function", "function": {"name": "look"}}, "look")]
)
def test_a_call_can_be_demanded(choice: Any, must_call: str | None) -> None:
    call = read(tools=[TOOL], tool_choice=choice)
    assert (call.request.must_call, call.request.tools, call.overridden) == (must_call, [TOOL], ())


@pytest.mark.parametrize(
    ("tools", "choice", "text"),
    [
        ([], "required", "no tools are offered"),
        ([TOOL], {"type": "function", "function": {"name": "go"}}, "such as look"),
        ([TOOL], {"type": "allowed_tools"}, "the only kind of tool"),
        ([TOOL], {"type": "function"}, "must be an object"),
    ],
)
def test_a_demand_for_no_tool_is_refused(tools: list[Any], choice: Any, text: str) -> None:
    assert text in refusal(tools=tools, tool_choice=choice).text


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_without_an_opening_chooses_by_itself_and_a_strict_run_says_so(strict: bool) -> None:
    asked = read(tools=[TOOL], tool_choice="required")
    if strict:
        with pytest.raises(CallRefused, match="ask for the call in the prompt"):
            without_demand(asked, strict=True)
    else:
        freed = without_demand(asked, strict=False)
        assert (freed.request.must_call, freed.overridden) == (None, ("tool_choice",))


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("messages", None),
        ("messages", "hi"),
        ("messages", []),
        ("model", 3),
        ("temperature", "warm"),
        ("temperature", -1),
        ("temperature", True),
        ("top_p", 2),
        ("top_k", 1.5),
        ("top_k", -2),
        ("min_p", "x"),
        ("max_tokens", 0),
        ("max_tokens", 10.0),
        ("max_completion_tokens", True),
        ("stop", 3),
        ("stop", [""]),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", "x" * 257),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", list(range(65))),
        ("stream", "yes"),
        ("logprobs", 5),
        ("stream_options", True),
        ("tools", {"a": 1}),
        ("tools", [TOOL] * 1000),
        ("tool_choice", 5),
        ("tool_choice", "sometimes"),
        ("chat_template_kwargs", ["a"]),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"add_generation_prompt": False}),
        ("chat_template_kwargs", {"not a name": 1}),
        ("reasoning_effort", 3),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(param: str, value: Any) -> None:
    refused = refusal(**{param: value})
    assert (refused.status, refused.code, refused.param) == (400, "invalid_value", param)


@pytest.mark.parametrize("digits", [4300, 4301])
def test_a_number_at_the_limit_of_what_can_be_printed_is_refused_in_few_words(digits: int) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}], "top_p": %s}' % (b"9" * digits)
    with pytest.raises(CallRefused, match=r"top_p must be a number from 0 to 1|not JSON") as caught:
        read_call(decode_body(body), RunSampling(), "tiny")
    assert len(caught.value.text) < 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a": NaN}',
        b'"\xff"',
        b'{"user": "\\ud800"}',
        b'{"user": "\\udc00"}',
        b"[" * 100_000,
        b'{"seed": 1e999}',
    ],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(CallRefused, match="not JSON") as caught:
        decode_body(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(CallRefused, match="the request must be an object"):
        read_call([], RunSampling(), "tiny")


def test_sampling_that_the_run_decides_is_overridden_and_said() -> None:
    call = read(model="gpt-4o", temperature=0.7, top_p=0.9, top_k=50, min_p=0.1, tools=[strict_tool()])
    assert call.overridden == ("model", "temperature", "top_p", "top_k", "min_p", "tools.strict")


def test_an_agent_that_asks_for_the_runs_own_sampling_is_not_overridden() -> None:
    assert read(RunSampling(temperature=0.7), temperature=0.7).overridden == ()
    # An evaluation may take the likeliest tokens.
    assert read(RunSampling(temperature=0.0, strict=True), temperature=0).overridden == ()


def strict_tool() -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "strict": True}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"temperature": 0.7}, "temperature"), ({"top_p": 0.5}, "top_p"), ({"tools": [strict_tool()]}, "tools.strict")],
)
def test_a_strict_run_refuses_what_it_would_override(fields: dict[str, Any], param: str) -> None:
    refused = refusal(RunSampling(strict=True), **fields)
    assert (refused.status, refused.param) == (400, param)


def test_a_strict_run_has_one_model() -> None:
    refused = refusal(RunSampling(strict=True), model="gpt-4o")
    assert (refused.status, refused.code) == (404, "model_not_found")


def test_fields_that_nobody_knows_are_ignored_and_listed() -> None:
    call = read(some_day="x", nothing=None, messages=[{**USER, "cache_control": {"type": "ephemeral"}}])
    assert call.unknown == ("some_day", "messages[].cache_control")


def test_a_call_comes_out_in_one_form() -> None:
    call = read(
        max_tokens=100,
        max_completion_tokens=50,
        stop="END",
        stop_token_ids=[5, 6],
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False},
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        logprobs=True,
    )
    request = call.request
    assert request.max_tokens == 50
    assert (request.stop, request.stop_token_ids) == (("END",), (5, 6))
    assert request.template_arguments == {"reasoning_effort": "low", "enable_thinking": False}
    assert call.stream
    assert read(stop=["a", "b"]).request.stop == ("a", "b")


def test_a_huge_limit_is_as_good_as_none_that_is_reached() -> None:
    assert read(max_tokens=10**30).request.max_tokens == 2**31 - 1
    assert read().request.max_tokens is None


def test_an_agent_that_wants_no_tool_called_shows_none() -> None:
    assert read(tools=[TOOL], tool_choice="none").request.tools == []
    assert read(tools=[TOOL]).request.tools == [TOOL]

"""SDKs and frameworks in their first form, with nothing but the episode's base_url and api_key."""

from typing import Any

import pytest

from gspo_services.rollout.episodes.fingerprints import message_key, message_keys, prompt_setting
from gspo_services.rollout.episodes.history import Conversation, Histories
from tests.frameworks.played import QUIET, Dialogue, reply_of, stage

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1200)]

TOTAL = '{"total": 7}'
FORMS = {
    "sdks:openai_chat": "7",
    "sdks:openai_chat_stream": "7",
    "sdks:openai_chat_parse": TOTAL,
    "sdks:openai_chat_tools": "7",
    "sdks:openai_responses": "7",
    "sdks:openai_responses_stream": "7",
    "sdks:openai_responses_parse": TOTAL,
    "sdks:openai_responses_tools": "7",
    "sdks:openai_responses_previous": "7",
    "sdks:anthropic_messages": "7",
    "sdks:anthropic_stream": "7",
    "sdks:anthropic_count_tokens": "7",
    "sdks:anthropic_parse": TOTAL,
    "sdks:anthropic_tool_runner": "7",
    "sdks:litellm_completion": "7",
    "sdks:litellm_greedy": "7",
    "sdks:litellm_stream": "7",
    "sdks:litellm_format": TOTAL,
    "sdks:litellm_responses": "7",
    "sdks:litellm_anthropic": "7",
    "sdks:instructor_tools": TOTAL,
    "sdks:instructor_json": TOTAL,
    "sdks:instructor_anthropic": TOTAL,
    "frameworks:agents_default": "7",
    "frameworks:agents_chat": "7",
    "frameworks:agents_output_type": TOTAL,
    "frameworks:agents_tool_choice": "7",
    "frameworks:agents_handoff": "7",
    "frameworks:agents_streamed": "7",
    "frameworks:pydantic_tools": "7",
    "frameworks:pydantic_output": TOTAL,
    "frameworks:pydantic_native": TOTAL,
    "frameworks:pydantic_prompted": TOTAL,
    "frameworks:pydantic_responses": "7",
    "frameworks:pydantic_responses_output": TOTAL,
    "frameworks:pydantic_stream": "7",
    "frameworks:smol_code": "Thought: easy.\n<code>\nfinal_answer(look('fig'))\n</code>",
    "frameworks:smol_tools": "7",
    "frameworks:langchain_chat": "7",
    "frameworks:langchain_stream": "7",
    "frameworks:langchain_structured": TOTAL,
    "frameworks:langchain_structured_by_tool": TOTAL,
    "frameworks:langchain_responses": "7",
    "frameworks:langgraph_react": "7",
    "frameworks:langgraph_format": TOTAL,
    "frameworks:langgraph_responses": "7",
    "frameworks:langchain_anthropic": "7",
    "frameworks:langchain_anthropic_structured": TOTAL,
    "frameworks:langgraph_anthropic": "7",
}
"""What the policy says in the end, by form."""
REFUSED = {
    "sdks:openai_computer_use": 'tools[0].type must be "function", the only kind of tool that this endpoint has',
    "sdks:anthropic_computer_use": 'tools[0].type must be "custom", the only kind of tool that this endpoint has',
}
"""Forms that the endpoint cannot answer, and what their errors say."""
SEVERAL = {
    "frameworks:smol_tools": 2,
    "frameworks:langgraph_format": 2,
    "frameworks:agents_handoff": 2,
    "sdks:anthropic_count_tokens": 0,
}
"""Sequences of the forms that are not one: smolagents writes earlier calls as text, and a handoff has other tools."""


def sequences_of(dialogue: Dialogue) -> int:
    """How many sequences the calls of an episode are: each that does not go on from an answer is one more."""
    histories, count = Histories(), 0
    for number, request in enumerate(dialogue.requests):
        keys, setting = message_keys(request.messages), prompt_setting(request)
        found = histories.continued(keys, setting)
        count += not found
        at = found[0][0] if found else number
        histories.answered(at, Conversation(path=(*keys, message_key(said_by(dialogue, number))), setting=setting))
    return count


def said_by(dialogue: Dialogue, number: int) -> dict[str, Any]:
    said = dialogue.answers[number]
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in said.tool_calls
    ]
    return {"role": "assistant", "content": said.content, "tool_calls": calls}


async def test_first_forms_work_talk_to_nobody_else_and_go_on_from_their_answers() -> None:
    dialogues = {form: Dialogue(reply_of(FORMS.get(form, TOTAL))) for form in (*FORMS, *REFUSED)}
    failed, sequences = {}, {}
    async with stage("tests.frameworks.forms.agent:solve", "forms", calls=dialogues, environment=QUIET) as at:
        for form, dialogue in dialogues.items():
            result = await at.play({"form": form, "question": "What is fig?", "answer": "7"}, form)
            if result.reward != 1.0:
                failed[form] = result.detail
            sequences[form] = sequences_of(dialogue)
    assert failed.keys() == REFUSED.keys(), failed
    assert [form for form, text in REFUSED.items() if text not in failed[form]] == []
    assert {form: count for form, count in sequences.items() if form in FORMS and count != 1} == SEVERAL

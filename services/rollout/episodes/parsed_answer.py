"""Turns sampled ids into the agent's answer, the same each time."""

from gspo_services.rollout.endpoint import CallAnswer, CallRequest, FinishReason, ToolCall
from gspo_services.rollout.episodes.fingerprints import MessageKey, message_key
from gspo_services.rollout.episodes.log import Round
from gspo_services.rollout.episodes.records import CallRecord
from gspo_services.rollout.rendering import Renderer, without_stop


def answer_of(
    renderer: Renderer, request: CallRequest, record: CallRecord, part: Round, *, cut: bool
) -> tuple[CallAnswer, str | None]:
    """Return a complete call's answer, and why a tool call in it is text; ``cut``: the length limit ended it."""
    sampled, prompt = part.action_ids.tolist(), part.prompt_ids.tolist()
    before = len(prompt) - record.opening
    written = [*prompt[before:], *sampled]
    parsed = renderer.parse(written, request.tools, request.template_arguments, prompt[:before])
    parsed = without_stop(parsed, request.stop)
    calls = [
        ToolCall(id=f"call_{record.id}_{index}", name=call.name, arguments=call.arguments_json)
        for index, call in enumerate(parsed.tool_calls)
    ]
    reason: FinishReason = "stop"
    if cut:
        reason = "length"
    elif calls:
        reason = "tool_calls"
    answer = CallAnswer(
        id=record.id,
        created=record.created,
        content=None if calls and not parsed.content else parsed.content,
        reasoning=parsed.reasoning,
        tool_calls=calls,
        finish_reason=reason,
        prompt_tokens=len(prompt),
        token_ids=sampled,
        tokens=[renderer.text([token]) for token in sampled],
        logprobs=part.logprobs.tolist(),
    )
    return answer, parsed.problem


def answer_key(answer: CallAnswer) -> MessageKey:
    """Return the key of the answer as a client repeats it in its next request."""
    calls = [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in answer.tool_calls]
    said = {"role": "assistant", "content": answer.content, "tool_calls": calls, "reasoning_content": answer.reasoning}
    return message_key(said)

"""Turns the body of a response's request into a CallRequest, or refuses it and names the faulty field."""

from typing import Any, Final

from gspo_services.rollout.endpoint.asked import AgentCall
from gspo_services.rollout.endpoint.calls import CallRequest
from gspo_services.rollout.endpoint.chat import WITHOUT_EFFECT, read_choice
from gspo_services.rollout.endpoint.fields import Fields
from gspo_services.rollout.endpoint.responses.answers import Echo, ResponseWriter
from gspo_services.rollout.endpoint.responses.items import messages_of, refuse_stored
from gspo_services.rollout.endpoint.responses.kept import KeptResponses
from gspo_services.rollout.endpoint.sampling import RunSampling, overridden_sampling, overridden_tools
from gspo_services.rollout.endpoint.tools import MAX_TOOLS, CheckedTools, flat
from gspo_services.rollout.endpoint.untrainable import plain_format

_WITHOUT_EFFECT: Final = (*WITHOUT_EFFECT, "truncation", "max_tool_calls", "stream_options", "context_management")
_LOGPROBS: Final = "message.output_text.logprobs"


def read_response(plain: object, sampling: RunSampling, model: str, kept: KeptResponses) -> AgentCall:
    """``kept``: the episode's earlier responses, which get this one. Raises: CallRefused, status 400 or 404."""
    fields = Fields(plain)
    refuse_stored(fields)
    overridden = overridden_sampling(fields, sampling, model)
    tools = CheckedTools(fields.items("tools", most=MAX_TOOLS) or [], "tools", flat)
    one = "parallel_tool_calls" if fields.flag("parallel_tool_calls") is False else ""
    overridden += overridden_tools(tools, one_at_a_time=one, sampling=sampling)
    choice = read_choice(fields, tools)
    text = Fields(fields.value("text") or {}, "text")
    text.value("verbosity")
    overridden += plain_format("text.format", text.value("format"), strict=sampling.strict)
    previous = fields.text("previous_response_id")
    messages, unknown = messages_of(fields, [] if previous is None else kept.conversation(previous))
    request = CallRequest(
        messages=messages,
        tools=tools.tools if choice.may_call else [],
        must_call=choice.must_call,
        max_tokens=fields.count("max_output_tokens", lowest=1),
        template_arguments=_effort(fields),
    )
    stream, logprobs = bool(fields.flag("stream")), _LOGPROBS in (fields.items("include") or [])
    store = fields.flag("store") is not False
    for name in _WITHOUT_EFFECT:
        fields.value(name)
    echo = Echo(
        model=model,
        instructions=fields.text("instructions"),
        max_output_tokens=request.max_tokens,
        previous_response_id=previous,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        store=store,
        tools=fields.items("tools") or [],
    )
    return AgentCall(
        request=request,
        stream=stream,
        writer=ResponseWriter(echo, messages, kept if store else None, logprobs=logprobs),
        overridden=tuple(overridden),
        unknown=(*fields.unknown, *sorted(unknown)),
    )


def _effort(fields: Fields) -> dict[str, Any]:
    """Return the effort as a variable of the template, as for chat completions."""
    asked = Fields(fields.value("reasoning") or {}, "reasoning")
    effort = asked.text("effort")
    return {} if effort is None else {"reasoning_effort": effort}
